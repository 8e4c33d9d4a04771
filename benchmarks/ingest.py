"""Recording speed: interactions per second into SQLite and PostgreSQL, against the raw limit of the same bytes.

An interaction has a prompt of 50 tokens and one answer of 200 tokens with their log-probabilities; an episode has two
of them. "group commit" is the whole way of a request's record: as many tasks as ``waiting`` each record one interaction
after the other through the recorder, which commits what has piled up. "batches" is the store alone, 256 records a
transaction. The raw limit writes the rows that the codec made beforehand, into the same tables and in transactions of
256: ``executemany`` in SQLite, binary ``COPY`` in PostgreSQL. Every run has an empty database; sides alternate.
Processor time is that of this process, all threads, for one interaction; a server's own is not in it.

Options: ``records=8192``, ``waiting=1024``, ``backend=sqlite|postgres`` (both by default). PostgreSQL is a server of
the benchmark's own on the same machine, over a Unix socket.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, Options, Row, measured
from tidegate.capture import Recorder
from tidegate.core.types import Choice, FinishReason, Interaction, Sampling, Split
from tidegate.stores import codec
from tidegate.stores.sql import Location, PostgresAddress, SqlDatabase, SqlTrajectoryStore

BATCH = 256
PROMPT_TOKENS, ANSWER_TOKENS = 50, 200
CALLS_PER_EPISODE = 2
VOCABULARY = 49_152
MOST_OF_THE_LIMIT, PER_SECOND = 0.6, 5000.0  # targets

Took = tuple[float, float]  # seconds on the clock, and of processor time
Rows = Sequence[tuple[list[dict[str, Any]], list[dict[str, Any]]]]


def run(options: Options) -> list[Row]:
    """Alternate the sides and report medians."""
    records = make_interactions(int(options.values.get("records", "8192")))
    waiting = int(options.values.get("waiting", "1024"))
    chosen = options.values.get("backend")
    batches = [records[at : at + BATCH] for at in range(0, len(records), BATCH)]
    rows = [_rows(batch) for batch in batches]
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    spent: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    with places(chosen) as fresh:
        for _ in range(options.runs):
            for backend, (place, raw) in fresh.items():
                seconds = {
                    "group commit": _through_the_recorder(place(), place(), records, waiting),
                    "batches": _through_the_store(place(), batches),
                    "raw": raw(place(), rows),
                }
                for side, (took, processor) in seconds.items():
                    found[backend, side].append(len(records) / took)
                    spent[backend, side].append(1e6 * processor / len(records))
                    told = f"{len(records) / took:,.0f}/s, {spent[backend, side][-1]:.0f} us of processor time each"
                    print(f"{backend} {side}: {told}", file=sys.stderr)
    return [row for backend in fresh for row in _figures(backend, found, spent)]


def _figures(
    backend: str, found: dict[tuple[str, str], list[float]], spent: dict[tuple[str, str], list[float]]
) -> Iterator[Row]:
    name = {"sqlite": "executemany", "postgres": "COPY"}[backend]
    for side in ("group commit", "batches"):
        values, raw = found[backend, side], found[backend, "raw"]
        yield measured("ingest", f"{backend}: {side}", "interactions/s", values, better="higher", target=PER_SECOND)
        shares = [ours / limit for ours, limit in zip(values, raw, strict=True)]
        yield measured(
            "ingest", f"{backend}: {side}, share of {name}", "of the limit", shares, better="higher",
            target=MOST_OF_THE_LIMIT,
        )  # fmt: skip
    yield measured("ingest", f"{backend}: {name}, the limit", "interactions/s", found[backend, "raw"], better="higher")
    for side, shown in (("group commit", "group commit"), ("batches", "batches"), ("raw", name)):
        yield measured("ingest", f"{backend}: {shown}, our processor time", "us", spent[backend, side], better="lower")


def make_interactions(number: int) -> list[Interaction]:
    """Interactions as an agent's are: random tokens, log-probabilities of float32, a short conversation."""
    draw = random.Random(0)  # noqa: S311 - contents of a benchmark
    made: list[Interaction] = []
    for n in range(number):
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(ANSWER_TOKENS))
        answer = Choice(
            index=0,
            token_ids=tokens,
            logprobs=tuple(-draw.expovariate(2.0) for _ in tokens),
            text=f"The answer to question {n} is {draw.random()}.",
            finish_reason=FinishReason.STOP,
        )
        episode = n // CALLS_PER_EPISODE
        made.append(
            Interaction(
                id=f"chatcmpl-{draw.randbytes(16).hex()}",
                episode_id=f"episode-{episode}",
                user_key=f"user-{episode % 100}",
                split=Split.TRAIN,
                created_at=1.0 + n,
                messages=({"role": "user", "content": f"What is {n} * {draw.randrange(1000)}?"},),
                tools=(),
                sampling=Sampling(temperature=1.0),
                prompt_token_ids=tuple(draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)),
                choices=(answer,),
                release_id="bench-r0-base",
                engine_replica="bench",
                latency_s=0.5,
            )
        )
    return made


