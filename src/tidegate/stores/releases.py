"""Candidates, releases and aliases over one database; every change and its audit record are one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from tidegate.core.lifecycle import transition
from tidegate.core.types import Candidate, CandidateState, Release
from tidegate.stores import rowmap, rules
from tidegate.stores import schema as t
from tidegate.stores.audit import append_record
from tidegate.stores.database import SqlDatabase


class SqlReleaseStore:
    """The port :class:`tidegate.ports.stores.ReleaseStore`."""

    def __init__(self, database: SqlDatabase) -> None:
        """Use ``database``, which must be of role ``open``.

        Raises:
            StoreError: it is a sealed one.
        """
        database.require_role("open", "the release store")
        self._db = database

    def add_candidate(self, candidate: Candidate) -> None:
        """Register a candidate; the same id and hash again is a no-op.

        Raises:
            ConflictError: it is not ``proposed``, or its id is taken by other weights.
            RequestError: its time is not finite.
        """
        rules.check_proposed(candidate)
        row = rowmap.candidate_row(candidate)
        with self._db.write("written to") as connection:
            known = _candidate(connection, candidate.id)
            if known is not None:
                rules.check_same_candidate(known, candidate)
                return
            connection.execute(sa.insert(t.candidates).values(row))
            append_record(connection, "candidate_proposed", rules.proposed_body(candidate), time=candidate.created_at)

    def list_candidates(self) -> list[Candidate]:
        """All candidates, oldest first."""
        query = sa.select(t.candidates).order_by(t.candidates.c.created_at, t.candidates.c.id)
        with self._db.read("read") as connection:
            return [rowmap.candidate_of(row) for row in connection.execute(query).mappings()]

    def set_candidate_state(
        self, candidate_id: str, state: CandidateState, *, reasons: Sequence[str], time: float
    ) -> Candidate:
        """Move a candidate along the lifecycle; the state that it has already is a no-op.

        Raises:
            NotFoundError: the candidate is unknown.
            ConflictError: the move is not legal.
        """
        with self._db.write("written to") as connection:
            known = _candidate(connection, candidate_id)
            if known is None:
                raise rules.unknown_candidate(candidate_id)
            if known.state is state:
                return known
            row = {**rowmap.candidate_row(known), "state": str(transition(known.state, state))}
            connection.execute(sa.update(t.candidates).where(t.candidates.c.id == candidate_id).values(row))
            append_record(connection, "candidate_moved", rules.moved_body(known, state, reasons), time=time)
        return rowmap.candidate_of(row)

    def add_release(self, release: Release) -> None:
        """Register a release; the same id again is a no-op.

        Raises:
            ConflictError: its id or number is taken by another release.
            NotFoundError: it restores a release that is unknown.
        """
        row = rowmap.release_row(release)
        with self._db.write("written to") as connection:
            taken = sa.select(t.releases).where(
                sa.or_(t.releases.c.id == release.id, t.releases.c.number == release.number)
            )
            for known in connection.execute(taken).mappings().all():
                rules.check_same_release(rowmap.release_of(known), release)
                return
            if release.restores is not None:
                _require_releases(connection, [release.restores])
            connection.execute(sa.insert(t.releases).values(row))
            append_record(connection, "release_added", rules.release_body(release), time=release.created_at)

    def list_releases(self) -> list[Release]:
        """All releases by number."""
        with self._db.read("read") as connection:
            rows = connection.execute(sa.select(t.releases).order_by(t.releases.c.number)).mappings().all()
        return [rowmap.release_of(row) for row in rows]

    def aliases(self) -> dict[str, str]:
        """Alias (``champion``, ``previous``, ``anchor``) to release id."""
        with self._db.read("read") as connection:
            return _aliases(connection)

    def move_aliases(self, targets: Mapping[str, str], *, reason: str, time: float) -> None:
        """Point aliases at releases in one transaction; where all of them point there already is a no-op.

        Raises:
            NotFoundError: a release is unknown.
        """
        with self._db.write("written to") as connection:
            _require_releases(connection, targets.values())
            before = _aliases(connection)
            moved = {name: target for name, target in targets.items() if before.get(name) != target}
            if not moved:
                return
            for name, target in moved.items():
                connection.execute(sa.delete(t.aliases).where(t.aliases.c.name == name))
                connection.execute(sa.insert(t.aliases).values(name=name, release_id=target))
            append_record(connection, "aliases_moved", rules.aliases_body(before, moved, reason), time=time)


def _candidate(connection: sa.Connection, candidate_id: str) -> Candidate | None:
    query = sa.select(t.candidates).where(t.candidates.c.id == candidate_id)
    row = connection.execute(query).mappings().first()
    return None if row is None else rowmap.candidate_of(row)


def _aliases(connection: sa.Connection) -> dict[str, str]:
    rows = connection.execute(sa.select(t.aliases).order_by(t.aliases.c.name)).mappings()
    return {row["name"]: row["release_id"] for row in rows}


def _require_releases(connection: sa.Connection, ids: Iterable[str]) -> None:
    for id_ in ids:
        if connection.execute(sa.select(t.releases.c.id).where(t.releases.c.id == id_)).first() is None:
            raise rules.unknown_release(id_)
