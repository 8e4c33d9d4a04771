"""How a sealed set ends, and what becomes of its tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate_engine import GateWorld, make_policy, make_tasks, sealed_traffic
from tidegate.core.gate import Abstain, Reply, ScreenAbstained, gate_state, verify_audit
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
