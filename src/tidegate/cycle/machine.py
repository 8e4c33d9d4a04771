"""The resumable state machine of one improvement cycle.

``COLLECT -> EXPLORE -> CURATE -> TRAIN -> SCREEN -> CERTIFY -> CANARY -> PUBLISH -> DONE``, or ``REFUSED``,
``ABSTAINED``, ``FAILED``. Each step is a function of the outputs of the steps before it and of the configuration that
was frozen when the cycle opened; its output is recorded once. After a crash the machine runs again from the first
step without a record, and because steps are deterministic it ends as it would have ended. A step that waits for the
world, as a canary waits for users, leaves the cycle open: the run ends as ``WAITING``, and the next one takes the step
again. Knows nothing of stores, engines or training beyond what is passed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from tidegate.core.errors import AdapterError, CommandError, CycleError, EngineError, StoreError, TidegateError
from tidegate.core.types import JsonObject
from tidegate.ports import CycleStore


class Step(StrEnum):
    """Steps in order."""

    COLLECT = "collect"
    EXPLORE = "explore"
    CURATE = "curate"
    TRAIN = "train"
    SCREEN = "screen"
    CERTIFY = "certify"
    CANARY = "canary"
    PUBLISH = "publish"


class CycleOutcome(StrEnum):
    """How a cycle ended; ``waiting`` is no end, the cycle is still open."""

    DONE = "done"
    REFUSED = "refused"
    ABSTAINED = "abstained"
    FAILED = "failed"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step's output (JSON) and, when the run ends here, its outcome and the reasons in words."""

    output: JsonObject
    ends: CycleOutcome | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleEvent:
    """Progress for whoever watches: ``started``, ``progress``, ``finished``, ``waiting`` or ``resumed`` of a step."""

    cycle_id: str
    step: Step
    what: str
    detail: JsonObject = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleResult:
    """How far a run of a cycle came, with the output of every step that ran."""

    cycle_id: str
    outcome: CycleOutcome
    reasons: tuple[str, ...]
    steps: Mapping[str, JsonObject]


Outputs: TypeAlias = Mapping[Step, JsonObject]
Report: TypeAlias = Callable[[JsonObject], None]
StepFunction: TypeAlias = Callable[[JsonObject, Outputs, Report], Awaitable[StepResult]]
"""(frozen configuration, outputs so far, progress callback) -> result."""


_SERVING = (Step.CANARY, Step.PUBLISH)
"""Steps that act on a certificate, which stands whether or not they can be carried out now."""

_PASSING = (CommandError, EngineError, StoreError)
"""Faults of a publication that another try may not meet: a server that restarts, a locked database. A damaged
adapter is an engine's error too, but stays damaged.
"""


async def run_cycle(
    *,
    store: CycleStore,
    steps: Mapping[Step, StepFunction],
    new_cycle_id: Callable[[], str],
    new_config: Callable[[], JsonObject],
    clock: Callable[[], float],
    observe: Callable[[CycleEvent], None] = lambda event: None,
) -> CycleResult:
    """Resume the open cycle, or open one and run it to its end.

    A :class:`TidegateError` of a step closes the cycle as ``failed``, so that the next call starts afresh; a
    publication that could not be carried out stays open, because its certificate stands. The process may be
    killed at any point.

    Raises:
        CycleError: a step failed; the message names the step and the cause.
        ConflictError: another process opened a cycle at the same moment.
    """
    current = store.current()
    if current is None:
        cycle_id, config = new_cycle_id(), new_config()
        store.open_cycle(cycle_id, config=config, time=clock())
    else:
        cycle_id, config = current
    run = _Run(cycle_id=cycle_id, config=config, store=store, clock=clock, observe=observe)
    for step in Step:
        result = await run.step(step, steps[step])
        if result.ends is CycleOutcome.WAITING:
            return run.result(result.ends, result.reasons)
        if result.ends is not None:
            return run.close(result.ends, result.reasons)
    return run.close(CycleOutcome.DONE, ())


@dataclass(slots=True, kw_only=True)
class _Run:
    cycle_id: str
    config: JsonObject
    store: CycleStore
    clock: Callable[[], float]
    observe: Callable[[CycleEvent], None]
    outputs: dict[Step, JsonObject] = field(default_factory=dict[Step, JsonObject])

    async def step(self, step: Step, function: StepFunction) -> StepResult:
        """Take the recorded result of a step, or run it and record what came out."""
        recorded = self.store.steps(self.cycle_id).get(step.value)
        if recorded is not None:
            self._tell(step, "resumed", {})
        else:
            self._tell(step, "started", {})
            recorded = await self._execute(step, function)
            waits = recorded["ends"] == CycleOutcome.WAITING.value
            self._tell(step, "waiting" if waits else "finished", recorded)
        result = _unpack(recorded)
        self.outputs[step] = result.output
        return result

    async def _execute(self, step: Step, function: StepFunction) -> JsonObject:
        """Run a step and record its output and how long it took, unless it waits."""
        started = self.clock()
        try:
            result = await function(self.config, self.outputs, lambda detail: self._tell(step, "progress", detail))
        except TidegateError as error:
            if step in _SERVING and isinstance(error, _PASSING) and not isinstance(error, AdapterError):
                raise CycleError(
                    f"cycle {self.cycle_id!r} could not publish what was certified: {error}; the promotion stands, run "
                    "'tidegate cycle run' again to go on"
                ) from error
            reason = f"{step.value}: {error}"
            now = self.clock()
            self.store.finish_step(
                self.cycle_id, f"{step.value}_error", {"error": reason, "code": error.code}, time=now
            )
            self.store.close_cycle(self.cycle_id, CycleOutcome.FAILED.value, time=now)
            raise CycleError(f"cycle {self.cycle_id!r} failed in step {reason}") from error
        if result.ends is CycleOutcome.WAITING:
            return _pack(result, self.clock() - started)
        now = self.clock()
        self.store.finish_step(self.cycle_id, step.value, _pack(result, now - started), time=now)
        # What the store kept is what counts: after a race the first output stands.
        return self.store.steps(self.cycle_id)[step.value]

    def close(self, outcome: CycleOutcome, reasons: tuple[str, ...]) -> CycleResult:
        """Record how the cycle ended."""
        self.store.close_cycle(self.cycle_id, outcome.value, time=self.clock())
        return self.result(outcome, reasons)

    def result(self, outcome: CycleOutcome, reasons: tuple[str, ...]) -> CycleResult:
        """How far the run came."""
        outputs = {step.value: output for step, output in self.outputs.items()}
        return CycleResult(cycle_id=self.cycle_id, outcome=outcome, reasons=reasons, steps=outputs)

    def _tell(self, step: Step, what: str, detail: JsonObject) -> None:
        self.observe(CycleEvent(cycle_id=self.cycle_id, step=step, what=what, detail=detail))


def _pack(result: StepResult, seconds: float) -> JsonObject:
    return {
        "seconds": seconds,
        "output": dict(result.output),
        "ends": result.ends.value if result.ends else None,
        "reasons": list(result.reasons),
    }


def _unpack(record: JsonObject) -> StepResult:
    ends = record["ends"]
    return StepResult(
        output=record["output"],
        ends=CycleOutcome(ends) if ends else None,
        reasons=tuple(record["reasons"]),
    )
