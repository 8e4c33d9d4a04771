"""Swap and rollback: proof before the pointer moves, one path back, and engines that lie."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway_world import until
from release_world import BASE, World
from tidegate.core.errors import (
    CertificateError,
    ConflictError,
    EngineError,
    NotFoundError,
    RequestError,
    StoreError,
    TidegateError,
)
from tidegate.core.types import (
    CandidateState,
)
from tidegate.release import ANCHOR, BARE_BASE, CHAMPION, PREVIOUS


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    await world.publisher.reconcile()
    return world


async def test_first_start_serves_the_bare_base_as_release_0(world: World) -> None:
    assert world.store.aliases() == {CHAMPION: "m-r0-base"}
    assert world.serving() is None


async def test_publishing_moves_alias_pointer_and_states(world: World) -> None:
    first, second = world.certified("1"), world.certified("2")
    one = await world.publish(first)
    world.now += 20  # the pin of the first question has expired
    two = await world.publish(second)
    assert (one.id, two.id) == ("m-r1-11111111", "m-r2-22222222")
    assert world.store.aliases() == {CHAMPION: two.id, PREVIOUS: one.id}
    assert world.serving() == two.id
    assert (world.state(first), world.state(second)) == (CandidateState.RETIRED, CandidateState.CHAMPION)


async def test_publishing_again_after_a_crash_is_the_same_release(world: World) -> None:
    candidate = world.certified("1")
    one = await world.publish(candidate)
    assert await world.publish(candidate) == one
    assert len(world.store.list_releases()) == 2


@pytest.mark.parametrize("state", ["proposed", "screened", "rejected"])
async def test_only_certified_candidates_are_published(world: World, state: str) -> None:
    path = {
        "proposed": (),
        "screened": (CandidateState.SCREENED,),
        "rejected": (CandidateState.REJECTED,),
    }
    candidate = world.candidate("1", *path[state])
    with pytest.raises(ConflictError, match=state):
        await world.publish(candidate)
    assert world.engine.loads == 0


async def test_certified_state_without_certificate_serves_nothing(world: World) -> None:
    candidate = world.candidate("1", CandidateState.SCREENED, CandidateState.CERTIFIED)
    with pytest.raises(CertificateError):
        await world.publish(candidate)
    assert world.engine.loads == 0
    assert world.store.aliases() == {CHAMPION: "m-r0-base"}


@pytest.mark.parametrize("lie", ["other weights", "base answers"])
async def test_an_engine_that_answers_with_other_weights_gets_no_traffic(world: World, lie: str) -> None:
    await world.publish(world.certified("1"))
    world.engine.lies = lie
    with pytest.raises(EngineError, match="is not taken into use"):
        await world.publish(world.certified("2"))
    assert world.store.aliases()[CHAMPION] == "m-r1-11111111"
    assert world.serving() == "m-r1-11111111"
    assert [adapter.name for adapter in await world.engine.list_adapters()] == ["m-r1-11111111"]


async def test_rollback_is_a_new_release_of_the_old_content_and_can_be_undone(world: World) -> None:
    first, second = world.certified("1"), world.certified("2")
    one = await world.publish(first)
    two = await world.publish(second)
    loads = world.engine.loads
    back = await world.publisher.rollback(None, "users complain")
    assert (back.number, back.adapter_sha256, back.restores) == (3, one.adapter_sha256, one.id)
    assert world.serving() == one.id  # the name of the content in the engine: nothing is loaded twice
    assert world.engine.loads == loads + 1  # a no-op for an engine that holds it
    assert (world.state(first), world.state(second)) == (CandidateState.CHAMPION, CandidateState.ROLLED_BACK)
    world.now += 20
    again = await world.publisher.promote(two.id)
    assert (again.adapter_sha256, again.restores) == (two.adapter_sha256, two.id)
    assert world.serving() == two.id
    assert world.state(second) is CandidateState.CHAMPION


@pytest.mark.parametrize("pinned", [False, True])
async def test_what_was_rolled_back_has_no_address_and_is_not_loaded_again(world: World, pinned: bool) -> None:
    one = await world.publish(world.certified("1", kind="person"))
    two = await world.publish(world.certified("2", kind="person"))
    assert world.store.aliases()[ANCHOR] == two.id
    if pinned:
        world.router.resolve("champion", episode_id="begun", user_key="u")
    back = await world.publisher.rollback(None, "bad")
    assert {name for name, _ in world.router.models()} == {"m", CHAMPION, back.id}
    with pytest.raises(NotFoundError):
        world.router.resolve(two.id, episode_id="e", user_key="u")
    assert (two.id in world.engine.shelf) is pinned
    if pinned:
        assert world.router.resolve("champion", episode_id="begun", user_key="u").release_id == two.id
    world.start()
    await world.publisher.reconcile()
    assert sorted(world.engine.shelf) == [one.id]
    with pytest.raises(ConflictError, match="no previous champion"):
        await world.publisher.rollback(None, "again")
    again = await world.publisher.promote(two.id)
    assert (world.serving(), world.store.aliases()[PREVIOUS]) == (two.id, back.id)
    assert again.id in {name for name, _ in world.router.models()}


async def test_an_anchor_that_was_rolled_back_is_unloaded_after_its_last_user(world: World) -> None:
    await world.publish(world.certified("1"))
    two = await world.publish(world.certified("2", kind="person"))
    world.router.resolve("champion", episode_id="begun", user_key="u")
    await world.publisher.rollback(None, "bad")
    world.now += 20  # the episode is over
    await world.publish(world.certified("3"))
    assert world.store.aliases()[ANCHOR] == two.id
    assert two.id not in world.engine.shelf


async def test_a_rollback_takes_the_address_away_even_when_the_store_fails_after_it(world: World) -> None:
    await world.publish(world.certified("1"))
    two = await world.publish(world.certified("2"))
    world.store.fails_in = "set_candidate_state"
    with pytest.raises(StoreError):
        await world.publisher.rollback(None, "bad")
    with pytest.raises(NotFoundError):
        world.router.resolve(two.id, episode_id="e", user_key="u")
    world.store.fails_in = None
    with pytest.raises(ConflictError, match="no previous champion"):
        await world.publisher.rollback(None, "bad")
    assert world.state("cand-22222222") is CandidateState.ROLLED_BACK


async def test_rollback_to_the_bare_base_works_too(world: World) -> None:
    await world.publish(world.certified("1"))
    back = await world.publisher.rollback(None, "bad")
    assert (back.adapter_sha256, back.restores) == (None, "m-r0-base")
    assert world.serving() is None


async def test_rollback_without_a_previous_champion_and_to_the_same_content_are_refused(world: World) -> None:
    with pytest.raises(ConflictError, match="no previous champion"):
        await world.publisher.rollback(None, "why not")
    one = await world.publish(world.certified("1"))
    with pytest.raises(ConflictError, match="same content"):
        await world.publisher.promote(one.id)
    with pytest.raises(NotFoundError, match="m-r9"):
        await world.publisher.rollback("m-r9", "typo")


async def test_a_person_signed_release_becomes_the_anchor_and_restored_ones_do_not(world: World) -> None:
    one = await world.publish(world.certified("1", kind="person"))
    assert world.store.aliases()[ANCHOR] == one.id
    await world.publish(world.certified("2"))
    await world.publisher.rollback(None, "bad")
    assert world.store.aliases()[ANCHOR] == one.id


async def test_a_restart_loads_what_the_store_wants_before_traffic(world: World) -> None:
    await world.publish(world.certified("1", kind="person"))
    await world.publish(world.certified("2"))
    await world.publish(world.certified("3"))
    world.start()
    champion = await world.publisher.reconcile()
    assert champion.id == "m-r3-33333333"
    assert world.serving() == "m-r3-33333333"
    assert sorted(world.engine.shelf) == ["m-r1-11111111", "m-r2-22222222", "m-r3-33333333"]


async def test_a_store_row_set_to_champion_by_hand_is_not_served(world: World) -> None:
    await world.publish(world.certified("1"))
    release = world.store.list_releases()[1]
    forged = type(release)(
        id="m-r2-forged", number=2, adapter_sha256="9" * 64, base_sha256=BASE, certificate=release.certificate,
        created_at=1.0,
    )  # fmt: skip
    world.store.add_release(forged)
    world.store.move_aliases({CHAMPION: forged.id}, reason="by hand", time=1.0)
    world.start()
    with pytest.raises(CertificateError):
        await world.publisher.reconcile()
    assert not world.engine.shelf


async def test_a_release_in_use_is_unloaded_only_after_its_last_user(world: World) -> None:
    one = await world.publish(world.certified("1"))
    with world.router.lease(one.id):
        await world.publish(world.certified("2"))
        await world.publish(world.certified("3"))
        assert one.id in world.engine.shelf
    await world.publish(world.certified("4"))
    assert one.id not in world.engine.shelf


async def test_requests_are_answered_while_the_store_waits_for_its_lock(world: World) -> None:
    candidate = world.certified("1")
    world.store.waits_in = "move_aliases"
    publishing = asyncio.create_task(world.publish(candidate))
    async with asyncio.timeout(30):
        assert await asyncio.to_thread(world.store.entered.wait, 30)  # the loop would stand still in a store call
    assert world.serving() is None
    assert not publishing.done()
    world.store.go_on.set()
    assert (await publishing).id == world.router.champion == "m-r1-11111111"


async def test_a_caller_that_goes_away_leaves_no_half_swap(world: World) -> None:
    candidate = world.certified("1")
    world.store.waits_in = "move_aliases"
    publishing = asyncio.create_task(world.publish(candidate))
    async with asyncio.timeout(30):
        await asyncio.to_thread(world.store.entered.wait, 30)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        world.store.go_on.set()
        await until(lambda: world.state(candidate) is CandidateState.CHAMPION)
    assert world.router.champion == world.store.aliases()[CHAMPION] == "m-r1-11111111"
    assert "m-r1-11111111" in world.engine.shelf


@pytest.mark.parametrize("against", ["2" * 64, BARE_BASE])
async def test_a_champion_other_than_the_candidate_was_judged_against_is_not_replaced(
    world: World, against: str
) -> None:
    await world.publish(world.certified("1"))
    loads = world.engine.loads
    candidate = world.certified("3")
    with pytest.raises(ConflictError, match=rf"judged against '{against[:12]}'.*is '111111111111'"):
        await world.publisher.publish(candidate, against=against)
    assert world.engine.loads == loads
    assert world.serving() == "m-r1-11111111"
    assert world.state(candidate) is CandidateState.CERTIFIED


async def test_what_is_served_already_is_published_again_whatever_it_was_judged_against(world: World) -> None:
    first, second = world.certified("1"), world.certified("2")
    await world.publish(first)
    two = await world.publisher.publish(second, against="1" * 64)
    assert await world.publisher.publish(second, against="1" * 64) == two
    await world.publisher.rollback(None, "bad")
    back = await world.publisher.promote(two.id)
    assert await world.publisher.publish(second, against="1" * 64) == back  # the same content, restored


async def test_a_death_between_the_alias_and_the_states_is_made_good_by_repeating(world: World) -> None:
    first, second = world.certified("1"), world.certified("2")
    await world.publish(first)
    world.store.fails_in = "set_candidate_state"
    with pytest.raises(StoreError):
        await world.publisher.publish(second, against="1" * 64)
    assert (world.state(first), world.state(second)) == (CandidateState.CHAMPION, CandidateState.CERTIFIED)
    world.store.fails_in = None
    world.start()
    await world.publisher.reconcile()
    two = await world.publisher.publish(second, against="1" * 64)
    assert two.id == world.router.champion == "m-r2-22222222"
    assert (world.state(first), world.state(second)) == (CandidateState.RETIRED, CandidateState.CHAMPION)


async def test_a_death_within_a_rollback_is_made_good_by_naming_its_target_again(world: World) -> None:
    first, second = world.certified("1"), world.certified("2")
    one = await world.publish(first)
    await world.publish(second)
    world.store.fails_in = "set_candidate_state"
    with pytest.raises(StoreError):
        await world.publisher.rollback(one.id, "bad")
    world.store.fails_in = None
    with pytest.raises(ConflictError, match="same content"):
        await world.publisher.rollback(one.id, "bad")
    assert (world.state(first), world.state(second)) == (CandidateState.CHAMPION, CandidateState.ROLLED_BACK)


async def test_a_release_has_no_address_before_it_is_proven_and_committed(world: World) -> None:
    candidate = world.certified("1")
    world.engine.may_probe.clear()
    publishing = asyncio.create_task(world.publish(candidate))
    async with asyncio.timeout(30):
        await world.engine.probing.wait()
        assert "m-r1-11111111" in world.engine.shelf
        with pytest.raises(NotFoundError):
            world.router.resolve("m-r1-11111111", episode_id="e", user_key="u")
        world.engine.may_probe.set()
        await publishing
    assert world.router.resolve("m-r1-11111111", episode_id="e", user_key="u").adapter == "m-r1-11111111"


@pytest.mark.parametrize("trouble", ["probe", "commit"])
async def test_a_failure_before_the_commit_leaves_nothing_loaded_or_addressable(world: World, trouble: str) -> None:
    candidate = world.certified("1")
    if trouble == "probe":
        world.engine.probe_failure = RequestError("the template refuses the probe's prompts")
    else:
        world.store.fails_in = "move_aliases"
    with pytest.raises((RequestError, StoreError)):
        await world.publish(candidate)
    assert not world.engine.shelf
    assert [release.release_id for release in world.router.loaded()] == ["m-r0-base"]
    assert (world.router.champion, world.store.aliases()) == ("m-r0-base", {CHAMPION: "m-r0-base"})
    world.engine.probe_failure = world.store.fails_in = None
    assert (await world.publish(candidate)).id == "m-r1-11111111"


async def test_a_failed_rollback_does_not_unload_content_that_is_served(world: World) -> None:
    one = await world.publish(world.certified("1"))
    two = await world.publish(world.certified("2"))
    world.store.fails_in = "move_aliases"
    with pytest.raises(StoreError):
        await world.publisher.rollback(None, "bad")
    assert sorted(world.engine.shelf) == [one.id, two.id]
    assert world.router.champion == two.id


def refusals(world: World) -> list[dict[str, Any]]:
    return [dict(record.body) for record in world.store._audit.read() if record.kind == "swap_refused"]


@pytest.mark.parametrize("trouble", ["other weights", "base answers", "probe", "certificate", "commit"])
async def test_what_was_not_taken_into_use_stands_in_the_log_with_the_reason(world: World, trouble: str) -> None:
    one = await world.publish(world.certified("1"))
    candidate = world.certified("2")
    if trouble == "probe":
        world.engine.probe_failure = EngineError("the engine is away")
    elif trouble == "certificate":
        world.certificates.clear()
    elif trouble == "commit":
        world.store.fails_in = "move_aliases"
    else:
        world.engine.lies = trouble
    with pytest.raises(TidegateError) as raised:
        await world.publish(candidate)
    (refusal,) = refusals(world)
    assert (refusal["adapter_sha256"], refusal["instead_of"]) == ("2" * 64, one.id)
    assert (refusal["code"], refusal["message"]) == (raised.value.code, str(raised.value))
    assert candidate in refusal["reason"]
    assert world.serving() == one.id


async def test_a_log_that_cannot_be_written_hides_no_refusal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreError("the disk is gone")

    world.engine.probe_failure = EngineError("the engine is away")
    candidate = world.certified("1")
    monkeypatch.setattr(world.store._audit, "append", away)
    with pytest.raises(EngineError, match="the engine is away"):
        await world.publish(candidate)


async def test_a_rollback_to_what_is_loaded_asks_the_engine_for_no_proof_again(world: World) -> None:
    await world.publish(world.certified("1"))
    two = await world.publish(world.certified("2"))
    world.router.resolve("champion", episode_id="keeps it loaded", user_key="u")
    world.engine.probe_failure = EngineError("the engine is too busy to be asked")
    back = await world.publisher.rollback(None, "bad")
    assert (back.adapter_sha256, world.serving()) == ("1" * 64, back.restores)
    assert (await world.publisher.promote(two.id)).adapter_sha256 == "2" * 64


@pytest.mark.parametrize("lost", ["the one before", "the champion"])
async def test_what_the_engine_lost_meanwhile_is_proven_anew(world: World, lost: str) -> None:
    one = await world.publish(world.certified("1"))
    two = await world.publish(world.certified("2"))
    name = {"the one before": one.id, "the champion": two.id}[lost]
    world.engine.shelf[name] = replace(world.engine.shelf[name], sha256="f" * 64)
    world.engine.probe_failure = EngineError("asked")
    world.engine.deaf_to = name
    with pytest.raises(EngineError, match="asked"):
        await world.publisher.rollback(None, "bad")


async def test_what_was_unloaded_between_is_proven_anew(world: World) -> None:
    await world.publish(world.certified("1"))
    two = await world.publish(world.certified("2"))
    await world.publisher.rollback(None, "bad")
    assert two.id not in world.engine.shelf
    world.engine.lies = "base answers"
    with pytest.raises(EngineError, match="changed no logit"):
        await world.publisher.promote(two.id)
