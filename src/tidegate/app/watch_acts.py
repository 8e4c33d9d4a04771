"""What was decided about a live trial is done: a swap, a freeze, a quarantine, each of them once.

The log says what is still to be done, so it does not matter which process decided it or where that one died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from tidegate.core.errors import CertificateError, ConflictError, VoidCertificateError
from tidegate.core.gate.controls import FREEZE
from tidegate.core.gate.live_state import LIVE_CARRIED_OUT, QUARANTINE, Trial
from tidegate.core.gate.state import GateState, fold
from tidegate.core.types import CandidateState, JsonObject, Release
from tidegate.ports import AuditLog
from tidegate.release import CHAMPION, Division

_log = logging.getLogger(__name__)

_ATTEMPTS = 5  # somebody else's record between reading and writing is rare, five in a row is a fault


class ServesReleases(Protocol):
    """The slice of the publisher that is used here."""

    async def start_canary(self, candidate_id: str, *, against: str) -> Release: ...

    async def end_canary(self, state: CandidateState, *, reason: str) -> Release: ...

    async def rollback(self, to: str | None, reason: str) -> Release: ...

    async def replace_void(self, void: VoidCertificateError) -> Release: ...

    async def forget_previous(self, reason: str) -> Release: ...

    async def divide(self, division: Division | None) -> None: ...

    async def served(self) -> dict[str, Release]: ...


class GateLog:
    """The gate's memory, read on from where it was read last.

    Synchronous, from one thread at a time.
    """

    def __init__(self, audit: AuditLog, clock: Callable[[], float]) -> None:
        self._audit = audit
        self._clock = clock
        self._seq = 0
        self.state = GateState()

    def refresh(self) -> GateState:
        """The state after every record so far.

        Raises:
            AuditError: a record is malformed.
        """
        for record in self._audit.read(after_seq=self._seq):
            self.state, self._seq = fold(self.state, record), record.seq
        return self.state

    def append(self, kind: str, body: JsonObject) -> None:
        """Append to the state that was read last, and no other.

        Raises:
            ConflictError: the log moved on; nothing was written.
        """
        self._audit.append(kind, body, time=self._clock(), expected_head_seq=self._seq)
        self.refresh()

    def append_next(self, kind: str, body: JsonObject) -> None:
        """Append what holds whatever was written since.

        Raises:
            ConflictError: others wrote faster in every attempt; nothing was written.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            self.refresh()
            try:
                self.append(kind, body)
            except ConflictError:
                if attempt == _ATTEMPTS:
                    raise
            else:
                return


async def carry_out(log: GateLog, publisher: ServesReleases) -> None:
    """Do what the looks so far decided and nobody did yet.

    Raises:
        TidegateError: it can't be done now; the log still says that it has to be.
    """
    live = log.state.live
    if live.freeze_due is not None:
        trigger, reason = live.freeze_due
        await asyncio.to_thread(log.append_next, FREEZE, {"reason": reason, "trigger": trigger})
    trial = live.unfinished
    if trial is None:
        return
    await _swap(trial, publisher)
    if trial.decision == "roll_back" and trial.manifest_hash not in {None, *live.quarantined}:
        body = {"manifest_hash": trial.manifest_hash, "candidate": trial.candidate, "trial": trial.id}
        await asyncio.to_thread(log.append_next, QUARANTINE, body)
    await asyncio.to_thread(log.append_next, LIVE_CARRIED_OUT, {"trial": trial.id, "decision": trial.decision})


async def _swap(trial: Trial, publisher: ServesReleases) -> None:
    champion = (await publisher.served())[CHAMPION].id
    if trial.kind == "steady":
        await publisher.divide(None)
        if trial.decision == "roll_back" and champion == trial.subject_release:
            try:
                await publisher.rollback(trial.control_release, trial.reason)
            except CertificateError as void:  # a bad champion goes, whatever became of the one before it
                _log.warning("%s cannot be served again: %s", trial.control_release, void)
                await publisher.replace_void(VoidCertificateError(trial.reason))
        return
    state = CandidateState.ROLLED_BACK if trial.decision == "roll_back" else CandidateState.REJECTED
    if trial.decision == "promote" and champion in (trial.control_release, trial.subject_release):
        state = CandidateState.CHAMPION
    try:
        await publisher.end_canary(state, reason=trial.reason)
    except CertificateError as void:
        if state is not CandidateState.CHAMPION:
            raise
        _log.warning("the canary of trial %s is not promoted: %s", trial.id, void)
        await publisher.end_canary(CandidateState.REJECTED, reason=f"{trial.reason}; it is not promoted: {void}")
