"""Answers of releases in the shadow over one database of open traffic; sealed users have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tidegate.core.shadow import ShadowAnswer, ShadowOutcome, ShadowPair
from tidegate.stores import codec, rowmap, rules
from tidegate.stores import schema as t
from tidegate.stores.database import SqlDatabase, parts

_PAIR_COLUMNS = tuple(column.label(f"shadow_{column.name}") for column in t.shadow_answers.c)


class SqlShadowStore:
    """The port :class:`tidegate.ports.shadows.ShadowStore`."""

    def __init__(self, database: SqlDatabase) -> None:
        """Use ``database``, which must be of role ``open``.

        Raises:
            StoreError: it is a sealed one.
        """
        database.require_role("open", "the store of shadow answers")
        self._db = database

    def append_shadow_answers(self, answers: Sequence[ShadowAnswer]) -> int:
        """Commit a batch in one transaction, the first answer per shadow and interaction. Returns how many were new.

        Raises:
            NotFoundError: an interaction is not in this database; nothing is kept then.
            RequestError: an answer cannot be stored, or its user said no to storing.
        """
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for answer in answers:
            rows.setdefault((answer.shadow_id, answer.interaction_id), rowmap.shadow_row(answer))
        with self._db.write("written to") as connection:
            consent: dict[str, bool] = {}
            for part in parts({interaction_id for _, interaction_id in rows}):
                found = sa.select(t.interactions.c.id, t.interactions.c.consent).where(t.interactions.c.id.in_(part))
                consent.update((row.id, bool(row.consent)) for row in connection.execute(found))
                known = sa.select(t.shadow_answers.c.shadow_id, t.shadow_answers.c.interaction_id)
                for row in connection.execute(known.where(t.shadow_answers.c.interaction_id.in_(part))):
                    rows.pop((row.shadow_id, row.interaction_id), None)
            for _, interaction_id in rows:
                rules.check_shadowed(interaction_id, consent.get(interaction_id))
            if rows:
                connection.execute(sa.insert(t.shadow_answers), list(rows.values()))
        return len(rows)

    def count_shadow_answers(self, shadow_id: str) -> Mapping[tuple[ShadowOutcome, str], int]:
        """How many calls came to which end, by outcome and reason."""
        c = t.shadow_answers.c
        query = sa.select(c.outcome, c.reason, sa.func.count()).where(c.shadow_id == shadow_id)
        with self._db.read("read") as connection:
            rows = connection.execute(query.group_by(c.outcome, c.reason)).all()
        return {(ShadowOutcome(outcome), reason): int(count) for outcome, reason, count in rows}

    def list_shadow_pairs(self, shadow_id: str, *, latest: int | None = None) -> list[ShadowPair]:
        """Answered and failed calls beside their interactions, in order of time; with ``latest`` the last so many."""
        c = t.shadow_answers.c
        joined = t.shadow_answers.join(t.interactions, c.interaction_id == t.interactions.c.id)
        joined = joined.join(t.episodes, t.interactions.c.episode_id == t.episodes.c.id)
        query = (
            sa.select(t.interactions, t.episodes.c.user_key, t.episodes.c.split, *_PAIR_COLUMNS)
            .select_from(joined)
            .where(c.shadow_id == shadow_id, c.outcome != str(ShadowOutcome.DROPPED))
            .order_by(c.created_at.desc(), c.interaction_id.desc())
            .limit(latest)
        )
        with self._db.read("read") as connection:
            rows = connection.execute(query).mappings().all()
        return [_pair(row) for row in reversed(rows)]


def _pair(row: sa.RowMapping) -> ShadowPair:
    answer = {column.name: row[f"shadow_{column.name}"] for column in t.shadow_answers.c}
    return ShadowPair(main=codec.interaction_of(row), answer=rowmap.shadow_of(answer))
