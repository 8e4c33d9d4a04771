"""A canary in the publisher: traffic only after proof, promotion without loading, an end that survives any death."""

from __future__ import annotations

from pathlib import Path

import pytest

from release_world import World
from tidegate.core.errors import (
    CertificateError,
    ConflictError,
    EngineError,
    NotFoundError,
    StoreError,
    VoidCertificateError,
)
from tidegate.core.gate.live_assignment import Assignment, LiveArm
from tidegate.core.types import CandidateState, JsonObject, Release
from tidegate.release import ANCHOR, BARE_BASE, CANARY, CHAMPION, PREVIOUS, CertificateCheck, Division

FIRST, SECOND = "m-r1-11111111", "m-r2-22222222"


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    await world.publisher.reconcile()
    return world


async def with_canary(world: World) -> tuple[str, str]:
    """Candidate 1 is the champion, 2 the canary, with traffic."""
    first, second = world.certified("1"), world.certified("2")
    await world.publish(first)
    await world.publisher.start_canary(second, against="1" * 64)
    await world.publisher.divide(everybody(SECOND))
    return first, second


def everybody(release_id: str) -> Division:
    return Division(assignment=Assignment(draw="d", share=1.0 - 2**-53, low=LiveArm.SUBJECT), release_id=release_id)


def begins_on(world: World) -> str:
    return world.router.resolve("champion", episode_id=f"{world.now}", user_key="u").release_id


