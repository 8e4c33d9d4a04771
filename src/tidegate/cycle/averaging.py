"""Choosing, on dev users' tasks, how much of the way from the champion to the challenger is proposed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidegate.core.types import Answer, Episode, JsonObject
from tidegate.cycle.machine import Report
from tidegate.cycle.stages import CycleStages, arm_of, progress_of, traffic_decoding
from tidegate.gate.arms import loaded
from tidegate.gate.asking import ask, seeded
from tidegate.training import average_adapters


async def averaged(
    stages: CycleStages, config: JsonObject, *, champion: str, challenger: str, dev: Sequence[Episode], report: Report
) -> tuple[str, JsonObject]:
    """The adapter that solves most dev tasks among the challenger and those between it and the champion.

    Where several solve as many, the one nearest to the champion is taken: it has forgotten least.

    Args:
        stages: of the cycle.
        config: frozen; ``training.averaging`` names the shares of the way that are tried besides the whole.
        champion: content hash of the adapter that training started from.
        challenger: content hash of what it made.
        dev: the latest episodes of dev users.
        report: told of answers.

    Returns:
        The content hash of what is proposed, and what was measured, for the step's output.
    """
    tasks = {episode.task.id: episode.task for episode in dev if episode.task is not None}
    if not tasks:
        return challenger, {"share": 1.0, "why": "no dev tasks to choose on"}
    candidates = {1.0: challenger}
    for share in sorted(set(config["training"]["averaging"]) - {1.0}):
        path = await asyncio.to_thread(
            average_adapters,
            stages.adapters_dir / champion,
            stages.adapters_dir / challenger,
            stages.adapters_dir,
            share=share,
        )
        candidates[share] = path.name
    sampling = seeded(traffic_decoding([episode for episode in dev if episode.task is not None]), str(config["seed"]))
    solved: dict[float, int] = {}

    async def keep(answer: Answer) -> None:
        del answer

    async with stages.open_engine() as engine:
        for share, sha256 in sorted(candidates.items()):
            arm = arm_of(stages, sha256)
            async with loaded(engine, arm):
                answers = await ask(
                    engine, arm, list(tasks.values()), sampling=sampling, grading=stages.grading, keep=keep
                )
            solved[share] = sum(answer.passed for answer in answers.values())
            progress_of(report)(f"averaging {share:g}", len(solved), len(candidates))
    best = max(sorted(solved), key=lambda share: (solved[share], -share))
    measured = {f"{share:g}": count for share, count in sorted(solved.items())}
    return candidates[best], {"share": best, "dev_solved": measured, "dev_tasks": len(tasks)}
