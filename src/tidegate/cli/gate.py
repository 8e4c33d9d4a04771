"""``gate plan``: what a gate policy costs."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit

gate = typer.Typer(
    help="What the gate costs, why it decided as it did, and what people may do to it.", no_args_is_help=True
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
