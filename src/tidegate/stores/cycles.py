"""Cycles and their finished steps over one database."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tidegate.core.types import JsonObject
from tidegate.stores import codec, rules
from tidegate.stores import schema as t
from tidegate.stores.database import SqlDatabase


class SqlCycleStore:
    """The port :class:`tidegate.ports.stores.CycleStore`."""

    def __init__(self, database: SqlDatabase) -> None:
        """Use ``database``, which must be of role ``open``.

        Raises:
            StoreError: it is a sealed one.
        """
        database.require_role("open", "the cycle store")
        self._db = database

    def open_cycle(self, cycle_id: str, *, config: JsonObject, time: float) -> None:
        """Start a cycle; at most one may be open.

        Raises:
            ConflictError: another one is open, or the id was used before.
        """
        text = codec.to_json(dict(config), f"configuration of cycle {cycle_id!r}", canonical=False)
        with self._db.write("written to") as connection:
            taken = sa.select(t.cycles.c.id).where(sa.or_(t.cycles.c.open_slot == 1, t.cycles.c.id == cycle_id))
            known = connection.execute(taken).scalar()
            if known is not None:
                raise rules.cycle_conflict(cycle_id, known)
            row = {"id": cycle_id, "config": text, "opened_at": time, "open_slot": 1}
            connection.execute(sa.insert(t.cycles).values(**row, position=_next(t.cycles)))

    def current(self) -> tuple[str, JsonObject] | None:
        """Id and configuration of the open cycle, if any."""
        with self._db.read("read") as connection:
            row = connection.execute(sa.select(t.cycles).where(t.cycles.c.open_slot == 1)).mappings().first()
        return None if row is None else (row["id"], codec.from_json(row["config"]))

    def finish_step(self, cycle_id: str, step: str, output: JsonObject, *, time: float) -> None:
        """Record a step's output; a step that is recorded already keeps its first output.

        Raises:
            NotFoundError: the cycle is unknown.
            ConflictError: the cycle is closed.
        """
        text = codec.to_json(dict(output), f"output of step {step!r} of cycle {cycle_id!r}", canonical=False)
        with self._db.write("written to") as connection:
            known = sa.select(t.cycle_steps.c.step).where(
                t.cycle_steps.c.cycle_id == cycle_id, t.cycle_steps.c.step == step
            )
            if connection.execute(known).first() is not None:
                return
            rules.check_cycle_open(cycle_id, _cycle(connection, cycle_id))
            row = {"cycle_id": cycle_id, "step": step, "output": text, "finished_at": time}
            connection.execute(sa.insert(t.cycle_steps).values(**row, position=_next(t.cycle_steps)))

    def steps(self, cycle_id: str) -> dict[str, JsonObject]:
        """Outputs of the finished steps, in the order in which they finished."""
        query = sa.select(t.cycle_steps).where(t.cycle_steps.c.cycle_id == cycle_id)
        query = query.order_by(t.cycle_steps.c.finished_at, t.cycle_steps.c.position)
        with self._db.read("read") as connection:
            rows = connection.execute(query).mappings().all()
        return {row["step"]: codec.from_json(row["output"]) for row in rows}

    def close_cycle(self, cycle_id: str, outcome: str, *, time: float) -> None:
        """End a cycle with its outcome (``done``, ``refused``, ``abstained``, ``failed``); again is a no-op.

        Raises:
            NotFoundError: the cycle is unknown.
            ConflictError: it ended with another outcome.
        """
        with self._db.write("written to") as connection:
            if not rules.check_closable(cycle_id, _cycle(connection, cycle_id), outcome):
                return
            closed = sa.update(t.cycles).where(t.cycles.c.id == cycle_id)
            connection.execute(closed.values(closed_at=time, outcome=outcome, open_slot=None))

    def list_cycles(self) -> list[JsonObject]:
        """All cycles, oldest first: id, opened_at, closed_at, outcome."""
        columns = (t.cycles.c.id, t.cycles.c.opened_at, t.cycles.c.closed_at, t.cycles.c.outcome)
        query = sa.select(*columns).order_by(t.cycles.c.opened_at, t.cycles.c.position)
        with self._db.read("read") as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def _cycle(connection: sa.Connection, cycle_id: str) -> dict[str, Any] | None:
    row = connection.execute(sa.select(t.cycles).where(t.cycles.c.id == cycle_id)).mappings().first()
    return None if row is None else dict(row)


def _next(table: sa.Table) -> sa.ScalarSelect[int]:
    """The position after the last one; the write lock keeps it free."""
    return sa.select(sa.func.coalesce(sa.func.max(table.c.position), 0) + 1).scalar_subquery()
