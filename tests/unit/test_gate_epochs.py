"""How a sealed set ends, and what becomes of its tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gate_engine import ExactVerifier, GateWorld, make_policy, make_task, make_tasks, sealed_traffic
from tidegate.core.errors import FrozenError
from tidegate.core.gate import Abstain, Reply, ScreenAbstained, gate_state, verify_audit
from tidegate.core.types import GenerationRequest
from tidegate.gate import KeyPair

DAY_S = 86400.0


@pytest.fixture
def world(tmp_path: Path) -> GateWorld:
    return GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))


async def test_a_set_that_is_too_old_is_closed_and_a_fresh_one_opened(world: GateWorld) -> None:
    world.policy = make_policy(sealed__max_age_days=30.0)
    await world.certify("c0", 0.4, sealed_traffic(200))
    world.now += 29 * DAY_S
    assert (await world.certify("c1", 0.4, sealed_traffic(200))).record.body["epoch"] == "epoch-1"
    world.now += 2 * DAY_S
    assert (await world.certify("c2", 0.4, sealed_traffic(200))).record.body["epoch"] == "epoch-2"
    first, second = gate_state(world.audit.read()).epochs
    assert (first.looks, first.closed) == (2, "expired after 31.0 days")
    assert second.closed is None
    assert verify_audit(world.audit.read()).decisions == 3


async def test_a_set_that_expired_with_nothing_to_follow_it_leaves_an_abstention(world: GateWorld) -> None:
    await world.certify("c0", 0.4, sealed_traffic(60))
    world.now += 91 * DAY_S
    result = await world.certify("good", 0.9, sealed_traffic(60))
    assert result.decision == Abstain(missing=("0 of 40 pairs",))
    assert verify_audit(world.audit.read()).decisions == 2


async def test_tasks_of_closed_sets_fill_up_a_thin_dev_set_and_open_ones_never_do(world: GateWorld) -> None:
    await world.certify("c0", 0.4, sealed_traffic(200))
    thin = await world.screen("good", 0.9, make_tasks(4, "d"))
    assert isinstance(thin.result, ScreenAbstained)  # the open set is sealed to it
    assert (await world.certify("better", 0.9, sealed_traffic(200))).reply is Reply.PROMOTE
    filled = await world.screen("good", 0.9, make_tasks(4, "d"))
    assert filled.record.body["pairs"] == world.policy.screen.min_dev_pairs
    released = set(filled.record.body["outcomes"]["tasks"]) - {task.id for task in make_tasks(4, "d")}
    assert released <= {task.id for task in world.sealed.epoch_tasks("epoch-1")}
    enough = await world.screen("good", 0.9, make_tasks(30, "d"))
    assert enough.record.body["pairs"] == 30


@pytest.mark.parametrize(("size", "borne"), [(60, 1), (300, 3)])
async def test_a_set_of_which_more_than_a_few_tasks_were_asked_in_the_open_is_closed_before_the_look(
    world: GateWorld, size: int, borne: int
) -> None:
    world.policy = make_policy(sealed__max_pairs=size)
    traffic = sealed_traffic(2 * size)
    await world.certify("c0", 0.4, traffic)
    held = [task.id for task in world.sealed.epoch_tasks("epoch-1")]
    few = await world.certify("c1", 0.4, traffic, in_the_open=held[:borne])
    assert few.record.body["epoch"] == "epoch-1"
    world.engine.requests.clear()
    more = await world.certify("c2", 0.4, traffic, in_the_open=held[: borne + 1])
    assert more.record.body["epoch"] == "epoch-2"
    assert any(asks(request, more.record.body["outcomes"]["tasks"][0]) for request in world.engine.requests)
    assert not any(asks(request, task_id) for request in world.engine.requests for task_id in held)
    first, second = gate_state(world.audit.read()).epochs
    assert (first.looks, first.closed) == (2, f"{borne + 1} of {size} tasks were asked by train or dev users too")
    assert (second.looks, second.closed) == (1, None)
    assert verify_audit(world.audit.read()).decisions == 3


async def test_a_set_that_was_asked_in_the_open_with_nothing_to_follow_it_leaves_an_abstention(
    world: GateWorld,
) -> None:
    await world.certify("c0", 0.4, sealed_traffic(60))
    held = [task.id for task in world.sealed.epoch_tasks("epoch-1")]
    result = await world.certify("good", 0.9, sealed_traffic(60), in_the_open=held)
    assert result.decision == Abstain(missing=("0 of 40 pairs",))
    assert verify_audit(world.audit.read()).decisions == 2


async def test_tasks_that_a_dead_process_left_are_not_looked_at_once_they_were_asked_in_the_open(
    world: GateWorld,
) -> None:
    left = [task for _, task in sealed_traffic(60)]
    world.sealed.open_epoch("epoch-1", left, "written before the record", 1.0)
    seen = [task.id for task in left[:2]]
    first = await world.certify("good", 0.9, sealed_traffic(120), in_the_open=seen)
    assert first.decision == Abstain(missing=("0 of 40 pairs",))
    assert world.engine.requests == []
    result = await world.certify("good", 0.9, sealed_traffic(120), in_the_open=seen)
    assert (result.reply, result.record.body["epoch"]) == (Reply.PROMOTE, "epoch-2")
    assert set(result.record.body["outcomes"]["tasks"]).isdisjoint(task.id for task in left)


def asks(request: GenerationRequest, task_id: str) -> bool:
    return f"-{task_id}-" in request.request_id


async def test_an_open_set_goes_on_whatever_else_is_in_the_traffic(world: GateWorld) -> None:
    await world.certify("c0", 0.4, sealed_traffic(60))
    odd = replace(make_task("odd"), verifier="gone")
    result = await world.certify("c1", 0.4, [*sealed_traffic(60), ("user-odd", odd)])
    assert (result.record.body["epoch"], result.record.body["epoch_look"]) == ("epoch-1", 2)


async def test_no_set_is_opened_for_a_verifier_that_people_invalidated(world: GateWorld) -> None:
    person = {"public_key": "p", "name": "operator", "statements": [{"signer": "p"}]}
    fallen = {"verifier": "exact", "version": ExactVerifier.version, "reason": "x", "statements": [{"signer": "p"}]}
    world.audit.append("person_trusted", person, time=1.0)
    world.audit.append("verifier_invalidated", fallen, time=2.0)
    with pytest.raises(FrozenError, match="which people have invalidated"):
        await world.certify("good", 0.9, sealed_traffic(60))
    assert world.sealed.used_task_ids() == frozenset()
