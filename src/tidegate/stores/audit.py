"""The audit log over one database: one chain, whichever process appends."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from tidegate.core.audit import next_record
from tidegate.core.types import AuditRecord, JsonObject
from tidegate.stores import rowmap, rules
from tidegate.stores import schema as t
from tidegate.stores.database import SqlDatabase
from tidegate.stores.records import Decision

_PAGE = 500  # a reader that stops half-way must not hold a transaction open


class SqlAuditLog:
    """The port :class:`tidegate.ports.stores.AuditLog`."""

    def __init__(self, database: SqlDatabase) -> None:
        """Use ``database``, which must be of role ``open``.

        Raises:
            StoreError: it is a sealed one.
        """
        database.require_role("open", "the audit log")
        self._db = database

    def append(self, kind: str, body: JsonObject, *, time: float, expected_head_seq: int | None = None) -> AuditRecord:
        """Commit the next record of the chain; a ``decision`` gets its row of ``decisions`` too.

        Raises:
            AuditError: ``body`` cannot be written as canonical JSON.
            ConflictError: ``expected_head_seq`` is given and the last record has another number.
            StoreError: the database cannot be written.
        """
        with self._db.write("written to") as connection:
            return append_record(connection, kind, body, time=time, expected_head_seq=expected_head_seq)

    def read(self, *, after_seq: int = 0) -> Iterator[AuditRecord]:
        """Records in order."""
        while True:
            query = sa.select(t.audit_records).where(t.audit_records.c.seq > after_seq)
            with self._db.read("read") as connection:
                rows = connection.execute(query.order_by(t.audit_records.c.seq).limit(_PAGE)).mappings().all()
            yield from map(rowmap.audit_of, rows)
            if len(rows) < _PAGE:
                return
            after_seq = rows[-1]["seq"]

    def list_decisions(self, *, epoch_id: str | None = None) -> list[Decision]:
        """The gate's decisions in order, of one epoch if asked so."""
        query = sa.select(t.audit_records).join(t.decisions, t.decisions.c.seq == t.audit_records.c.seq)
        if epoch_id is not None:
            query = query.where(t.decisions.c.epoch_id == epoch_id)
        with self._db.read("read") as connection:
            rows = connection.execute(query.order_by(t.audit_records.c.seq)).mappings().all()
        decisions = (rules.decision_of(rowmap.audit_of(row)) for row in rows)
        return [decision for decision in decisions if decision is not None]


def append_record(
    connection: sa.Connection, kind: str, body: JsonObject, *, time: float, expected_head_seq: int | None = None
) -> AuditRecord:
    """Append within a write transaction: its lock keeps the chain from forking."""
    last = sa.select(t.audit_records).order_by(t.audit_records.c.seq.desc()).limit(1)
    row = connection.execute(last).mappings().first()
    head = None if row is None else rowmap.audit_of(row)
    rules.check_head(head, expected_head_seq)
    record = next_record(head, kind=kind, body=body, time=time)
    connection.execute(sa.insert(t.audit_records).values(rowmap.audit_row(record)))
    decision = rules.decision_of(record)
    if decision is not None:
        connection.execute(
            sa.insert(t.decisions).values(
                seq=decision.seq,
                outcome=decision.outcome,
                candidate_id=decision.candidate_id,
                epoch_id=decision.epoch_id,
            )
        )
    return record
