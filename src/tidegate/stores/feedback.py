"""Feedback over one database: kept whether or not what it names is known, matched when that arrives.

Matters because feedback may come days late, twice, or before the record of the answer that it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from tidegate.core.types import Feedback, Interaction
from tidegate.stores import rowmap, rules
from tidegate.stores import schema as t
from tidegate.stores.database import SqlDatabase, parts
from tidegate.stores.records import FeedbackState

_WAITING = t.feedback.c.state == sa.literal_column("'unmatched'")  # a literal, so that the partial index serves


class SqlFeedback:
    """The feedback half of :class:`tidegate.stores.trajectories.SqlTrajectoryStore`."""

    def __init__(self, database: SqlDatabase) -> None:
        """Use ``database``."""
        self._db = database

    def append_feedback(self, feedback: Feedback) -> bool:
        """Commit feedback; False when its id is known already.

        What names an unknown interaction or episode is kept, listed, and matched when the record arrives.

        Raises:
            RequestError: it names both or neither of interaction and episode, or its value is no JSON.
            StoreError: the database cannot be written.
        """
        rules.check_feedback(feedback)
        row = rowmap.feedback_row(feedback)
        with self._db.write("written to") as connection:
            if _is_known(connection, feedback.id):
                return False
            state = FeedbackState.MATCHED if _holds(connection, feedback) else FeedbackState.UNMATCHED
            connection.execute(sa.insert(t.feedback).values(**row, state=str(state)))
        return True

    def list_feedback(self, *, metric_name: str | None = None) -> list[Feedback]:
        """All feedback, oldest first, matched or not."""
        query = sa.select(t.feedback).where(t.feedback.c.state != str(FeedbackState.MOVED))
        if metric_name is not None:
            query = query.where(t.feedback.c.metric_name == metric_name)
        return self._read(query)

    def unmatched_feedback(self, about: Sequence[Interaction] | None = None) -> list[Feedback]:
        """Feedback that waits for the record that it names, oldest first; of ``about`` only if given."""
        query = sa.select(t.feedback).where(_WAITING)
        if about is None:
            return self._read(query)
        found = [f for named in _naming(about) for f in self._read(query.where(named))]
        return sorted(found, key=lambda feedback: (feedback.created_at, feedback.id))

    def knows_feedback(self, feedback_id: str) -> bool:
        """Whether this id was ever appended here."""
        with self._db.read("read") as connection:
            return _is_known(connection, feedback_id)

    def holds(self, feedback: Feedback) -> bool:
        """Whether the interaction or episode that ``feedback`` names is in this database."""
        with self._db.read("read") as connection:
            return _holds(connection, feedback)

    def mark_feedback_moved(self, feedback_id: str) -> None:
        """Keep the id but no longer list it: another database has it now."""
        with self._db.write("written to") as connection:
            moved = sa.update(t.feedback).where(t.feedback.c.id == feedback_id)
            connection.execute(moved.values(state=str(FeedbackState.MOVED)))

    def _read(self, query: sa.Select[Any]) -> list[Feedback]:
        with self._db.read("read") as connection:
            rows = connection.execute(query.order_by(t.feedback.c.created_at, t.feedback.c.id)).mappings().all()
        return [rowmap.feedback_of(row) for row in rows]


def match_feedback(connection: sa.Connection, records: Sequence[Interaction]) -> None:
    """Mark what waited for one of ``records``, in the transaction that appends them."""
    for named in _naming(records):
        matched = sa.update(t.feedback).where(_WAITING, named)
        connection.execute(matched.values(state=str(FeedbackState.MATCHED)))


def _naming(records: Sequence[Interaction]) -> Iterator[sa.ColumnElement[bool]]:
    """Conditions that together select the feedback about ``records``, each served by an index."""
    for column, ids in (
        (t.feedback.c.interaction_id, {record.id for record in records}),
        (t.feedback.c.episode_id, {record.episode_id for record in records}),
    ):
        for part in parts(ids):
            yield column.in_(part)


def _is_known(connection: sa.Connection, feedback_id: str) -> bool:
    return connection.execute(sa.select(t.feedback.c.id).where(t.feedback.c.id == feedback_id)).first() is not None


def _holds(connection: sa.Connection, feedback: Feedback) -> bool:
    if feedback.interaction_id is not None:
        query = sa.select(t.interactions.c.id).where(t.interactions.c.id == feedback.interaction_id)
    else:
        query = sa.select(t.episodes.c.id).where(t.episodes.c.id == feedback.episode_id)
    return connection.execute(query).first() is not None
