"""A release in the shadow, in the publisher: certified and proven, addressed by nobody, gone when it should be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from release_world import BASE, World
from tidegate.core.errors import (
    AdapterError,
    CertificateError,
    ConflictError,
    EngineError,
    NotFoundError,
    RequestError,
    StoreError,
    VoidCertificateError,
)
from tidegate.core.shadow import SHADOW_ENDED, SHADOW_STARTED, ShadowRun, last_run
from tidegate.core.types import AdapterRef, CandidateState, JsonObject, Release
from tidegate.release import CANARY, CHAMPION, PREVIOUS

ZERO, FIRST, SECOND, THIRD = "m-r0-base", "m-r1-11111111", "m-r2-22222222", "m-r3-33333333"


@pytest.fixture
async def world(tmp_path: Path) -> World:
    """Releases 1 and 2 were published; 2 is the champion."""
    world = World(tmp_path)
    await world.publisher.reconcile()
    for letter in "12":
        await world.publish(world.certified(letter))
    return world


def kinds(world: World) -> list[str]:
    return [record.kind for record in world.store._audit.read() if record.kind.startswith("shadow")]


def run_of(world: World) -> ShadowRun:
    run = last_run(world.store._audit.read())
    assert run is not None
    return run


def shadow_of(world: World) -> str | None:
    route = world.router.shadow
    return None if route is None else route.shadow.release_id


async def old_and_unloaded(world: World) -> None:
    """Release 3 is the champion, and 1, which no alias names any more, is out of the engine."""
    await world.publish(world.certified("3"))
    assert set(world.engine.shelf) == {SECOND, THIRD}


async def test_a_release_that_nothing_needs_is_loaded_for_the_shadow_and_unloaded_after(world: World) -> None:
    await old_and_unloaded(world)
    status = await world.publisher.shadowing.start(FIRST, 0.1)
    assert status == {"id": "shadow-1", "release": FIRST, "share": 0.1, "calls": 0}
    assert world.publisher.shadowing.status() == {"shadow": status}
    assert set(world.engine.shelf) == {FIRST, SECOND, THIRD}
    assert FIRST not in {one.release_id for one in world.router.loaded()}
    with pytest.raises(NotFoundError):
        world.router.resolve(FIRST, episode_id="e", user_key="u")
    assert await world.publisher.shadowing.stop("enough") == {
        "shadow": "shadow-1", "release": FIRST, "reason": "enough",
    }  # fmt: skip
    assert set(world.engine.shelf) == {SECOND, THIRD}
    assert (shadow_of(world), kinds(world)) == (None, [SHADOW_STARTED, SHADOW_ENDED])
    assert (run_of(world).ended, run_of(world).shadow.share) == ("enough", 0.1)
    await world.publisher.shadowing.start(FIRST, 1.0)
    assert run_of(world).shadow.id == "shadow-2"


async def test_what_is_served_besides_stays_loaded_when_the_shadow_ends(world: World) -> None:
    await world.publisher.shadowing.start(FIRST, 0.1)  # the previous champion
    loads = set(world.engine.shelf)
    await world.publisher.shadowing.stop("enough")
    assert set(world.engine.shelf) == loads == {FIRST, SECOND}


async def test_the_bare_base_model_can_be_in_the_shadow(world: World) -> None:
    await world.publisher.shadowing.start(ZERO, 0.5)
    assert world.router.shadow is not None
    assert world.router.shadow.adapter is None
    await world.publisher.shadowing.stop("enough")


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan"), float("inf")])
async def test_a_share_out_of_range_is_refused(world: World, share: float) -> None:
    with pytest.raises(RequestError, match="share is"):
        await world.publisher.shadowing.start(FIRST, share)
    assert kinds(world) == []


async def test_one_release_at_a_time_and_never_the_champion(world: World) -> None:
    shadowing = world.publisher.shadowing
    with pytest.raises(NotFoundError, match="'nobody'"):
        await shadowing.start("nobody", 0.1)
    with pytest.raises(ConflictError, match="same content as the champion"):
        await shadowing.start(SECOND, 0.1)
    with pytest.raises(ConflictError, match="none to stop"):
        await shadowing.stop("enough")
    assert kinds(world) == []
    await shadowing.start(FIRST, 0.1)
    with pytest.raises(ConflictError, match=f"{FIRST!r} is in the shadow"):
        await shadowing.start(ZERO, 0.1)
    assert (shadow_of(world), kinds(world)) == (FIRST, [SHADOW_STARTED])


@pytest.mark.parametrize("kind", ["certificate", "files", "base answers", "other weights", "log"])
async def test_what_cannot_be_proven_or_written_down_is_not_in_the_shadow(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await old_and_unloaded(world)

    async def damaged(adapter: AdapterRef) -> None:
        raise AdapterError(f"{adapter.name} is damaged")

    def forged(certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None:
        raise CertificateError("forged")

    def gone(*args: object, **kwargs: object) -> None:
        raise StoreError("the disk is gone")

    expected: type[Exception] = EngineError
    if kind == "certificate":
        expected = CertificateError
        monkeypatch.setattr(world.publisher._loader, "_check_certificate", forged)
    elif kind == "files":
        monkeypatch.setattr(world.engine, "load", damaged)
    elif kind == "log":
        expected = StoreError
        monkeypatch.setattr(world.store._audit, "append", gone)
    else:
        world.engine.lies = kind
    with pytest.raises(expected):
        await world.publisher.shadowing.start(FIRST, 0.1)
    assert (shadow_of(world), kinds(world)) == (None, [])
    assert set(world.engine.shelf) == {SECOND, THIRD}
    assert world.serving() == THIRD


async def test_what_the_gate_refused_has_no_release_and_never_reaches_the_shadow(world: World) -> None:
    refused = world.candidate("9", CandidateState.SCREENED, CandidateState.REJECTED)
    for name in (refused, "9" * 64):
        with pytest.raises(NotFoundError):
            await world.publisher.shadowing.start(name, 0.1)
    await release_without_certificate(world)
    with pytest.raises(CertificateError, match="no certificate"):
        await world.publisher.shadowing.start("m-r9-99999999", 0.1)
    assert "m-r9-99999999" not in world.engine.shelf


async def release_without_certificate(world: World) -> None:
    """What only somebody who writes to the database could make."""
    world.store.add_release(
        Release(id="m-r9-99999999", number=9, adapter_sha256="9" * 64, base_sha256=BASE, certificate=None,
                created_at=1.0)
    )  # fmt: skip


async def test_a_release_that_was_rolled_back_may_be_looked_at_again(world: World) -> None:
    await world.publisher.rollback(None, "worse")
    await world.publisher.shadowing.start(SECOND, 0.1)
    assert shadow_of(world) == SECOND
    assert world.serving() == FIRST
    assert SECOND not in {one.release_id for one in world.router.loaded()}


async def test_swaps_and_rollbacks_leave_the_shadow_running(world: World) -> None:
    await world.publisher.shadowing.start(ZERO, 0.1)
    await old_and_unloaded(world)
    await world.publisher.rollback(None, "worse")
    assert (shadow_of(world), kinds(world)) == (ZERO, [SHADOW_STARTED])
    await world.publisher.shadowing.stop("enough")
    await world.publisher.shadowing.start(THIRD, 0.1)
    for letter in "456":
        await world.publish(world.certified(letter))
        assert THIRD in world.engine.shelf, "a swap unloads what the shadow answers with"
    assert shadow_of(world) == THIRD


async def test_a_shadow_that_becomes_the_champion_ends_by_itself(world: World) -> None:
    await world.publisher.shadowing.start(FIRST, 0.1)
    route = world.router.shadow
    restored = await world.publisher.rollback(None, "worse")
    assert world.serving() == FIRST, "the content keeps its name in the engine"
    assert shadow_of(world) is None
    assert route is not None
    assert route.ended.is_set()
    assert run_of(world).ended == f"its content is the champion {restored.id!r}"
    assert FIRST in world.engine.shelf


async def test_a_canary_may_be_in_the_shadow_and_its_promotion_ends_that(world: World) -> None:
    third = world.certified("3")
    await world.publisher.start_canary(third, against="2" * 64)
    await world.publisher.shadowing.start(THIRD, 0.1)
    assert THIRD not in {name for name, _ in world.router.models()}
    await world.publisher.end_canary(CandidateState.CHAMPION, reason="better")
    assert (shadow_of(world), world.serving()) == (None, THIRD)
    assert world.store.aliases() == {CHAMPION: THIRD, PREVIOUS: SECOND, CANARY: THIRD}


async def test_a_log_that_is_away_does_not_keep_a_release_from_becoming_the_champion(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publisher.shadowing.start(FIRST, 0.1)
    append = world.store._audit.append

    def gone(kind: str, body: JsonObject, *, time: float, expected_head_seq: int | None = None) -> object:
        if kind == SHADOW_ENDED:
            raise StoreError("the disk is gone")
        return append(kind, body, time=time, expected_head_seq=expected_head_seq)

    monkeypatch.setattr(world.store._audit, "append", gone)
    await world.publisher.rollback(None, "worse")
    assert (shadow_of(world), world.serving()) == (None, FIRST)
    monkeypatch.undo()
    await restarted(world)
    assert (shadow_of(world), kinds(world)) == (None, [SHADOW_STARTED, SHADOW_ENDED])
    assert "could not be loaded again" in str(run_of(world).ended)


async def restarted(world: World) -> None:
    world.start()
    await world.publisher.reconcile()
    await world.publisher.shadowing.resume()


async def test_a_server_that_starts_again_takes_the_shadow_up(world: World) -> None:
    await old_and_unloaded(world)
    await world.publisher.shadowing.start(FIRST, 0.25)
    shadow = run_of(world).shadow
    await restarted(world)
    assert world.router.shadow is not None
    assert world.router.shadow.shadow == shadow, "the same calls are drawn"
    assert set(world.engine.shelf) == {FIRST, SECOND, THIRD}
    assert kinds(world) == [SHADOW_STARTED]
    await world.publisher.shadowing.stop("enough")
    await restarted(world)
    assert shadow_of(world) is None


@pytest.mark.parametrize("fault", ["void", "engine", "unforeseen"])
async def test_a_shadow_that_cannot_be_loaded_again_keeps_no_server_from_starting(
    world: World, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await old_and_unloaded(world)
    await world.publisher.shadowing.start(FIRST, 0.1)
    world.start()
    await world.publisher.reconcile()
    load = world.engine.load

    async def broken(adapter: AdapterRef) -> None:
        if adapter.name == FIRST:
            raise RuntimeError("out of memory") if fault == "unforeseen" else EngineError("out of memory")
        await load(adapter)

    def void(certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None:
        raise VoidCertificateError("its verifier was invalidated")

    if fault == "void":
        monkeypatch.setattr(world.publisher._loader, "_check_certificate", void)
    else:
        monkeypatch.setattr(world.engine, "load", broken)
    await world.publisher.shadowing.resume()
    assert (shadow_of(world), world.serving()) == (None, THIRD)
    assert set(world.engine.shelf) == {SECOND, THIRD}
    assert kinds(world) == [SHADOW_STARTED, SHADOW_ENDED]


async def test_a_shadow_whose_certificate_falls_ends_at_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await old_and_unloaded(world)
    shadowing = world.publisher.shadowing
    await shadowing.step()
    await shadowing.start(FIRST, 0.1)
    await shadowing.step()
    assert shadow_of(world) == FIRST

    def void(certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None:
        raise VoidCertificateError("its verifier was invalidated")

    monkeypatch.setattr(world.publisher._loader, "_check_certificate", void)
    await shadowing.step()
    assert (shadow_of(world), set(world.engine.shelf)) == (None, {SECOND, THIRD})
    assert run_of(world).ended == "its certificate does not stand: its verifier was invalidated"


async def test_an_end_that_was_not_written_down_can_be_repeated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    shadowing = world.publisher.shadowing
    await shadowing.start(ZERO, 0.1)

    def gone(*args: object, **kwargs: object) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(world.store._audit, "append", gone)
    with pytest.raises(StoreError):
        await shadowing.stop("enough")
    assert shadow_of(world) is None, "no call is copied any more, whatever the store says"
    monkeypatch.undo()
    await shadowing.stop("enough")
    assert run_of(world).ended == "enough"


async def test_the_adapter_stays_until_calls_that_run_have_ended(world: World) -> None:
    await old_and_unloaded(world)
    await world.publisher.shadowing.start(FIRST, 0.1)
    route = world.router.shadow
    assert route is not None
    with route.call():
        stopping = asyncio.create_task(world.publisher.shadowing.stop("enough"))
        await route.ended.wait()
        await world.publisher.rollback(None, "worse")
        await world.publisher.divide(None)  # takes its turn after whatever waits for the lock
        await asyncio.sleep(0)
        assert not stopping.done()
        assert FIRST in world.engine.shelf
    await stopping
    assert FIRST not in world.engine.shelf
