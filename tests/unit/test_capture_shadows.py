"""Shadow answers in the recorder: after everything that users wait for, in transactions of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from store_samples import interaction, shadow_answer
from tidegate.capture import Recorder
from tidegate.capture import recorder as module
from tidegate.core.errors import NotFoundError, StoreError
from tidegate.core.shadow import ShadowAnswer
from tidegate.core.types import Interaction
from tidegate.stores.memory import MemoryShadowStore, MemoryTrajectoryStore


class Ordered(MemoryTrajectoryStore):
    """Writes down what was committed in which order; every commit waits while it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[list[str]] = []
        self.opened = threading.Event()
        self.opened.set()

    def append_interactions(self, interactions: Sequence[Interaction]) -> int:
        self.commits.append([one.id for one in interactions])
        assert self.opened.wait(30)
        return super().append_interactions(interactions)


class OrderedShadows(MemoryShadowStore):
    """The same for shadow answers; ``failure`` may raise."""

    def __init__(self, trajectories: Ordered) -> None:
        super().__init__(trajectories)
        self.order = trajectories
        self.failure: Callable[[Sequence[ShadowAnswer]], Exception | None] = lambda _: None

    def append_shadow_answers(self, answers: Sequence[ShadowAnswer]) -> int:
        self.order.commits.append([f"shadow of {one.interaction_id}" for one in answers])
        error = self.failure(answers)
        if error is not None:
            raise error
        return super().append_shadow_answers(answers)


@asynccontextmanager
async def recording(store: Ordered, shadows: OrderedShadows | None) -> AsyncIterator[Recorder]:
    recorder = Recorder(store, MemoryTrajectoryStore("sealed"), shadows=shadows)
    try:
        yield recorder
    finally:
        store.opened.set()
        await recorder.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition is set on the writer's thread
            await asyncio.sleep(0.001)


@pytest.fixture
def stores() -> tuple[Ordered, OrderedShadows]:
    store = Ordered()
    return store, OrderedShadows(store)


async def test_shadow_answers_come_after_all_that_users_wait_for(stores: tuple[Ordered, OrderedShadows]) -> None:
    store, shadows = stores
    async with recording(store, shadows) as recorder:
        await recorder.record(interaction("i0", episode="i0"))
        store.opened.clear()
        first = asyncio.create_task(recorder.record(interaction("i1", episode="i1")))
        await until(lambda: len(store.commits) == 2)
        shadow = asyncio.create_task(recorder.record_shadow(shadow_answer("i0")))
        await asyncio.sleep(0)
        last = asyncio.create_task(recorder.record(interaction("i2", episode="i2")))
        await asyncio.sleep(0)
        store.opened.set()
        await asyncio.gather(first, shadow, last)
        assert store.commits == [["i0"], ["i1"], ["i2"], ["shadow of i0"]]
        assert recorder.counts()["shadow"] == 1


async def test_a_bad_shadow_answer_harms_no_other(stores: tuple[Ordered, OrderedShadows]) -> None:
    store, shadows = stores
    async with recording(store, shadows) as recorder:
        await recorder.record(interaction("i0", episode="i0"))
        store.opened.clear()
        blocked = asyncio.create_task(recorder.record(interaction("i1", episode="i1")))
        await until(lambda: len(store.commits) == 2)
        answers = [recorder.record_shadow(shadow_answer(name)) for name in ("i0", "nowhere", "i1")]
        together = asyncio.gather(*answers, return_exceptions=True)
        await asyncio.sleep(0)
        store.opened.set()
        good, bad, later = await together
        await blocked
        assert (good, later) == (None, None)
        assert isinstance(bad, NotFoundError)
        assert len(shadows.list_shadow_pairs("shadow-1")) == 2
        assert recorder.counts()["shadow_failed.not_found"] == 1
        assert not any(name.startswith(("failed", "quarantined")) for name in recorder.counts())


async def test_a_store_that_is_away_for_shadows_leaves_users_alone(stores: tuple[Ordered, OrderedShadows]) -> None:
    store, shadows = stores
    shadows.failure = lambda _: StoreError("locked")
    async with recording(store, shadows) as recorder:
        await recorder.record(interaction())
        with pytest.raises(StoreError, match="locked"):
            await recorder.record_shadow(shadow_answer())
        shadows.failure = lambda _: RuntimeError("bug")
        with pytest.raises(StoreError, match="bug"):
            await recorder.record_shadow(shadow_answer())
        await recorder.record(interaction("i2", episode="e2"))
        assert recorder.counts()["shadow_failed.store_unavailable"] == 2


async def test_shadow_answers_never_take_the_place_of_records(
    stores: tuple[Ordered, OrderedShadows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_SHADOW_ANSWERS", 2)
    store, shadows = stores
    async with recording(store, shadows) as recorder:
        await recorder.record(interaction("i0", episode="i0"))
        store.opened.clear()
        waiting = [asyncio.create_task(recorder.record(interaction("i1", episode="i1")))]
        await until(lambda: len(store.commits) == 2)
        waiting += [asyncio.create_task(recorder.record_shadow(shadow_answer("i0", shadow_id=f"s{n}"))) for n in "12"]
        await asyncio.sleep(0)
        with pytest.raises(StoreError, match="busy, 2 records wait"):
            await recorder.record_shadow(shadow_answer("i0", shadow_id="s3"))
        waiting.append(asyncio.create_task(recorder.record(interaction("i2", episode="i2"))))
        await asyncio.sleep(0)
        store.opened.set()
        await asyncio.gather(*waiting)
        assert recorder.counts()["shadow_failed.busy"] == 1


async def test_a_recorder_that_closes_writes_down_what_waits(stores: tuple[Ordered, OrderedShadows]) -> None:
    store, shadows = stores
    async with recording(store, shadows) as recorder:
        await recorder.record(interaction())
        store.opened.clear()
        blocked = asyncio.create_task(recorder.record(interaction("i2", episode="e2")))
        await until(lambda: len(store.commits) == 2)
        shadow = asyncio.create_task(recorder.record_shadow(shadow_answer()))
        await asyncio.sleep(0)
        closing = asyncio.create_task(recorder.close())
        await asyncio.sleep(0)
        store.opened.set()
        await asyncio.gather(blocked, shadow, closing)
        assert len(shadows.list_shadow_pairs("shadow-1")) == 1


async def test_without_a_store_they_are_refused(stores: tuple[Ordered, OrderedShadows]) -> None:
    async with recording(stores[0], None) as recorder:
        with pytest.raises(StoreError, match="no store"):
            await recorder.record_shadow(shadow_answer())
