"""Canary prompts: fixed tasks whose answers never change, asked greedily of a canary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidegate.core.types import Release, Sampling, Task
from tidegate.gate import Grading, evaluate
from tidegate.gate.asking import seeded
from tidegate.ports import Engine
from tidegate.release import Router

_GREEDY: Final = Sampling(temperature=0.0)


class CanaryPrompts:
    """Asks through the serving engine.

    Args:
        tasks: what is asked; their ids are the prompts' names.
        engine: has every routed release loaded.
        router: knows the engine's name of a release.
        grading: limits, verifiers and environments.
    """

    def __init__(self, tasks: list[Task], *, engine: Engine, router: Router, grading: Grading) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._engine = engine
        self._router = router
        self._grading = grading

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self._tasks)

    async def ask(self, release: Release, wanted: frozenset[str]) -> Mapping[str, bool]:
        """Whether each was answered rightly; one that an engine error cut short is left out and asked again.

        Raises:
            GateError: a task needs a verifier or environment that is not registered.
        """
        routed = {known.release_id: known for known in self._router.loaded()}.get(release.id)
        if routed is None:
            return {}
        with self._router.lease(release.id):
            answers = await evaluate(
                self._engine,
                routed.adapter,
                release.adapter_sha256 or release.base_sha256,
                [self._tasks[name] for name in sorted(wanted)],
                sampling=seeded(_GREEDY, "canary prompts"),
                grading=self._grading,
            )
        return {answer.task_id: answer.passed for answer in answers if not answer.cut_short}
