"""Collecting answers: those to sealed tasks are kept for as long as their epoch and asked only once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tidegate.core.gate.policy import CollapseRules
from tidegate.core.gate.samples import SampleEvidence, measure_samples, sampled_tasks
from tidegate.core.gate.state import Epoch
from tidegate.core.types import Answer, Task
from tidegate.gate.arms import Arm
from tidegate.gate.asking import ask, ask_episodes, decoding_from_json, seeded
from tidegate.gate.evaluate import Evaluated, Grading, SamplingOf
from tidegate.ports import Engine, SealedStore

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Told the arm's name, its answers so far, and how many are wanted."""


class Collector:
    """Asks arms that the engine has loaded."""

    def __init__(self, engine: Engine, sealed: SealedStore, grading: Grading, on_progress: OnProgress) -> None:
        """Ask ``engine``, score with ``grading``, keep in ``sealed``, and tell ``on_progress`` about answers."""
        self._engine = engine
        self._sealed = sealed
        self._grading = grading
        self._on_progress = on_progress

    async def answers(
        self,
        name: str | None,
        arm: Arm,
        tasks: Sequence[Task],
        sampling: SamplingOf,
        *,
        epoch_id: str | None = None,
        sample: int = 0,
    ) -> dict[str, Answer]:
        """An arm's answers by task id.

        Args:
            name: of the arm, for progress; None tells nobody.
            arm: who answers.
            tasks: what is asked.
            sampling: decoding settings of each call.
            epoch_id: of sealed tasks; their answers are kept, and those that were kept are not asked for again.
            sample: number of the answers.
        """
        kept: dict[str, Answer] = {}
        if epoch_id is not None:
            found = await asyncio.to_thread(lambda: self._sealed.answers(epoch_id, arm.sha256, sample=sample))
            kept = {task.id: found[task.id] for task in tasks if task.id in found}
        done = len(kept)

        async def keep(answer: Answer) -> None:
            nonlocal done
            if epoch_id is not None:
                await asyncio.to_thread(self._sealed.save_answers, epoch_id, [answer])
            done += 1
            if name is not None:
                self._on_progress(name, done, len(tasks))

        missing = [task for task in tasks if task.id not in kept]
        asked = await ask(
            self._engine, arm, missing, sampling=sampling, grading=self._grading, keep=keep, sample=sample
        )
        return kept | asked

    async def episodes(self, name: str, arm: Arm, tasks: Sequence[Task], sampling: SamplingOf) -> dict[str, Evaluated]:
        """As :meth:`answers` of tasks that are not sealed, with the calls behind each answer."""
        done = 0

        async def count(answer: Answer) -> None:
            nonlocal done
            done += 1
            self._on_progress(name, done, len(tasks))

        return await ask_episodes(self._engine, arm, tasks, sampling=sampling, grading=self._grading, keep=count)

    async def samples(
        self, challenger: Arm, anchor: Arm, tasks: Sequence[Task], epoch: Epoch, rules: CollapseRules
    ) -> SampleEvidence:
        """Several answers of both arms to the tasks that the epoch fixed for it.

        The first sample is the answer that was asked for anyway; the others have seeds of their own, the same ones
        for both arms. Nobody is told of progress: that these answers are asked for shows that all else was passed.
        """
        chosen = sampled_tasks((task.id for task in tasks), commitment=epoch.commitment, limit=rules.tasks)
        asked = [task for task in tasks if task.id in set(chosen)]
        decoding = decoding_from_json(epoch.decoding)
        samples: dict[str, list[dict[str, Answer]]] = {"challenger": [], "anchor": []}
        for name, arm in (("challenger", challenger), ("anchor", anchor)):
            for sample in range(rules.samples):
                seed = epoch.commitment if sample == 0 else f"{epoch.commitment}\nsample {sample}"
                samples[name].append(
                    await self.answers(None, arm, asked, seeded(decoding, seed), epoch_id=epoch.id, sample=sample)
                )
        return measure_samples(chosen, **samples)
