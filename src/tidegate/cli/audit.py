"""``audit verify|export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit

audit = typer.Typer(help="The append-only record of every decision and move.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.add_typer(audit, name="audit")


@audit.command("verify")
def verify(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Option("--file", help="An exported log instead of the data directory's own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Recompute the chain and every decision; exit code 1 at the first difference."""
    from tidegate.app.operations import verify_audit_log

    with boundary():
        emit(verify_audit_log(settings_of(context), file), as_json=as_json)


@audit.command("export")
def export(context: typer.Context) -> None:
    """Print the log, one JSON object a line."""
    from tidegate.app.operations import audit_lines

    with boundary():
        for line in audit_lines(settings_of(context)):
            print(line)
