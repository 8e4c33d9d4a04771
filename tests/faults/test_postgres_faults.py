"""A PostgreSQL server that crashes, connections that die, writers that are killed, and a damaged file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from postgres_world import Server, name_of
from store_samples import interaction
from tidegate.capture import Recorder
from tidegate.core.audit import verify_chain
from tidegate.core.errors import StoreError
from tidegate.core.types import Split
from tidegate.stores.audit import append_record
from tidegate.stores.sql import PostgresAddress, SqlAuditLog, SqlDatabase, SqlTrajectoryStore

BATCH = 3
DEADLINE_S = 60.0

HOLDER = """
import sys, time
from store_samples import interaction
from tidegate.stores.sql import PostgresAddress, SqlDatabase
from tidegate.stores.audit import append_record

database = SqlDatabase.open(PostgresAddress(url=sys.argv[1], password=sys.argv[2]))
with database.write("written to") as connection:
    append_record(connection, "note", {}, time=1.0)
    print("holding", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def where(postgres: Server) -> PostgresAddress:
    return postgres.fresh()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


class Writer:
    """Appends batches without a pause on a thread of its own until it is left."""

    def __init__(self, store: SqlTrajectoryStore) -> None:
        self.acknowledged: list[int] = []
        self.failed: dict[int, Exception] = {}
        self._store = store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                self._store.append_interactions(ids_of(number))
                self.acknowledged.append(number)
            except Exception as error:
                self.failed[number] = error
            number += 1


def ids_of(batch: int) -> list[object]:
    return [interaction(f"b{batch}-{n}", episode=f"e{batch}") for n in range(BATCH)]


def test_a_crash_of_the_server_loses_nothing_and_halves_nothing(postgres: Server, where: PostgresAddress):
    with SqlDatabase.open(where) as database:
        store = SqlTrajectoryStore(database)
        with Writer(store) as writer:
            for _ in range(2):
                before = len(writer.acknowledged)
                until(lambda before=before: len(writer.acknowledged) > before + 10)
                failures = len(writer.failed)
                postgres.stop("immediate")
                until(lambda failures=failures: len(writer.failed) > failures)
                postgres.start()
                after = len(writer.acknowledged)
                until(lambda after=after: len(writer.acknowledged) > after + 10)
        for error in writer.failed.values():
            assert isinstance(error, StoreError), error
            assert name_of(where) in str(error)
        assert any("cannot be reached or ended the connection" in str(error) for error in writer.failed.values())
        stored = store.list_episodes(splits=[Split.TRAIN])
        assert {len(episode.interactions) for episode in stored} == {BATCH}, "all of a batch or nothing"
        kept = {episode.id for episode in stored}
        assert {f"e{batch}" for batch in writer.acknowledged} <= kept
        database.check()


async def test_users_are_told_while_the_server_is_away_and_go_on_when_it_is_back(
    postgres: Server, where: PostgresAddress
):
    with SqlDatabase.open(where) as database, SqlDatabase.open(postgres.fresh(), role="sealed") as sealed:
        recorder = Recorder(SqlTrajectoryStore(database), SqlTrajectoryStore(sealed))
        try:
            await recorder.record(interaction("i1"))
            await asyncio.to_thread(postgres.stop, "immediate")
            for split in (Split.TRAIN, Split.SEALED):
                with pytest.raises(StoreError, match="could not be written to"):
                    await recorder.record(interaction(f"i2-{split}", episode=f"e-{split}", split=split))
            await asyncio.to_thread(postgres.start)
            for split in (Split.TRAIN, Split.SEALED):
                await recorder.record(interaction(f"i2-{split}", episode=f"e-{split}", split=split))
                assert await recorder.find(f"i2-{split}") is not None
            assert await recorder.find("i1") is not None
        finally:
            await recorder.close()


def kill_connections(postgres: Server, where: PostgresAddress) -> int:
    query = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{name_of(where)}'"
    return postgres.execute(query)[0][0]


def test_connections_that_died_in_the_pool_are_replaced(postgres: Server, where: PostgresAddress):
    with SqlDatabase.open(where) as database:
        store = SqlTrajectoryStore(database)
        for number in range(3):
            assert store.append_interactions([interaction(f"w{number}")]) == 1
            assert kill_connections(postgres, where) >= 1
            assert store.get_interaction(f"w{number}") is not None
            assert kill_connections(postgres, where) >= 1


def test_a_transaction_whose_connection_dies_is_an_error_and_leaves_nothing(postgres: Server, where: PostgresAddress):
    with SqlDatabase.open(where) as database:
        log = SqlAuditLog(database)
        log.append("note", {}, time=1.0)

        def cut_off() -> None:
            with database.write("written to") as connection:
                append_record(connection, "note", {}, time=2.0)
                kill_connections(postgres, where)

        with pytest.raises(StoreError, match="ended the connection"):
            cut_off()
        log.append("note", {}, time=3.0)
        assert [record.time for record in log.read()] == [1.0, 3.0]
        assert verify_chain(log.read()) == 2


@contextmanager
def holder(where: PostgresAddress) -> Generator[subprocess.Popen[str]]:
    """A process in the middle of a write transaction."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, where.url, str(where.password)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield process
        finally:
            process.kill()


def test_a_killed_writer_leaves_no_lock_and_nothing_half_written(where: PostgresAddress):
    with SqlDatabase.open(where, busy_timeout_s=0.1) as hasty, SqlDatabase.open(where) as database:
        with holder(where) as process:
            with pytest.raises(StoreError, match="another process held its write lock"):
                SqlAuditLog(hasty).append("note", {}, time=2.0)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert SqlAuditLog(database).append("note", {}, time=3.0).seq == 1
        assert [record.time for record in SqlAuditLog(database).read()] == [3.0]


def test_a_damaged_table_is_found_by_check_and_by_reading(postgres: Server, where: PostgresAddress):
    with SqlDatabase.open(where) as database:
        SqlTrajectoryStore(database).append_interactions([interaction(f"i{n}", episode=f"e{n}") for n in range(200)])
        database.check()
    postgres.execute("CHECKPOINT")
    name = name_of(where)
    file = postgres.execute("SELECT pg_relation_filepath('interactions')", database=name)[0][0]
    postgres.stop()
    try:
        with (postgres.data / file).open("r+b") as damaged:
            damaged.seek(8192)
            damaged.write(b"\xa5" * 8192)
    finally:
        postgres.start()
    with SqlDatabase.open(where) as database:
        with pytest.raises(StoreError, match="it is damaged"):
            database.check()
        with pytest.raises(StoreError, match="it is damaged"):
            SqlTrajectoryStore(database).list_episodes(splits=[Split.TRAIN])
