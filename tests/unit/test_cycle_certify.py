"""What the step that certifies hands to the gate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from gate_engine import BASE, GateWorld, adapter, make_candidate, sealed_traffic
from store_samples import interaction, release
from tidegate.config import Settings
from tidegate.core.gate import gate_state
from tidegate.core.types import CandidateState, Interaction, JsonObject, Messages, Split, Task
from tidegate.cycle.machine import CycleOutcome, Step, StepResult
from tidegate.cycle.stages import CycleStages
from tidegate.cycle.steps import cycle_steps
from tidegate.cycle.unseen import NEARLY, SAME
from tidegate.gate import Gate, KeyPair
from tidegate.stores.memory import MemoryReleaseStore, MemoryTrajectoryStore

CANDIDATE = make_candidate(adapter("trained"))


def asked(tasks: Sequence[tuple[str, Task]], split: Split) -> list[Interaction]:
    return [
        interaction(
            f"{split}-{task.id}", episode=f"{split}-e-{task.id}", user_key=f"{split}-{user}", split=split, task=task
        )
        for user, task in tasks
    ]


async def certified(world: GateWorld, *, train: Sequence[Task], dev: Sequence[Task], sealed: int) -> StepResult:
    """Run the step over ``sealed`` sealed users' tasks, some of which train and dev users asked too."""
    opened, hidden = MemoryTrajectoryStore(), MemoryTrajectoryStore("sealed")
    opened.append_interactions(asked([("u", task) for task in train], Split.TRAIN))
    opened.append_interactions(asked([("u", task) for task in dev], Split.DEV))
    hidden.append_interactions(asked(sealed_traffic(sealed), Split.SEALED))
    releases = MemoryReleaseStore(world.audit)
    releases.add_release(release())
    releases.add_candidate(CANDIDATE)
    releases.set_candidate_state(CANDIDATE.id, CandidateState.SCREENED, reasons=(), time=1.0)

    @asynccontextmanager
    async def open_gate(progress: Callable[[str, int, int], None]) -> AsyncIterator[Gate]:
        del progress
        yield world.gate()

    async def publish(candidate: str, champion: str) -> JsonObject:
        raise AssertionError((candidate, champion))

    stages = CycleStages(
        settings=Settings(),
        trajectories=opened,
        manifests=opened,
        sealed_episodes=lambda: hidden.list_episodes(splits=(Split.SEALED,)),
        releases=releases,
        verifiers={},
        grading=world.grading,
        open_engine=lambda: (_ for _ in ()).throw(AssertionError("no rollouts here")),
        open_gate=open_gate,
        publish=publish,
        canary=None,
        quarantined=tuple,
        save_certificate=lambda certificate: None,
        base_model=Path("base"),
        base_sha256=BASE,
        adapters_dir=Path("adapters"),
        batches_dir=Path("batches"),
        rollouts_dir=Path("rollouts"),
        clock=lambda: 2.0,
    )
    world.engine.skill[CANDIDATE.id] = 0.8
    step = cycle_steps(stages)[Step.CERTIFY]
    return await step({}, {Step.TRAIN: {"candidate": CANDIDATE.id}}, lambda detail: None)


def judged(world: GateWorld) -> list[str]:
    return [record for record in world.audit.read() if record.kind == "decision"][-1].body["outcomes"]["tasks"]


async def test_a_sealed_task_that_train_or_dev_users_asked_too_is_left_out_and_counted(tmp_path: Path) -> None:
    world = GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))
    tasks = [task for _, task in sealed_traffic(48)]
    result = await certified(world, train=tasks[:4], dev=tasks[3:6], sealed=48)
    assert result.output["reply"] == "promote"
    assert result.output["excluded"] == {SAME: 6, NEARLY: 0}
    assert judged(world) == [task.id for task in tasks[6:]]


async def test_tasks_asked_in_the_open_do_not_make_up_for_too_few_sealed_ones(tmp_path: Path) -> None:
    world = GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))
    tasks = [task for _, task in sealed_traffic(48)]
    result = await certified(world, train=tasks[:9], dev=[], sealed=48)
    assert (result.ends, result.reasons) == (CycleOutcome.ABSTAINED, ("39 of 40 pairs",))
    assert result.output["excluded"] == {SAME: 9, NEARLY: 0}


async def test_nearly_the_same_words_under_another_id_are_left_out_and_counted(tmp_path: Path) -> None:
    world = GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))
    said = [replace(task, id=f"copy-{task.id}", messages=shouted(task)) for _, task in sealed_traffic(6)]
    result = await certified(world, train=said[:4], dev=said[4:], sealed=48)
    assert result.output["excluded"] == {SAME: 0, NEARLY: 6}
    assert len(judged(world)) == 42


async def test_tasks_of_the_open_set_that_were_asked_since_it_opened_close_it(tmp_path: Path) -> None:
    world = GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))
    await world.certify("before", 0.4, sealed_traffic(48))
    tasks = [task for _, task in sealed_traffic(48)]
    nearly = replace(tasks[1], id="copy", messages=shouted(tasks[1]))
    result = await certified(world, train=tasks[:1], dev=[nearly], sealed=120)
    assert result.output["reply"] == "promote"
    first, second = gate_state(world.audit.read()).epochs
    assert first.closed == "2 of 48 tasks were asked by train or dev users too"
    assert second.closed == "promotion"
    assert set(judged(world)).isdisjoint(task.id for task in tasks)


async def test_an_abstention_after_answers_were_asked_tells_the_proposing_side_nothing_more(tmp_path: Path) -> None:
    """What is missing then would say which conditions were met."""
    world = GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))
    world.engine.faults = {(CANDIDATE.id, task.id): "error" for _, task in sealed_traffic(5)}
    result = await certified(world, train=[], dev=[], sealed=48)
    assert result.ends is CycleOutcome.ABSTAINED
    seq = result.output["audit_seq"]
    assert result.reasons == (
        f"the gate has not enough evidence; audit record {seq} says to operators what is missing",
    )


def shouted(task: Task) -> Messages:
    return tuple({**message, "content": f"{str(message['content']).upper()} "} for message in task.messages)
