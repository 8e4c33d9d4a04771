"""Epochs of sealed tasks and the answers to them, in the database that the gate alone opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tidegate.core.types import Answer, Task
from tidegate.stores import codec, rowmap, rules
from tidegate.stores import schema as t
from tidegate.stores.database import SqlDatabase

_ANSWER_KEY = (t.answers.c.adapter_sha256, t.answers.c.task_id, t.answers.c.sample)


class SqlSealedStore:
    """The port :class:`tidegate.ports.stores.SealedStore`."""

    def __init__(self, database: SqlDatabase) -> None:
        """Use ``database``, which must be of role ``sealed``.

        Raises:
            StoreError: it is an open one.
        """
        database.require_role("sealed", "the sealed store")
        self._db = database

    def open_epoch(self, epoch_id: str, tasks: Sequence[Task], commitment: str, opened_at: float) -> None:
        """Fix the task set of an epoch for good; the same set again is a no-op.

        Raises:
            ConflictError: the epoch exists with other tasks or another commitment, or names a task twice.
            RequestError: a task cannot be stored.
        """
        rows = rowmap.epoch_task_rows(epoch_id, tasks)
        with self._db.write("written to") as connection:
            known = connection.execute(sa.select(t.epochs).where(t.epochs.c.id == epoch_id)).mappings().first()
            if known is not None:
                texts = connection.execute(_tasks(epoch_id)).scalars().all()
                if known["commitment"] != commitment or texts != [row["task"] for row in rows]:
                    raise rules.epoch_conflict(epoch_id)
                return
            epoch = {"id": epoch_id, "commitment": commitment, "opened_at": opened_at}
            connection.execute(sa.insert(t.epochs).values(epoch))
            if rows:
                connection.execute(sa.insert(t.epoch_tasks), rows)

    def epoch_tasks(self, epoch_id: str) -> tuple[Task, ...]:
        """The tasks of an epoch in their fixed order; empty when it does not exist."""
        with self._db.read("read") as connection:
            texts = connection.execute(_tasks(epoch_id)).scalars().all()
        return tuple(map(codec.task_of, texts))

    def used_task_ids(self) -> frozenset[str]:
        """Ids of every task that any epoch holds or held."""
        with self._db.read("read") as connection:
            return frozenset(connection.execute(sa.select(t.epoch_tasks.c.task_id).distinct()).scalars())

    def save_answers(self, epoch_id: str, answers: Sequence[Answer]) -> None:
        """Keep answers; the first one for (epoch, adapter, task, sample) stands.

        Raises:
            NotFoundError: a task is not in the epoch; nothing is kept then.
        """
        rows = [rowmap.answer_row(epoch_id, answer) for answer in answers]
        with self._db.write("written to") as connection:
            query = sa.select(t.epoch_tasks.c.task_id).where(t.epoch_tasks.c.epoch_id == epoch_id)
            tasks = set(connection.execute(query).scalars())
            query = sa.select(*_ANSWER_KEY).where(t.answers.c.epoch_id == epoch_id)
            known = {tuple(row) for row in connection.execute(query)}
            new: dict[tuple[Any, ...], dict[str, Any]] = {}
            for row in rows:
                if row["task_id"] not in tasks:
                    raise rules.unknown_task(epoch_id, row["task_id"])
                key = tuple(row[column.name] for column in _ANSWER_KEY)
                if key not in known:
                    new.setdefault(key, row)
            if new:
                connection.execute(sa.insert(t.answers), list(new.values()))

    def answers(self, epoch_id: str, adapter_sha256: str, *, sample: int = 0) -> dict[str, Answer]:
        """Cached answers of an adapter by task id, of the given sample."""
        query = sa.select(t.answers).where(t.answers.c.epoch_id == epoch_id, t.answers.c.sample == sample)
        query = query.where(t.answers.c.adapter_sha256 == adapter_sha256).order_by(t.answers.c.task_id)
        with self._db.read("read") as connection:
            rows = connection.execute(query).mappings().all()
        return {row["task_id"]: rowmap.answer_of(row) for row in rows}


def _tasks(epoch_id: str) -> sa.Select[Any]:
    query = sa.select(t.epoch_tasks.c.task).where(t.epoch_tasks.c.epoch_id == epoch_id)
    return query.order_by(t.epoch_tasks.c.position)