def void_for(letter: str) -> CertificateCheck:
    """A check that does not believe the certificate of one content any more."""

    def check(certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None:
        if adapter_sha256 == letter * 64:
            raise VoidCertificateError("its day is over")
        World.check(certificate, adapter_sha256=adapter_sha256, base_sha256=base_sha256)

    return check


async def test_a_canary_is_loaded_and_named_and_gets_no_traffic_by_itself(world: World) -> None:
    first, second = world.certified("1"), world.certified("2")
    await world.publish(first)
    canary = await world.publisher.start_canary(second, against="1" * 64)
    assert canary.id == SECOND
    assert world.store.aliases() == {CHAMPION: FIRST, PREVIOUS: "m-r0-base", CANARY: SECOND}
    assert (world.state(first), world.state(second)) == (CandidateState.CHAMPION, CandidateState.CANARY)
    assert world.serving() == FIRST
    assert {alias: r.id for alias, r in (await world.publisher.served()).items()} == world.store.aliases()


@pytest.mark.parametrize("restarted", [False, True])
async def test_nobody_finds_a_canary_by_its_id_until_it_is_promoted(world: World, restarted: bool) -> None:
    await with_canary(world)
    if restarted:
        world.start()
        await world.publisher.reconcile()
        await world.publisher.divide(everybody(SECOND))
    assert SECOND not in {name for name, _ in world.router.models()}
    with pytest.raises(NotFoundError):
        world.router.resolve(SECOND, episode_id="e", user_key="u")
    assert begins_on(world) == SECOND
    await world.publisher.end_canary(CandidateState.CHAMPION, reason="better")
    assert world.router.resolve(SECOND, episode_id="e", user_key="u").release_id == SECOND


async def test_a_promoted_canary_is_the_champion_without_loading_anything(world: World) -> None:
    first, second = await with_canary(world)
    loads = world.engine.loads
    await world.publisher.end_canary(CandidateState.CHAMPION, reason="better")
    assert world.engine.loads == loads
    assert (world.router.champion, world.router.division) == (SECOND, None)
    assert world.store.aliases() == {CHAMPION: SECOND, PREVIOUS: FIRST, CANARY: SECOND}
    assert (world.state(first), world.state(second)) == (CandidateState.RETIRED, CandidateState.CHAMPION)
    assert CANARY not in await world.publisher.served()


@pytest.mark.parametrize("state", [CandidateState.ROLLED_BACK, CandidateState.REJECTED])
async def test_a_canary_that_is_taken_back_leaves_the_champion_alone(world: World, state: CandidateState) -> None:
    first, second = await with_canary(world)
    assert begins_on(world) == SECOND
    world.now += 20
    await world.publisher.end_canary(state, reason="bad")
    assert begins_on(world) == FIRST
    assert (world.state(first), world.state(second)) == (CandidateState.CHAMPION, state)
    assert sorted(world.engine.shelf) == [FIRST]


async def test_a_rollback_takes_the_traffic_away_even_when_the_store_is_away(world: World) -> None:
    await with_canary(world)
    world.store.fails_in = "move_aliases"
    with pytest.raises(StoreError):
        await world.publisher.end_canary(CandidateState.ROLLED_BACK, reason="bad")
    assert begins_on(world) == FIRST
    world.store.fails_in = None
    await world.publisher.end_canary(CandidateState.ROLLED_BACK, reason="bad")
    assert world.store.aliases()[CANARY] == FIRST


@pytest.mark.parametrize("state", [CandidateState.CHAMPION, CandidateState.ROLLED_BACK])
async def test_a_death_between_alias_and_states_is_made_good_by_repeating(world: World, state: CandidateState) -> None:
    first, second = await with_canary(world)
    world.store.fails_in = "set_candidate_state"
    with pytest.raises(StoreError):
        await world.publisher.end_canary(state, reason="decided")
    world.store.fails_in = None
    world.start()
    await world.publisher.reconcile()
    for _ in range(2):
        await world.publisher.end_canary(state, reason="decided")
    retired = CandidateState.RETIRED if state is CandidateState.CHAMPION else CandidateState.CHAMPION
    assert (world.state(first), world.state(second)) == (retired, state)
    assert world.router.champion == (SECOND if state is CandidateState.CHAMPION else FIRST)


async def test_a_restart_loads_the_canary_without_giving_it_traffic(world: World) -> None:
    await with_canary(world)
    world.start()
    await world.publisher.reconcile()
    assert sorted(world.engine.shelf) == [FIRST, SECOND]
    assert begins_on(world) == FIRST
    await world.publisher.divide(everybody(SECOND))
    assert world.router.resolve("champion", episode_id="e2", user_key="u").release_id == SECOND


async def test_starting_a_canary_again_after_a_crash_is_the_same_release(world: World) -> None:
    first, second = world.certified("1"), world.certified("2")
    await world.publish(first)
    world.store.fails_in = "set_candidate_state"
    with pytest.raises(StoreError):
        await world.publisher.start_canary(second, against="1" * 64)
    world.store.fails_in = None
    again = await world.publisher.start_canary(second, against="1" * 64)
    assert (again.id, world.state(second)) == (SECOND, CandidateState.CANARY)
    assert len(world.store.list_releases()) == 3


@pytest.mark.parametrize("trouble", ["no certificate", "lying engine", "another champion"])
async def test_what_cannot_be_served_as_certified_is_no_canary(world: World, trouble: str) -> None:
    first, second = world.certified("1"), world.certified("2")
    await world.publish(first)
    against, error = "1" * 64, EngineError
    if trouble == "no certificate":
        del world.certificates["2" * 64]
        error = CertificateError
    elif trouble == "lying engine":
        world.engine.lies = "other weights"
    else:
        against, error = BARE_BASE, ConflictError
    with pytest.raises(error):
        await world.publisher.start_canary(second, against=against)
    assert CANARY not in world.store.aliases()
    assert world.state(second) is CandidateState.CERTIFIED
    assert sorted(world.engine.shelf) == [FIRST]


async def test_one_canary_at_a_time(world: World) -> None:
    await with_canary(world)
    with pytest.raises(ConflictError, match="while 'm-r2-22222222' is one"):
        await world.publisher.start_canary(world.certified("3"), against="1" * 64)
    await world.publisher.end_canary(CandidateState.REJECTED, reason="inconclusive")
    await world.publisher.start_canary("cand-33333333", against="1" * 64)


async def test_there_is_no_way_to_all_users_around_the_canary(world: World) -> None:
    world.start(canary_required=True)
    await world.publisher.reconcile()
    signed = world.certified("1", kind="person")
    assert (await world.publisher.publish(signed, against=BARE_BASE)).id == FIRST  # nothing to compare it with
    second = world.certified("2")
    with pytest.raises(ConflictError, match="asks for a canary"):
        await world.publisher.publish(second, against="1" * 64)
    await world.publisher.start_canary(second, against="1" * 64)
    with pytest.raises(ConflictError, match="which is 'canary'"):
        await world.publisher.promote(SECOND)
    await world.publisher.end_canary(CandidateState.REJECTED, reason="inconclusive")
    with pytest.raises(ConflictError, match="which is 'rejected'"):
        await world.publisher.promote(SECOND)
    assert world.router.champion == FIRST


@pytest.mark.parametrize("state", [CandidateState.ROLLED_BACK, CandidateState.CERTIFIED])
async def test_a_certificate_alone_restores_nothing_that_never_was_the_champion(
    world: World, state: CandidateState
) -> None:
    if state is CandidateState.ROLLED_BACK:
        _, second = await with_canary(world)
        await world.publisher.end_canary(state, reason="bad")
    else:
        await world.publish(world.certified("1"))
        second, world.store.fails_in = world.certified("2"), "set_candidate_state"
        with pytest.raises(StoreError):
            await world.publisher.start_canary(second, against="1" * 64)
        world.store.fails_in = None
    assert world.state(second) is state
    with pytest.raises(ConflictError, match="never was the champion"):
        await world.publisher.promote(SECOND)
    with pytest.raises(ConflictError, match="never was the champion"):
        await world.publisher.rollback(SECOND, "why not")
    assert world.store.aliases()[CHAMPION] == world.router.champion == FIRST


async def test_what_was_a_champion_before_a_restart_is_still_known_to_have_been_one(world: World) -> None:
    await world.publish(world.certified("1"))
    await world.publish(world.certified("2"))
    world.start()
    await world.publisher.reconcile()
    assert (await world.publisher.rollback(FIRST, "bad")).restores == FIRST
    assert (await world.publisher.promote(SECOND)).restores == SECOND


async def test_a_canary_whose_certificate_fell_is_not_promoted_and_moves_nothing(world: World) -> None:
    _, second = await with_canary(world)
    before = world.store.aliases()
    world.publisher._loader._check_certificate = void_for("2")
    with pytest.raises(VoidCertificateError):
        await world.publisher.end_canary(CandidateState.CHAMPION, reason="better")
    assert (world.store.aliases(), world.router.champion) == (before, FIRST)
    assert world.state(second) is CandidateState.CANARY


@pytest.mark.parametrize("fallback", [ANCHOR, PREVIOUS])
@pytest.mark.parametrize("was_champion", [True, False])
async def test_a_void_champion_does_not_make_way_for_what_was_taken_back(
    world: World, fallback: str, was_champion: bool
) -> None:
    _, second = await with_canary(world)
    await world.publisher.end_canary(
        CandidateState.CHAMPION if was_champion else CandidateState.REJECTED, reason="decided"
    )
    if was_champion:
        await world.publisher.rollback(None, "bad after all")
    world.store.move_aliases({ANCHOR: SECOND, PREVIOUS: SECOND}, reason="by hand", time=world.now)
    world.publisher._loader._check_certificate = void_for("1")
    await world.publisher.replace_void(VoidCertificateError("its day is over", fallback=fallback))
    assert (world.serving(), world.state(second)) == (
        None,
        CandidateState.ROLLED_BACK if was_champion else CandidateState.REJECTED,
    )
    assert (await world.publisher.served())[CHAMPION].adapter_sha256 is None


async def test_another_champion_ends_the_division_at_once(world: World) -> None:
    await with_canary(world)
    back: Release = await world.publisher.rollback(None, "an operator")
    assert begins_on(world) == back.id


async def test_there_is_no_canary_to_end_before_the_first(world: World) -> None:
    with pytest.raises(ConflictError, match="no canary was ever started"):
        await world.publisher.end_canary(CandidateState.ROLLED_BACK, reason="why not")


async def test_after_its_promotion_and_a_rollback_no_canary_is_left(world: World) -> None:
    await with_canary(world)
    await world.publisher.end_canary(CandidateState.CHAMPION, reason="better")
    back = await world.publisher.rollback(None, "bad after all")
    assert CANARY not in await world.publisher.served()
    third = await world.publisher.start_canary(world.certified("3"), against=back.adapter_sha256 or BARE_BASE)
    assert (await world.publisher.served())[CANARY] == third


async def test_a_canary_stays_one_when_the_champion_changes_beside_it(world: World) -> None:
    await with_canary(world)
    await world.publisher.rollback(None, "an operator")
    assert (await world.publisher.served())[CANARY].id == SECOND
