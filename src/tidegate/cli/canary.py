"""``canary status|stop``."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit, say

canary = typer.Typer(help="A certified candidate before a share of the users.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.add_typer(canary, name="canary")


@canary.command("status")
def status(context: typer.Context, as_json: Json = False) -> None:
    """The trial on live traffic that runs, or the last one: a canary, or the holdback beside the champion."""
    from tidegate.app.operations import show_trial

    with boundary():
        emit(show_trial(settings_of(context)), as_json=as_json)


@canary.command("stop")
def stop(
    context: typer.Context,
    reason: Annotated[str, typer.Option("--reason", help="Goes into the audit log.")] = "asked for by an operator",
    as_json: Json = False,
) -> None:
    """End the canary that runs; its users go back to the champion, its candidate is rejected."""
    from tidegate.app.operations import stop_canary

    with boundary():
        result = asyncio.run(stop_canary(settings_of(context), reason))
        say(f"the canary {result['subject']} has ended; everybody is served by {result['control']}")
        emit(result, as_json=as_json)
