"""``lab bandit|collapse``: learning, and one way it fails, where they can be watched in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit, emit_table, say
from tidegate.core.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.lab.collapse import CollapseRun

lab = typer.Typer(help="Small experiments that need neither a model nor traffic.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.add_typer(lab, name="lab")


@lab.command("bandit")
def bandit(
    seed: Annotated[int, typer.Option("--seed", help="Seed of noise and draws.")] = 42,
    steps: Annotated[int, typer.Option("--steps", help="Updates of the policy.")] = 100,
    group_size: Annotated[int, typer.Option("--group-size", help="Arms drawn a step (K).")] = 4,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 0.15,
    eps: Annotated[float, typer.Option("--eps", help="Clip range of the probability ratio.")] = 0.2,
    baseline: Annotated[
        Literal["mean", "none"],
        typer.Option("--baseline", help="Subtracted from a reward: its group's mean, or nothing."),
    ] = "mean",
    scale: Annotated[
        Literal["group", "none"],
        typer.Option("--scale", help="What advantages are divided by: the group's standard deviation, or nothing."),
    ] = "none",
    exact: Annotated[bool, typer.Option("--exact", help="Don't round advantages to three decimals.")] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Write the curve to this file too.")] = None,
    as_json: Json = False,
) -> None:
    """Run GRPO on a bandit with four arms; the defaults are those of the reference."""
    from tidegate.lab.bandit import BanditOptions, Step, condensed, run_bandit
    from tidegate.lab.curve import draw_png, draw_terminal

    with boundary():
        options = BanditOptions(
            seed=seed,
            steps=steps,
            group_size=group_size,
            lr=lr,
            eps=eps,
            baseline=baseline,
            scale=scale,
            rounded=not exact,
        )
        done = run_bandit(options)
        if png is not None:
            draw_png(done, png)
        if as_json:
            emit({"options": asdict(options), "steps": [asdict(step) for step in done]}, as_json=True)
            return
        columns = [field.name.replace("_", " ") for field in fields(Step)]
        emit_table(columns, [astuple(step) for step in condensed(done)], as_json=False)
        try:
            print("\n" + draw_terminal(done))
        except ConfigError as error:
            say(f"no curve: {error}")


@lab.command("collapse")
def collapse(
    context: typer.Context,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each curation, with seeds 0, 1, ...")] = 5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Windows of traffic, each trained on.")] = 20,
    as_json: Json = False,
) -> None:
    """Train a small policy on its own successes under three curations, and let the gate's collapse tests look at it."""
    from tidegate.app.laboratory import collapse as runs_of

    with boundary():
        runs = runs_of(settings_of(context), seeds=range(seeds), rounds=rounds)
        if as_json:
            emit({"rounds": rounds, "runs": [_values(run) for run in runs]}, as_json=True)
            return
        columns = ("seed", "curation", "traffic success", "held-out success", "strategies", "alarms")
        emit_table(columns, [_row(run) for run in runs], as_json=False)
        print()
        columns = ("curation", "runs with an alarm", "traffic success", "held-out success", "strategies")
        emit_table(columns, _means(runs), as_json=False)


def _values(run: CollapseRun) -> dict[str, Any]:
    alarms = [{**asdict(alarm), "fires": alarm.fires} for alarm in run.alarms]
    return {**asdict(run), "alarms": alarms}


def _row(run: CollapseRun) -> list[Any]:
    first, last = astuple(run.standings[0]), astuple(run.standings[-1])
    moves = [f"{before:.3f} -> {after:.3f}" for before, after in zip(first, last, strict=True)]
    return [run.seed, run.curation, *moves, ", ".join(run.firing) or "none"]


def _means(runs: Sequence[CollapseRun]) -> list[list[Any]]:
    """A row for each curation, means over its runs."""
    rows: list[list[Any]] = []
    for name in dict.fromkeys(run.curation for run in runs):
        own = [run for run in runs if run.curation == name]
        columns = zip(*(astuple(run.standings[-1]) for run in own), strict=True)
        means = [f"{sum(column) / len(own):.3f}" for column in columns]
        rows.append([name, f"{sum(bool(run.firing) for run in own)} of {len(own)}", *means])
    return rows
