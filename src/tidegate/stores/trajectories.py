"""Interactions, episodes, verdicts, rewards and batch manifests over one database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from tidegate.core.errors import ConflictError, NotFoundError
from tidegate.core.types import Episode, Interaction, JsonObject, Split, Verdict
from tidegate.stores import codec, rowmap, rules
from tidegate.stores import schema as t
from tidegate.stores.database import parts
from tidegate.stores.feedback import SqlFeedback, match_feedback
from tidegate.stores.records import Reward

_REWARD_KEY = ("interaction_id", "verifier", "version", "policy")
_VERDICT_KEY = ("episode_id", "verifier", "version")


class SqlTrajectoryStore(SqlFeedback):
    """The port :class:`tidegate.ports.stores.TrajectoryStore`, and what capture and curation need besides.

    The role of the database decides which splits are accepted, so that sealed traffic can never be read here
    from the database that training reads.
    """

    def append_interactions(self, interactions: Sequence[Interaction]) -> int:
        """Commit a batch in one transaction; known ids are left as they are. Returns how many were new.

        Raises:
            ConflictError: an episode belongs to another user or split.
            RequestError: a record cannot be stored as it is.
            StoreError: a record is of the wrong split, or the database cannot be written.
        """
        rows: dict[str, dict[str, Any]] = {}
        records: dict[str, Interaction] = {}
        for interaction in interactions:
            rules.check_split(self._db.role, interaction)
            if interaction.id not in rows:
                rows[interaction.id] = codec.interaction_row(interaction)
                records[interaction.id] = interaction
        with self._db.write("written to") as connection:
            for part in parts(rows):
                known = sa.select(t.interactions.c.id).where(t.interactions.c.id.in_(part))
                for id_ in connection.execute(known).scalars():
                    del rows[id_], records[id_]
            if rows:
                _join_episodes(connection, list(records.values()))
                connection.execute(sa.insert(t.interactions), list(rows.values()))
                match_feedback(connection, list(records.values()))
        return len(rows)

    def get_interaction(self, interaction_id: str) -> Interaction | None:
        """One record, or None."""
        with self._db.read("read") as connection:
            row = connection.execute(_records().where(t.interactions.c.id == interaction_id)).mappings().first()
        return None if row is None else codec.interaction_of(row)

    def list_episodes(
        self,
        *,
        splits: Sequence[Split],
        after: float = 0.0,
        until: float | None = None,
        active: bool = False,
        releases: Collection[str] | None = None,
        latest: int | None = None,
    ) -> list[Episode]:
        """Episodes whose first interaction lies in (after, until], ordered by that time, then id.

        With ``active`` those with any interaction in there; with ``releases`` those that one of them answered in; with
        ``latest`` at most so many of these, the last.
        """
        wanted: list[sa.ColumnElement[bool]] = [t.episodes.c.split.in_([str(split) for split in splits])]
        if active:
            wanted.append(t.episodes.c.id.in_(_active(after, until)))
        else:
            wanted.append(t.episodes.c.first_at > after)
            if until is not None:
                wanted.append(t.episodes.c.first_at <= until)
        if releases is not None:
            wanted.append(_answered_by(releases))
        query = _records().where(*wanted)
        if latest is not None:
            order = (t.episodes.c.first_at.desc(), t.episodes.c.id.desc())
            last = sa.select(t.episodes.c.id).where(*wanted).order_by(*order).limit(latest)
            query = _records().where(t.episodes.c.id.in_(last))
        query = query.order_by(t.episodes.c.first_at, t.episodes.c.id, t.interactions.c.created_at, t.interactions.c.id)
        with self._db.read("read") as connection:
            rows = connection.execute(query).mappings().all()
        return [
            _episode(tuple(codec.interaction_of(row) for row in group))
            for _, group in groupby(rows, key=lambda row: row["episode_id"])
        ]

    def append_verdicts(self, verdicts: Sequence[Verdict]) -> int:
        """Commit verdicts and the rewards that follow from them; one per (episode, verifier, version) is kept.

        Returns:
            How many were new.

        Raises:
            NotFoundError: a verdict is about an episode that is not here.
            RequestError: a score lies outside [0, 1], or a time is not finite.
        """
        rows = [rowmap.verdict_row(verdict) for verdict in verdicts]
        new = 0
        with self._db.write("written to") as connection:
            for verdict, row in zip(verdicts, rows, strict=True):
                if not _insert_new(connection, t.verdicts, _VERDICT_KEY, row, needs=_require_episode):
                    continue
                new += 1
                reward = rules.last_turn_reward(verdict, _last_main_line(connection, verdict.episode_id))
                if reward is not None:
                    _insert_new(connection, t.rewards, _REWARD_KEY, rowmap.reward_row(reward))
        return new

    def list_verdicts(self) -> list[Verdict]:
        """All verdicts, oldest first."""
        return [rowmap.verdict_of(row) for row in self._all(t.verdicts, _VERDICT_KEY)]

    def add_reward(self, reward: Reward) -> bool:
        """Commit a reward of a policy of its own; False when (interaction, verifier, version, policy) has one.

        Raises:
            NotFoundError: its interaction is not here.
            RequestError: its time is not finite.
        """
        row = rowmap.reward_row(reward)
        with self._db.write("written to") as connection:
            return _insert_new(connection, t.rewards, _REWARD_KEY, row, needs=_require_interaction)

    def list_rewards(self) -> list[Reward]:
        """All rewards, oldest first."""
        return [Reward(**row) for row in self._all(t.rewards, _REWARD_KEY)]

    def add_manifest(self, manifest_hash: str, body: JsonObject, *, time: float) -> bool:
        """Keep a batch manifest under its hash; False when it is known.

        Raises:
            ConflictError: the hash is taken by other content.
        """
        text = codec.to_json(dict(body), f"manifest {manifest_hash!r}")
        with self._db.write("written to") as connection:
            known = connection.execute(_manifest(manifest_hash)).scalar()
            if known is not None and known != text:
                raise ConflictError(f"manifest {manifest_hash!r} is known with other content; a hash names one content")
            if known is None:
                row = {"hash": manifest_hash, "body": text, "created_at": time}
                connection.execute(sa.insert(t.batch_manifests).values(row))
        return known is None

    def get_manifest(self, manifest_hash: str) -> JsonObject | None:
        """A batch manifest, or None."""
        with self._db.read("read") as connection:
            text = connection.execute(_manifest(manifest_hash)).scalar()
        return None if text is None else codec.from_json(text)

    def _all(self, table: sa.Table, key: Sequence[str]) -> Sequence[sa.RowMapping]:
        query = sa.select(table).order_by(table.c.created_at, *(table.c[name] for name in key))
        with self._db.read("read") as connection:
            return connection.execute(query).mappings().all()


def _records() -> sa.Select[Any]:
    joined = t.interactions.join(t.episodes, t.interactions.c.episode_id == t.episodes.c.id)
    return sa.select(t.interactions, t.episodes.c.user_key, t.episodes.c.split).select_from(joined)


def _active(after: float, until: float | None) -> sa.Select[Any]:
    """Ids of episodes with a call in (after, until]."""
    within = sa.select(t.interactions.c.episode_id).where(t.interactions.c.created_at > after)
    return within if until is None else within.where(t.interactions.c.created_at <= until)


def _answered_by(releases: Collection[str]) -> sa.ColumnElement[bool]:
    call = t.interactions.alias()
    return sa.exists().where(call.c.episode_id == t.episodes.c.id, call.c.release_id.in_(releases))


def _episode(records: tuple[Interaction, ...]) -> Episode:
    first = records[0]
    return Episode(id=first.episode_id, user_key=first.user_key, split=first.split, interactions=records)


def _join_episodes(connection: sa.Connection, records: Sequence[Interaction]) -> None:
    """Make the episodes that are new, and let none change its user or split."""
    known: dict[str, Any] = {}
    for part in parts({record.episode_id for record in records}):
        rows = connection.execute(sa.select(t.episodes).where(t.episodes.c.id.in_(part))).mappings()
        known.update((row["id"], row) for row in rows)
    wanted = {id_: dict(row) for id_, row in known.items()}
    for record in records:
        row = codec.episode_row(record)
        owner = wanted.setdefault(record.episode_id, row)
        rules.check_same_episode(owner, record)
        owner["first_at"] = min(owner["first_at"], record.created_at)
    new = [row for id_, row in wanted.items() if id_ not in known]
    if new:
        connection.execute(sa.insert(t.episodes), new)
    for id_, row in known.items():
        if wanted[id_]["first_at"] < row["first_at"]:
            earlier = sa.update(t.episodes).where(t.episodes.c.id == id_)
            connection.execute(earlier.values(first_at=wanted[id_]["first_at"]))


def _insert_new(
    connection: sa.Connection,
    table: sa.Table,
    key: Sequence[str],
    row: dict[str, Any],
    *,
    needs: Callable[[sa.Connection, dict[str, Any]], None] | None = None,
) -> bool:
    """Insert unless a row with this key stands; the write lock makes looking first safe."""
    known = sa.select(table.c[key[0]]).where(*(table.c[name] == row[name] for name in key))
    if connection.execute(known).first() is not None:
        return False
    if needs is not None:
        needs(connection, row)
    connection.execute(sa.insert(table).values(row))
    return True


def _require_episode(connection: sa.Connection, row: dict[str, Any]) -> None:
    id_ = row["episode_id"]
    if connection.execute(sa.select(t.episodes.c.id).where(t.episodes.c.id == id_)).first() is None:
        raise NotFoundError(f"verdict on episode {id_!r}: it is not in this database; record it first")


def _require_interaction(connection: sa.Connection, row: dict[str, Any]) -> None:
    id_ = row["interaction_id"]
    if connection.execute(sa.select(t.interactions.c.id).where(t.interactions.c.id == id_)).first() is None:
        raise NotFoundError(f"reward for interaction {id_!r}: it is not in this database; record it first")


def _last_main_line(connection: sa.Connection, episode_id: str) -> str | None:
    query = (
        sa.select(t.interactions.c.id)
        .where(t.interactions.c.episode_id == episode_id, t.interactions.c.main_line)
        .order_by(t.interactions.c.created_at.desc(), t.interactions.c.id.desc())
        .limit(1)
    )
    return connection.execute(query).scalar()


def _manifest(manifest_hash: str) -> sa.Select[Any]:
    return sa.select(t.batch_manifests.c.body).where(t.batch_manifests.c.hash == manifest_hash)