@contextmanager
def places(chosen: str | None) -> Iterator[dict[str, tuple[Callable[[], Location], Callable[[Any, Rows], Took]]]]:
    """For each backend where a new database may lie, and its raw limit."""
    numbers = count()
    with tempfile.TemporaryDirectory() as folder:
        files = {"sqlite": (lambda: Path(folder) / f"{next(numbers)}.db", _raw_sqlite)}
        if chosen == "sqlite":
            yield {**files}
            return
        sys.path.insert(0, str(REPOSITORY / "tests"))
        from postgres_world import running_postgres  # noqa: PLC0415

        with running_postgres() as server:
            servers = {"postgres": (server.fresh, _raw_postgres)}
            yield {**servers} if chosen == "postgres" else {**files, **servers}


def _rows(batch: Sequence[Interaction]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    episodes = {record.episode_id: codec.episode_row(record) for record in batch}
    return list(episodes.values()), [codec.interaction_row(record) for record in batch]


def _through_the_recorder(where: Location, sealed: Location, records: Sequence[Interaction], waiting: int) -> Took:
    async def record_all(recorder: Recorder) -> Took:
        rest = iter(records)

        async def user() -> None:
            for record in rest:
                await recorder.record(record)

        started = _now()
        await asyncio.gather(*(user() for _ in range(waiting)))
        took = _since(started)
        await recorder.close()
        return took

    with SqlDatabase.open(where) as database, SqlDatabase.open(sealed, role="sealed") as other:
        took = asyncio.run(record_all(Recorder(SqlTrajectoryStore(database), SqlTrajectoryStore(other))))
        _require_all(database, len(records))
    return took


def _through_the_store(where: Location, batches: Sequence[Sequence[Interaction]]) -> Took:
    with SqlDatabase.open(where) as database:
        store = SqlTrajectoryStore(database)
        started = _now()
        for batch in batches:
            store.append_interactions(batch)
        took = _since(started)
        _require_all(database, sum(map(len, batches)))
    return took


def _raw_sqlite(where: Path, batches: Rows) -> Took:
    SqlDatabase.open(where).close()
    with closing(sqlite3.connect(where, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        started = _now()
        for tables in batches:
            connection.execute("BEGIN IMMEDIATE")
            for name, rows in zip(("episodes", "interactions"), tables, strict=True):
                columns = list(rows[0])
                marks = ", ".join(f":{column}" for column in columns)
                statement = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608 - our own names
                connection.executemany(statement, rows)
            connection.execute("COMMIT")
        return _since(started)


def _raw_postgres(where: PostgresAddress, batches: Rows) -> Took:
    import psycopg  # noqa: PLC0415

    types: dict[type, str] = {str: "text", float: "float8", bytes: "bytea", bool: "bool", type(None): "text"}
    SqlDatabase.open(where).close()
    with psycopg.connect(where.url, password=where.password) as connection, connection.cursor() as cursor:
        started = _now()
        for tables in batches:
            for name, rows in zip(("episodes", "interactions"), tables, strict=True):
                columns = list(rows[0])
                query: Any = f"COPY {name} ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)"
                with cursor.copy(query) as copy:
                    copy.set_types([types[type(rows[0][column])] for column in columns])
                    for row in rows:
                        copy.write_row(tuple(row.values()))
            connection.commit()
        return _since(started)


def _now() -> Took:
    return time.perf_counter(), time.process_time()


def _since(started: Took) -> Took:
    now = _now()
    return now[0] - started[0], now[1] - started[1]


def _require_all(database: SqlDatabase, number: int) -> None:
    """A figure of records that are not there would be worth nothing.

    Raises:
        RuntimeError: some are missing.
    """
    with database.read("counted") as connection:
        kept = connection.exec_driver_sql("SELECT count(*) FROM interactions").scalar_one()
    if kept != number:
        raise RuntimeError(f"{kept} of {number} interactions are in the database")
