"""``releases list|show|promote|rollback``."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit, emit_table, say
from tidegate.cli.running import run_until_interrupted

releases = typer.Typer(help="What is served, and what was.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReleaseId = Annotated[str, typer.Argument(help="Release id, as 'releases list' shows it.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.add_typer(releases, name="releases")


@releases.command("list")
def list_releases(context: typer.Context, as_json: Json = False) -> None:
    """All releases by number, with the aliases that point at them."""
    from tidegate.app.operations import list_releases as rows_of

    with boundary():
        rows = rows_of(settings_of(context))
        emit_table(("id", "aliases", "adapter", "certificate", "restores", "created_at"), rows, as_json=as_json)


@releases.command("show")
def show(context: typer.Context, release: ReleaseId, as_json: Json = False) -> None:
    """One release with its certificate, and whether that verifies."""
    from tidegate.app.operations import show_release

    with boundary():
        emit(show_release(settings_of(context), release), as_json=as_json)


@releases.command("promote")
def promote(context: typer.Context, release: ReleaseId, as_json: Json = False) -> None:
    """Serve the certified content of an earlier release again, as a new release."""
    from tidegate.app.operations import promote_release

    with boundary():
        result = run_until_interrupted(promote_release(settings_of(context), release))
        say(f"serving {result['id']}")
        emit(result, as_json=as_json)


@releases.command("rollback")
def rollback(
    context: typer.Context,
    to: Annotated[str | None, typer.Option("--to", help="Release to restore (default: the previous one).")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Goes into the audit log.")] = "asked for by an operator",
    as_json: Json = False,
) -> None:
    """Serve the previous champion's content again, as a new release."""
    from tidegate.app.operations import rollback_release

    with boundary():
        result = run_until_interrupted(rollback_release(settings_of(context), to, reason))
        say(f"serving {result['id']}, which restores {result['restores']}")
        emit(result, as_json=as_json)
