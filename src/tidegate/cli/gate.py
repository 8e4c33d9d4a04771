"""``gate plan|simulate``: what a gate policy costs, and how often it errs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit

if TYPE_CHECKING:
    from tidegate.core.gate.simulation import Table

gate = typer.Typer(
    help="What the gate costs, how often it errs, why it decided as it did, and what people may do to it.",
    no_args_is_help=True,
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@gate.command("plan")
def plan(
    context: typer.Context,
    gain: Annotated[float, typer.Option("--gain", help="True difference of success rates to be shown (0.03 = 3 pp).")],
    discordance: Annotated[
        float, typer.Option("--discordance", help="Share of tasks on which challenger and champion differ.")
    ] = 0.14,
    power: Annotated[float, typer.Option("--power", help="Wanted chance to show the gain.")] = 0.9,
    level: Annotated[
        float | None, typer.Option("--level", help="One-sided level (default: first look of a window of the policy).")
    ] = None,
    pairs_per_week: Annotated[
        float | None, typer.Option("--pairs-per-week", help="Sealed tasks of different users that a week brings.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How many pairs and weeks a gain takes under the policy of the settings."""
    from tidegate.app.planning import PlanOptions
    from tidegate.app.planning import plan as plan_of

    with boundary():
        options = PlanOptions(
            gain=gain, discordance=discordance, power=power, level=level, pairs_per_week=pairs_per_week
        )
        emit(plan_of(settings_of(context), options), as_json=as_json)


@gate.command("simulate")
def simulate(
    context: typer.Context,
    windows: Annotated[
        int, typer.Option("--windows", min=1, help="Windows of looks, and canaries; streams in proportion.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all random numbers.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure how often the policy's rules err, and other rules on the same streams; prints Markdown tables."""
    from tidegate.app.planning import simulate as tables_of

    with boundary():
        made = tables_of(settings_of(context), windows=windows, seed=seed)
        if as_json:
            tables = [{"name": name, **asdict(table)} for name, table in made]
            emit({"windows": windows, "seed": seed, "tables": tables}, as_json=True)
            return
        print(f"{windows} windows, seed {seed}")
        for _, table in made:
            print("\n" + markdown(table), flush=True)


def markdown(table: Table) -> str:
    """A table for people and for a page."""
    lines = [list(table.columns), ["---"] * len(table.columns), *[[_cell(cell) for cell in row] for row in table.rows]]
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{table.title}.** {table.notes}\n\n{shown}"


def _cell(cell: str | float | None) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3f}" if abs(cell) < 1 else f"{cell:.2f}"
