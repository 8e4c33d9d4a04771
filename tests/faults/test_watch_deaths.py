"""A server that dies at any write of a trial: the next one finds what was decided and carries it out, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from live_world import FIRST, SECOND, LiveWorld
from tidegate.core.gate.live_assignment import LiveArm
from tidegate.core.gate.live_state import LIVE_CARRIED_OUT, QUARANTINE
from tidegate.core.gate.verify import verify_audit
from tidegate.core.types import CandidateState
from tidegate.release import CANARY, CHAMPION


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


class Mortal:
    """Ends the process at its n-th write to the log, just before it or just after it."""

    def __init__(self, world: LiveWorld) -> None:
        self._append: Callable[..., Any] = world.audit.append
        self.left = 10**9
        self.after = False
        world.audit.append = self.append

    def append(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        record = self._append(*args, **options)
        if self.left == 0:
            raise Killed
        return record


async def _world(tmp_path: Path) -> tuple[LiveWorld, Mortal]:
    world = LiveWorld(tmp_path)
    made = world.releases.candidate
    world.releases.candidate = lambda letter, *states: made(letter, *states, manifest_hash=letter * 64)
    await world.releases.publisher.reconcile()
    await world.first_champion()
    return world, Mortal(world)


def _settled(world: LiveWorld) -> dict[str, Any]:
    """What must be the same however often the server died."""
    store = world.releases.store
    champion = next(r for r in store.list_releases() if r.id == store.aliases()[CHAMPION])
    kinds = [record.kind for record in world.records]
    verify_audit(world.records)
    return {
        "champion": champion.adapter_sha256,
        "canary over": store.aliases()[CANARY] == champion.id,
        "candidate": world.releases.state("cand-22222222"),
        "served": world.releases.router.champion == champion.id,
        "quarantined": kinds.count(QUARANTINE),
        "carried out": kinds.count(LIVE_CARRIED_OUT),
        "decision": world.trial.decision,
    }


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("better", [False, True])
async def test_a_death_at_any_write_is_made_good_by_the_next_start(tmp_path: Path, better: bool, after: bool) -> None:
    expected = {
        "champion": ("2" if better else "1") * 64,
        "canary over": True,
        "candidate": CandidateState.CHAMPION if better else CandidateState.ROLLED_BACK,
        "served": True,
        "quarantined": 0 if better else 1,
        "carried out": 1,
        "decision": "promote" if better else "roll_back",
    }
    writes = 0
    while True:
        writes += 1
        world, mortal = await _world(tmp_path)
        await world.start_canary()
        world.arms([better] * 12, [not better] * 12)
        mortal.left, mortal.after = writes, after
        try:
            await world.gate.step()
        except Killed:
            mortal.left = 10**9
            await world.restart()
            if world.state.live.running is not None:
                await world.gate.step()
            assert _settled(world) == expected, f"death at write {writes}"
        else:
            assert _settled(world) == expected
            break
    assert writes > 4


@pytest.mark.parametrize("after", [False, True])
async def test_a_death_while_a_canary_starts_leaves_none_or_one(tmp_path: Path, after: bool) -> None:
    writes = 0
    while True:
        writes += 1
        world, mortal = await _world(tmp_path)
        candidate = world.releases.certified("2")
        mortal.left, mortal.after = writes, after
        try:
            await world.gate.start_canary(candidate, against="1" * 64)
        except Killed:
            mortal.left = 10**9
            await world.restart()
            assert world.state.live.running is not None or world.releases.router.division is None
            await world.gate.start_canary(candidate, against="1" * 64)
            assert [record.kind for record in world.records].count("canary_started") == 1
            (user,) = world.users_of(LiveArm.SUBJECT, 1)
            assert world.served_to(user) == SECOND
        else:
            break
    assert writes > 3


async def test_a_restart_gives_the_canary_its_users_back_with_the_weight_that_it_had(tmp_path: Path) -> None:
    world, _ = await _world(tmp_path)
    await world.start_canary()
    world.arms([True, False] * 10, [True, False] * 10)
    await world.gate.step()
    assert world.trial.share == 0.3
    served = {user: world.served_to(user) for user in map(str, range(200))}
    units = world.trial.units
    await world.restart()
    assert {user: world.served_to(user) for user in map(str, range(200))} == served
    assert set(served.values()) == {FIRST, SECOND}
    await world.gate.step()
    assert world.trial.units == units  # nobody counts twice
