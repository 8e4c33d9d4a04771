"""Choosing, on dev users' tasks, how much of the way from the champion to the challenger is proposed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidegate.core.types import Answer, Episode, JsonObject, Task
from tidegate.cycle.machine import Report
from tidegate.cycle.stages import CycleStages, arm_of, progress_of, traffic_decoding
from tidegate.gate.arms import loaded
from tidegate.gate.asking import ask, seeded
from tidegate.gate.evaluate import SamplingOf
from tidegate.training import Score, ScoringJob, average_adapters, score_sequences

MAX_FAULT_SHARE = 0.2
"""Largest share of dev tasks that some candidate's answer to was cut short; above it too few are left to choose on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenShare:
    """The content hash of the adapter that is proposed, and what was measured, as the step's output has it."""

    adapter_sha256: str
    measured: JsonObject


async def choose_share(
    stages: CycleStages, config: JsonObject, *, champion: str, challenger: str, dev: Sequence[Episode], report: Report
) -> ChosenShare:
    """The adapter that solves most dev tasks among the challenger and those between it and the champion.

    Where several solve as many, the one nearest to the champion is taken: it has forgotten least. A task counts when
    every candidate answered it without a fault, so that what breaks for one of them decides nothing. Where faults leave
    too few tasks, or there is none, the challenger itself is proposed.

    Args:
        stages: of the cycle.
        config: frozen; ``training.averaging`` names the shares of the way that are tried besides the whole.
        champion: content hash of the adapter that training started from.
        challenger: content hash of what it made.
        dev: the latest episodes of dev users.
        report: told of each candidate that has answered.
    """
    episodes = {episode.task.id: episode for episode in dev if episode.task is not None}
    tasks = {name: episode.task for name, episode in episodes.items() if episode.task is not None}
    if not tasks:
        return ChosenShare(
            adapter_sha256=challenger, measured={"share": 1.0, "dev_tasks": 0, "why": "no dev tasks to choose on"}
        )
    candidates = await asyncio.to_thread(_candidates, stages, config, champion, challenger)
    sampling = seeded(traffic_decoding([episode for episode in dev if episode.task is not None]), str(config["seed"]))
    answers = await _answers(stages, candidates, list(tasks.values()), sampling, report)
    faults = Counter({share: sum(answer.cut_short for answer in given.values()) for share, given in answers.items()})
    whole = [name for name in tasks if not any(given[name].cut_short for given in answers.values())]
    solved = {share: sum(given[name].passed for name in whole) for share, given in answers.items()}
    measured: dict[str, object] = {
        "dev_tasks": len(tasks),
        "dev_counted": len(whole),
        "dev_solved": {f"{share:g}": count for share, count in sorted(solved.items())},
        "faults": {f"{share:g}": count for share, count in sorted(faults.items()) if count},
    }
    lost = len(tasks) - len(whole)
    if lost > MAX_FAULT_SHARE * len(tasks):
        why = (
            f"faults cut answers to {lost} of {len(tasks)} dev tasks short, more than {MAX_FAULT_SHARE:.0%}: "
            "the challenger itself is proposed"
        )
        return ChosenShare(adapter_sha256=challenger, measured={"share": 1.0, **measured, "why": why})
    best = max(solved, key=lambda share: (solved[share], -share))
    return ChosenShare(adapter_sha256=candidates[best], measured={"share": best, **measured})


def _candidates(stages: CycleStages, config: JsonObject, champion: str, challenger: str) -> dict[float, str]:
    """Content hash by share of the way, the challenger at 1."""
    folder = stages.adapters_dir
    shares = sorted(set(config["training"]["averaging"]))
    between = {
        share: average_adapters(
            folder / champion, folder / challenger, folder, share=share, score=_scorer(stages, config)
        ).name
        for share in shares
    }
    return {**between, 1.0: challenger}


def _scorer(stages: CycleStages, config: JsonObject) -> Score | None:
    """What the trainer computes with an average, in a process as the run itself had one."""
    if stages.base_model is None:
        return None
    settings = stages.settings.training.model_validate(config["training"])
    job = ScoringJob(
        base_model=stages.base_model,
        base_sha256=stages.base_sha256,
        adapter=None,
        dtype=settings.dtype,
        threads=stages.settings.model.threads,
        temperature=1.0,
        sequences=(),
    )

    def score(adapter: Path, sequences: Sequence[tuple[tuple[int, ...], int]]) -> Sequence[Sequence[float]]:
        return score_sequences(replace(job, adapter=adapter, sequences=tuple(sequences)), timeout_s=settings.timeout_s)

    return score


async def _answers(
    stages: CycleStages, candidates: Mapping[float, str], tasks: Sequence[Task], sampling: SamplingOf, report: Report
) -> dict[float, dict[str, Answer]]:
    """Each candidate's answers by task id, candidates by share."""

    async def keep(answer: Answer) -> None:
        del answer

    answers: dict[float, dict[str, Answer]] = {}
    async with stages.open_engine() as engine:
        for share, sha256 in sorted(candidates.items()):
            arm = arm_of(stages, sha256)
            async with loaded(engine, arm):
                answers[share] = await ask(engine, arm, tasks, sampling=sampling, grading=stages.grading, keep=keep)
            progress_of(report)(f"averaging {share:g}", len(answers), len(candidates))
    return answers
