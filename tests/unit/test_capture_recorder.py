"""The recorder: acknowledged means committed, one bad record harms nobody else, sealed stays sealed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from store_samples import feedback, interaction
from tidegate.capture import Recorder, RecordStore
from tidegate.core.errors import ConflictError, RequestError, StoreError, TidegateError
from tidegate.core.types import Feedback, Interaction, Split
from tidegate.stores.memory import MemoryTrajectoryStore
from tidegate.stores.sql import SqlDatabase, SqlTrajectoryStore

BAD = {"role": "user", "content": float("nan")}


class Gate(MemoryTrajectoryStore):
    """A store whose commits wait at a gate, and that can be away."""

    def __init__(self, role="open") -> None:
        super().__init__(role)
        self.opened = threading.Event()
        self.opened.set()
        self.failure: Callable[[Sequence[Interaction]], Exception | None] = lambda _: None
        self.batches: list[int] = []

    def append_interactions(self, interactions: Sequence[Interaction]) -> int:
        self.batches.append(len(interactions))
        assert self.opened.wait(30)
        error = self.failure(interactions)
        if error is not None:
            raise error
        return super().append_interactions(interactions)


@pytest.fixture
def databases(tmp_path: Path) -> Iterator[tuple[SqlTrajectoryStore, SqlTrajectoryStore]]:
    with (
        SqlDatabase.open(tmp_path / "tidegate.db") as database,
        SqlDatabase.open(tmp_path / "sealed.db", role="sealed") as sealed,
    ):
        yield SqlTrajectoryStore(database), SqlTrajectoryStore(sealed)


@asynccontextmanager
async def recording(open_store: RecordStore, sealed: RecordStore, **limits: int) -> AsyncIterator[Recorder]:
    recorder = Recorder(open_store, sealed, **limits)
    try:
        yield recorder
    finally:
        await recorder.close()


async def outcomes(calls: Sequence[Awaitable[object]]) -> list[object]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition is set on the writer's thread
            await asyncio.sleep(0.001)


async def test_an_acknowledged_record_is_in_the_store_of_its_split(databases):
    open_store, sealed = databases
    async with recording(*databases) as recorder:
        for split in Split:
            await recorder.record(interaction(split.value, episode=split.value, split=split))
            store = sealed if split is Split.SEALED else open_store
            other = open_store if split is Split.SEALED else sealed
            assert store.get_interaction(split.value) is not None
            assert other.get_interaction(split.value) is None
            assert (await recorder.find(split.value)) == store.get_interaction(split.value)
        assert await recorder.find("nowhere") is None
        await recorder.record(interaction("train", episode="train"))
        assert {name: recorder.counts()[name] for name in ("recorded", "duplicate")} == {"recorded": 3, "duplicate": 1}


async def test_records_that_wait_together_are_committed_together():
    store = Gate()
    async with recording(store, MemoryTrajectoryStore("sealed"), max_batch=16) as recorder:
        store.opened.clear()
        first = asyncio.create_task(recorder.record(interaction("first")))
        await until(lambda: store.batches == [1])
        rest = [asyncio.create_task(recorder.record(interaction(f"i{n}"))) for n in range(40)]
        await asyncio.sleep(0)
        assert not first.done(), "nothing is acknowledged before its commit"
        store.opened.set()
        await asyncio.gather(first, *rest)
        assert store.batches == [1, 16, 16, 8]
        assert recorder.counts()["batches"] == 4


async def test_one_bad_record_fails_only_its_own_caller(databases):
    async with recording(*databases) as recorder:
        records = [interaction(f"i{n}", episode=f"e{n}") for n in range(20)]
        records[7] = interaction("i7", messages=(BAD,))
        records[9] = interaction("i9", episode="e0", user_key="u2")
        found = await outcomes([recorder.record(record) for record in records])
        assert isinstance(found[7], RequestError)
        assert isinstance(found[9], ConflictError)
        assert [n for n, result in enumerate(found) if isinstance(result, Exception)] == [7, 9]
        assert len(databases[0].list_episodes(splits=[Split.TRAIN])) == 18
        counts = recorder.counts()
        assert (counts["recorded"], counts["quarantined.invalid_request"], counts["quarantined.conflict"]) == (18, 1, 1)


async def test_a_store_that_is_away_fails_every_caller_soon_and_works_again_when_it_is_back():
    store = Gate()
    async with recording(store, MemoryTrajectoryStore("sealed")) as recorder:
        store.failure = lambda _: StoreError("the disk is full")
        store.opened.clear()
        calls = [asyncio.create_task(recorder.record(interaction("first")))]
        await until(lambda: store.batches == [1])
        calls += [asyncio.create_task(recorder.record(interaction(f"i{n}"))) for n in range(50)]
        await asyncio.sleep(0)
        store.opened.set()
        found = await outcomes(calls)
        assert all(isinstance(result, StoreError) and "disk is full" in str(result) for result in found)
        assert len({id(result) for result in found}) == 51, "each caller has an exception of its own"
        assert store.batches == [1, 50, 1, 1], "two failures in a row show that the store is away"
        assert recorder.counts()["failed.store_unavailable"] == 51
        store.failure = lambda _: None
        await recorder.record(interaction("i1"))
        assert store.get_interaction("i1") is not None


async def test_a_single_store_error_among_good_records_fails_one_caller():
    store = Gate()
    async with recording(store, MemoryTrajectoryStore("sealed")) as recorder:
        store.failure = lambda batch: StoreError("odd") if any(i.id in ("i3", "i5") for i in batch) else None
        found = await outcomes([recorder.record(interaction(f"i{n}")) for n in range(10)])
        assert [n for n, result in enumerate(found) if isinstance(result, StoreError)] == [3, 5]


async def test_a_fault_in_a_store_reaches_the_caller_and_does_not_end_the_recorder(caplog: pytest.LogCaptureFixture):
    store = Gate()
    async with recording(store, MemoryTrajectoryStore("sealed")) as recorder:
        store.failure = lambda _: KeyError("bug")
        with pytest.raises(StoreError, match="KeyError"):
            await recorder.record(interaction())
        assert "Traceback" in caplog.text
        assert "KeyError: 'bug'" in caplog.text
        store.failure = lambda _: None
        await recorder.record(interaction())


async def test_too_much_at_once_is_refused_at_once():
    store = Gate()
    async with recording(store, MemoryTrajectoryStore("sealed"), max_batch=1, max_pending=2) as recorder:
        store.opened.clear()
        running = asyncio.create_task(recorder.record(interaction("i0")))
        await until(lambda: store.batches == [1])
        waiting = [asyncio.create_task(recorder.record(interaction(f"i{n}"))) for n in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(StoreError, match="busy, 2 records wait"):
            await recorder.record(interaction("i3"))
        store.opened.set()
        await asyncio.gather(running, *waiting)
        assert recorder.counts()["failed.busy"] == 1
        await recorder.record(interaction("i3"))


async def test_closing_commits_what_waits_and_refuses_what_comes_after():
    store = Gate()
    recorder = Recorder(store, MemoryTrajectoryStore("sealed"))
    store.opened.clear()
    calls = [asyncio.create_task(recorder.record(interaction(f"i{n}"))) for n in range(30)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(recorder.close())
    await asyncio.sleep(0)
    with pytest.raises(StoreError, match="closed"):
        await recorder.record(interaction("late"))
    store.opened.set()
    await asyncio.gather(closing, *calls)
    await recorder.close()
    assert len(store.list_episodes(splits=[Split.TRAIN])[0].interactions) == 30


async def test_a_caller_that_is_cancelled_does_not_take_its_record_back():
    store = Gate()
    async with recording(store, MemoryTrajectoryStore("sealed")) as recorder:
        store.opened.clear()
        call = asyncio.create_task(recorder.record(interaction()))
        await until(lambda: store.batches == [1])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        store.opened.set()
    assert store.get_interaction("i1") is not None


def test_a_caller_whose_event_loop_is_gone_does_not_end_the_recorder():
    store = Gate()
    store.opened.clear()
    recorder = Recorder(store, MemoryTrajectoryStore("sealed"))

    async def leave() -> None:
        call = asyncio.create_task(recorder.record(interaction("i1")))
        await until(lambda: store.batches == [1])
        call.cancel()

    asyncio.run(leave())
    store.opened.set()
    asyncio.run(recorder.record(interaction("i2")))
    asyncio.run(recorder.close())
    assert store.get_interaction("i1") is not None


async def test_feedback_goes_to_the_store_that_holds_what_it_names(databases):
    open_store, sealed = databases
    about_open, about_sealed = feedback("f-open", episode_id="open"), feedback("f-sealed", interaction_id="sealed")
    async with recording(*databases) as recorder:
        await recorder.record(interaction("open", episode="open"))
        await recorder.record(interaction("sealed", episode="sealed", split=Split.SEALED))
        assert await recorder.record_feedback(about_open)
        assert await recorder.record_feedback(about_sealed)
        assert not await recorder.record_feedback(about_sealed)
        assert not await recorder.record_feedback(about_open)
        with pytest.raises(RequestError, match="exactly one"):
            await recorder.record_feedback(feedback("neither"))
        counts = recorder.counts()
    assert open_store.list_feedback() == [about_open]
    assert sealed.list_feedback() == [about_sealed]
    assert (counts["feedback"], counts["feedback_duplicate"], counts["quarantined.invalid_request"]) == (2, 2, 1)


@pytest.mark.parametrize("named", ["interaction_id", "episode_id"])
@pytest.mark.parametrize("split", [Split.TRAIN, Split.SEALED])
async def test_early_feedback_waits_where_no_training_can_read_it(databases, split: Split, named: str):
    open_store, sealed = databases
    early = feedback(metric_name="demonstration", value=[{"role": "assistant"}], **{named: "x"})
    async with recording(*databases) as recorder:
        assert await recorder.record_feedback(early)
        assert open_store.list_feedback() == []
        assert sealed.list_feedback() == [early], "it is listed while it waits"
        await recorder.record(interaction("x", episode="x", split=split))
    holder, other = (sealed, open_store) if split is Split.SEALED else (open_store, sealed)
    assert holder.list_feedback() == [early]
    assert other.list_feedback() == []
    assert sealed.unmatched_feedback() == []
    async with recording(*databases) as recorder:
        assert not await recorder.record_feedback(early), "its id is known for good"
    assert holder.list_feedback() == [early]


async def test_a_start_finishes_moves_that_a_crash_interrupted(databases):
    open_store, sealed = databases
    waiting, half_moved = feedback("waiting", interaction_id="i1"), feedback("half", episode_id="e1")
    sealed.append_feedback(waiting)
    sealed.append_feedback(half_moved)
    sealed.append_feedback(feedback("foreign", interaction_id="i9"))
    open_store.append_interactions([interaction()])
    open_store.append_feedback(half_moved)
    async with recording(*databases):
        pass
    assert {f.id for f in open_store.list_feedback()} == {"waiting", "half"}
    assert [f.id for f in sealed.list_feedback()] == ["foreign"]


async def test_feedback_that_races_its_record_in_another_process_still_finds_it(databases):
    """The record is committed between the look and the append: the append looks once more."""
    open_store, sealed = databases

    class Slow(SqlTrajectoryStore):
        def append_feedback(self, feedback: Feedback) -> bool:
            open_store.append_interactions([interaction()])
            return super().append_feedback(feedback)

    async with recording(open_store, Slow(sealed._db)) as recorder:
        assert await recorder.record_feedback(feedback(interaction_id="i1"))
    assert [f.id for f in open_store.list_feedback()] == ["f1"]
    assert sealed.list_feedback() == []


async def test_matching_that_fails_never_fails_an_acknowledged_record():
    class Away(MemoryTrajectoryStore):
        def unmatched_feedback(self, about=None) -> list[Feedback]:
            raise StoreError("away")

    store = MemoryTrajectoryStore()
    recorder = Recorder(store, Away("sealed"))
    await recorder.record(interaction())
    await recorder.close()
    assert recorder.counts() == {"recorded": 1, "batches": 1, "failed.match": 2}


async def test_hundreds_of_tasks_at_once(databases):
    async with recording(*databases, max_batch=64) as recorder:
        records = [
            interaction(f"i{n}", episode=f"e{n % 50}-{n % 3}", split=list(Split)[n % 3], user_key=f"u{n % 3}")
            for n in range(300)
        ]
        found = await outcomes([recorder.record(record) for record in records])
        assert found == [None] * 300
        counts = recorder.counts()
    assert counts["recorded"] == 300
    assert counts["batches"] < 60
    assert not [result for result in found if isinstance(result, TidegateError)]
