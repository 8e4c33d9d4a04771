"""The audit log as the gate writes it: a record follows from a state, and is only written while that state stands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tidegate.core.errors import ConflictError, GateError
from tidegate.core.gate.state import GateState, gate_state
from tidegate.core.types import AuditRecord
from tidegate.gate.evaluate import Clock
from tidegate.ports import AuditLog

_APPEND_ATTEMPTS = 3


class Journal:
    """Reads and appends in a thread of its own."""

    def __init__(self, audit: AuditLog, clock: Clock) -> None:
        """Use ``audit``; ``clock`` gives Unix seconds for records."""
        self._audit = audit
        self._clock = clock

    async def records(self) -> list[AuditRecord]:
        """The whole log."""
        return await asyncio.to_thread(lambda: list(self._audit.read()))

    async def append(self, kind: str, body: Mapping[str, Any], head: int | None = None) -> AuditRecord:
        """Append a record, if ``head`` is given only after the record of that number."""
        return await asyncio.to_thread(
            lambda: self._audit.append(kind, body, time=self._clock(), expected_head_seq=head)
        )

    async def append_after(self, state: GateState, kind: str, body: Mapping[str, Any]) -> AuditRecord:
        """Append what follows from ``state``, unless another process moved it; records of other kinds do not.

        Raises:
            GateError: nothing was appended.
        """
        for _ in range(_APPEND_ATTEMPTS):
            records = await self.records()
            if not gate_state(records).decides_as(state):
                raise GateError(
                    f"the {kind} record of this look was not written: another process decided meanwhile, or opened an "
                    "epoch; nothing is promoted and no look is spent: run again"
                )
            try:
                return await self.append(kind, body, records[-1].seq if records else 0)
            except ConflictError:
                continue  # somebody wrote in between; whether it matters is seen above
        raise GateError(
            f"the {kind} record of this look was not written: the audit log moved on in each of {_APPEND_ATTEMPTS} "
            "attempts; nothing is promoted and no look is spent: run again"
        )
