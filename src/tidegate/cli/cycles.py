"""``cycle run|list|abandon|show|report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import EXIT_ABSTAINED, EXIT_REFUSED, boundary, emit, emit_table, say
from tidegate.cli.running import run_until_interrupted

cycle = typer.Typer(
    help="Improvement cycles: collect, explore, curate, train, screen, certify, canary, publish.", no_args_is_help=True
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_EXIT_CODES = {"done": 0, "refused": EXIT_REFUSED, "abstained": EXIT_ABSTAINED, "waiting": EXIT_ABSTAINED, "failed": 1}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.add_typer(cycle, name="cycle")


@cycle.command("run")
def run(
    context: typer.Context,
    candidate: Annotated[
        Path | None, typer.Option("--candidate", help="Judge this adapter directory instead of training one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events and the result as JSON lines.")] = False,
) -> None:
    """Run one cycle, or go on with the one that was interrupted.

    Exit code 0: a new release is served; 3: the gate refused; 4: not enough evidence, or a canary runs and the cycle
    waits for it; 1: failed.
    """
    from tidegate.app.learning import run_one_cycle

    def observe(event: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(event, ensure_ascii=False, default=str), flush=True)
        elif event["what"] != "progress" or "note" in event["detail"]:
            say(_sentence(event))

    with boundary():
        result = run_until_interrupted(run_one_cycle(settings_of(context), candidate=candidate, observe=observe))
        if as_json:
            print(json.dumps({"what": "result", **result}, ensure_ascii=False, default=str), flush=True)
        else:
            emit({key: result[key] for key in ("cycle", "outcome", "reasons")}, as_json=False)
    raise typer.Exit(_EXIT_CODES[result["outcome"]])


def _sentence(event: dict[str, Any]) -> str:
    detail = event["detail"]
    text = f"{event['step']:<8} {event['what']}"
    if "seconds" in detail:
        text += f" after {detail['seconds']:.1f} s"
    if "note" in detail:
        return f"{event['step']:<8} {detail['note']}"
    if detail.get("reasons"):
        text += ": " + "; ".join(detail["reasons"])
    return text


@cycle.command("list")
def list_cycles(context: typer.Context, as_json: Json = False) -> None:
    """All cycles and how they ended."""
    from tidegate.app.operations import list_cycles as rows_of

    with boundary():
        rows = rows_of(settings_of(context))
        emit_table(("id", "opened_at", "closed_at", "outcome"), rows, as_json=as_json)


@cycle.command("abandon")
def abandon(context: typer.Context, as_json: Json = False) -> None:
    """End an interrupted cycle without finishing it."""
    from tidegate.app.operations import abandon_cycle

    with boundary():
        emit(abandon_cycle(settings_of(context)), as_json=as_json)


@cycle.command("show")
def show(
    context: typer.Context,
    cycle_id: Annotated[str, typer.Argument(help="Cycle id, as 'cycle list' shows it.")],
    as_json: Json = False,
) -> None:
    """What each step of a cycle put out."""
    from tidegate.app.operations import show_cycle

    with boundary():
        emit(show_cycle(settings_of(context), cycle_id), as_json=as_json)


@cycle.command("report")
def report(
    context: typer.Context,
    cycle_id: Annotated[
        str | None, typer.Argument(help="Cycle id, as 'cycle list' shows it; default: the last one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Why a cycle ended, what it curated, how it trained, and how broad each release was beside the anchor."""
    from tidegate.app.cycle_reports import cycle_report
    from tidegate.cli.cycle_report import print_report

    with boundary():
        made = dict(cycle_report(settings_of(context), cycle_id))
        if as_json:
            emit(made, as_json=True)
        else:
            print_report(made)
