"""The cycle resumes where it stopped and ends as it would have ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tidegate.core.errors import (
    AdapterError,
    CertificateError,
    CommandError,
    ConflictError,
    CycleError,
    EngineBusyError,
    EngineError,
    GateError,
    StoreError,
    TidegateError,
    TrainingError,
)
from tidegate.cycle.machine import CycleEvent, CycleOutcome, Outputs, Report, Step, StepResult, run_cycle
from tidegate.stores.memory import MemoryCycleStore


class Killed(BaseException):
    """Stands for a process that ends between two instructions: nothing may catch it."""


class Script:
    """Steps whose output names the outputs that they saw; the run of step ``dies_in`` ends in the middle, once."""

    def __init__(self, *, dies_in: Step | None = None, ends: Mapping[Step, CycleOutcome] | None = None) -> None:
        self.calls: list[Step] = []
        self.dies_in = dies_in
        self.ends = dict(ends or {})

    def steps(self) -> dict[Step, Any]:
        return {step: self._function(step) for step in Step}

    def _function(self, step: Step) -> Any:
        async def function(config: Mapping[str, Any], outputs: Outputs, report: Report) -> StepResult:
            self.calls.append(step)
            report({"half": step.value})
            if self.dies_in is step:
                self.dies_in = None
                raise Killed
            seen = {earlier.value: output["id"] for earlier, output in outputs.items()}
            output = {"id": f"{step.value}-{config['seed']}", "seen": seen}
            return StepResult(
                output=output, ends=self.ends.get(step), reasons=("because",) if step in self.ends else ()
            )

        return function


class Ids:
    def __init__(self) -> None:
        self.given = 0

    def __call__(self) -> str:
        self.given += 1
        return f"cycle-{self.given}"


async def run(store: MemoryCycleStore, script: Script, ids: Ids, events: list[CycleEvent] | None = None) -> Any:
    return await run_cycle(
        store=store,
        steps=script.steps(),
        new_cycle_id=ids,
        new_config=lambda: {"seed": ids.given},
        clock=lambda: 0.0,
        observe=(events if events is not None else []).append,
    )


async def test_each_step_sees_the_outputs_before_it_and_the_frozen_configuration() -> None:
    store = MemoryCycleStore()
    result = await run(store, Script(), Ids())
    assert result.outcome is CycleOutcome.DONE
    assert list(result.steps) == [step.value for step in Step]
    assert result.steps["publish"]["seen"] == {step.value: f"{step.value}-1" for step in list(Step)[:-1]}
    assert store.current() is None
    assert store.list_cycles()[0]["outcome"] == "done"


async def test_each_step_records_how_long_it_took() -> None:
    store, times = MemoryCycleStore(), iter(float(n * n) for n in range(100))
    events: list[CycleEvent] = []
    await run_cycle(
        store=store, steps=Script().steps(), new_cycle_id=Ids(), new_config=lambda: {"seed": 1},
        clock=lambda: next(times), observe=events.append,
    )  # fmt: skip
    seconds = {name: record["seconds"] for name, record in store.steps("cycle-1").items()}
    assert list(seconds) == [step.value for step in Step]
    assert seconds["collect"] == 4.0 - 1.0
    assert seconds == {event.step.value: event.detail["seconds"] for event in events if event.what == "finished"}


@pytest.mark.parametrize("step", list(Step))
async def test_a_run_that_dies_in_a_step_is_resumed_there_and_ends_the_same(step: Step) -> None:
    undisturbed = await run(MemoryCycleStore(), Script(), Ids())
    store, script, ids = MemoryCycleStore(), Script(dies_in=step), Ids()
    with pytest.raises(Killed):
        await run(store, script, ids)
    assert store.current() is not None
    events: list[CycleEvent] = []
    result = await run(store, script, ids, events)
    assert (result.cycle_id, result.outcome, result.steps) == (
        undisturbed.cycle_id, undisturbed.outcome, undisturbed.steps,
    )  # fmt: skip
    assert [script.calls.count(each) for each in Step] == [2 if each is step else 1 for each in Step]
    assert [event.step for event in events if event.what == "resumed"] == list(Step)[: list(Step).index(step)]


@pytest.mark.parametrize("outcome", [CycleOutcome.REFUSED, CycleOutcome.ABSTAINED])
async def test_a_step_may_end_the_cycle_with_its_reasons(outcome: CycleOutcome) -> None:
    store, script = MemoryCycleStore(), Script(ends={Step.SCREEN: outcome})
    result = await run(store, script, Ids())
    assert (result.outcome, result.reasons) == (outcome, ("because",))
    assert Step.CERTIFY not in script.calls
    assert Step.PUBLISH not in script.calls
    assert store.list_cycles()[0]["outcome"] == outcome.value


async def test_an_error_closes_the_cycle_as_failed_and_the_next_call_starts_afresh() -> None:
    store, ids, script = MemoryCycleStore(), Ids(), Script()
    steps = script.steps()

    async def fails(config: Mapping[str, Any], outputs: Outputs, report: Report) -> StepResult:
        del config, outputs, report
        raise TrainingError("loss is nan at step 3")

    with pytest.raises(CycleError, match="train: loss is nan"):
        await run_cycle(
            store=store, steps={**steps, Step.TRAIN: fails}, new_cycle_id=ids, new_config=lambda: {"seed": 1},
            clock=lambda: 0.0,
        )  # fmt: skip
    assert [cycle["outcome"] for cycle in store.list_cycles()] == ["failed"]
    result = await run(store, Script(), ids)
    assert (result.cycle_id, result.outcome) == ("cycle-2", CycleOutcome.DONE)


def failing(steps: Mapping[Step, Any], failures: Mapping[Step, Exception]) -> dict[Step, Any]:
    """``steps``, of which those in ``failures`` raise."""

    def raising(error: Exception) -> Any:
        async def fails(config: Mapping[str, Any], outputs: Outputs, report: Report) -> StepResult:
            del config, outputs, report
            raise error

        return fails

    return {**steps, **{step: raising(error) for step, error in failures.items()}}


async def run_failing(store: MemoryCycleStore, ids: Ids, step: Step, error: Exception) -> None:
    with pytest.raises(CycleError) as caught:
        await run_cycle(
            store=store,
            steps=failing(Script().steps(), {step: error}),
            new_cycle_id=ids,
            new_config=lambda: {"seed": ids.given},
            clock=lambda: 0.0,
        )
    assert str(error) in str(caught.value)


@pytest.mark.parametrize("step", [Step.CANARY, Step.PUBLISH])
@pytest.mark.parametrize("kind", [CommandError, EngineError, EngineBusyError, StoreError])
async def test_a_publication_that_another_try_may_carry_out_leaves_the_cycle_open(
    kind: type[TidegateError], step: Step
) -> None:
    store, ids = MemoryCycleStore(), Ids()
    await run_failing(store, ids, step, kind("the server restarts"))
    assert [cycle["outcome"] for cycle in store.list_cycles()] == [None]
    script = Script()
    result = await run(store, script, ids)
    assert (result.cycle_id, result.outcome) == ("cycle-1", CycleOutcome.DONE)
    assert script.calls == list(Step)[list(Step).index(step) :]  # what was certified is not certified again


@pytest.mark.parametrize("kind", [AdapterError, ConflictError, CertificateError, GateError, TrainingError])
async def test_a_publication_that_was_refused_closes_the_cycle(kind: type[TidegateError]) -> None:
    store, ids = MemoryCycleStore(), Ids()
    await run_failing(store, ids, Step.PUBLISH, kind("the champion changed meanwhile"))
    assert [cycle["outcome"] for cycle in store.list_cycles()] == ["failed"]
    assert store.steps("cycle-1")["publish_error"]["code"] == kind.code
    assert (await run(store, Script(), ids)).cycle_id == "cycle-2"


@pytest.mark.parametrize("step", [step for step in Step if step not in (Step.CANARY, Step.PUBLISH)])
async def test_no_other_step_stays_open_after_such_an_error(step: Step) -> None:
    store = MemoryCycleStore()
    await run_failing(store, Ids(), step, StoreError("the database is locked"))
    assert [cycle["outcome"] for cycle in store.list_cycles()] == ["failed"]


async def test_two_cycles_are_never_open_at_once() -> None:
    store = MemoryCycleStore()
    store.open_cycle("cycle-1", config={}, time=0.0)
    with pytest.raises(ConflictError):
        store.open_cycle("cycle-2", config={}, time=1.0)


async def test_a_step_that_waits_leaves_the_cycle_open_and_is_taken_again() -> None:
    store, ids = MemoryCycleStore(), Ids()
    script = Script(ends={Step.CANARY: CycleOutcome.WAITING})
    for _ in range(2):
        events: list[CycleEvent] = []
        waiting = await run(store, script, ids, events)
        assert (waiting.outcome, waiting.reasons) == (CycleOutcome.WAITING, ("because",))
        assert events[-1].what == "waiting"
        assert store.current() is not None
        assert "canary" not in store.steps("cycle-1")
    script.ends.clear()
    result = await run(store, script, ids)
    assert (result.cycle_id, result.outcome) == ("cycle-1", CycleOutcome.DONE)
    assert [script.calls.count(step) for step in Step] == [3 if step is Step.CANARY else 1 for step in Step]
