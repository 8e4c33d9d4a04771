"""The gate's memory as a fold over its audit records: there is no second copy that could differ.

``epoch_opened`` fixes a sealed set, ``decision`` takes a look when it refuses or promotes, ``epoch_closed`` and a
review that invalidates a verifier end a set early; :mod:`tidegate.core.gate.controls` holds what people do,
:mod:`tidegate.core.gate.live_state` what live traffic showed. Every other kind passes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from tidegate.core.errors import AuditError
from tidegate.core.gate.controls import BREAK_GLASS, Controls, fold_controls
from tidegate.core.gate.live_state import LiveState, fold_live
from tidegate.core.gate.policy import LedgerRules, Policy
from tidegate.core.hashing import content_hash
from tidegate.core.statistics import Ledger
from tidegate.core.types import AuditRecord, JsonObject

DECISION = "decision"
SCREEN = "screen"
EPOCH_OPENED = "epoch_opened"
EPOCH_CLOSED = "epoch_closed"

SPENDING = ("promote", "refuse")
"""Decisions that take a look; an abstention is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One sealed set: what was fixed when it opened, and how much of it is used up.

    ``decoding`` holds the sampling settings that every arm answers with, ``grading`` what its answers are scored
    by: answers are kept for a whole epoch and are only comparable when both stay. ``opened_at`` in Unix seconds.
    ``closed`` says why no further challenger may be looked at, None while one may.
    """

    id: str
    number: int
    commitment: str
    size: int
    decoding: JsonObject
    grading: JsonObject
    opened_at: float
    looks: int = 0
    closed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """Where the ledger, the epochs, the controls and the live trials stand after some records."""

    window: Ledger | None = None
    epochs: tuple[Epoch, ...] = ()
    controls: Controls = field(default_factory=Controls)
    live: LiveState = field(default_factory=LiveState)

    def ledger(self, policy: Policy) -> Ledger:
        """The ledger before the next look under ``policy``; looser rules wait for the next window."""
        return _ledger_under(self.window, policy.ledger)

    def decides_as(self, other: GateState) -> bool:
        """Whether a look at a sealed set means the same in both states: what live traffic shows does not enter it."""
        return replace(self, live=other.live) == other

    def why_not_decide(self, policy: Policy) -> str | None:
        """What keeps the gate from deciding under ``policy`` now, in words; None when nothing does."""
        if self.live.freeze_due is not None:
            trigger, reason = self.live.freeze_due
            return f"trigger {trigger} stops learning ({reason}), and the server has not carried that out yet: start it"
        window, used = (1, 0) if self.window is None else (self.window.window, self.window.used)
        return self.controls.why_not(policy, window=window, looks_taken=used)

    def open_epoch(self, policy: Policy) -> Epoch | None:
        """The epoch that the next challenger is looked at in, or None when a new one is needed.

        An epoch that is smaller than the policy asks for is not looked at again.
        """
        if not self.epochs:
            return None
        last = self.epochs[-1]
        usable = (
            last.closed is None and last.looks < policy.ledger.looks_per_epoch and last.size >= policy.sealed.min_pairs
        )
        return last if usable else None


def fold(state: GateState, record: AuditRecord) -> GateState:
    """The state after one more record.

    Raises:
        AuditError: a record of the gate lacks a field or follows impossibly.
    """
    try:
        number = 1 if state.window is None else state.window.window
        controls = fold_controls(state.controls, record, window=number)
        fallen = controls.invalidated - state.controls.invalidated
        state = replace(state, controls=controls, live=fold_live(state.live, record))
        for verifier, version in sorted(fallen):
            state = _without_verifier(state, verifier, version)
        return _moved(state, record.kind, record.body, record.time)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise AuditError(f"audit record {record.seq} of kind {record.kind!r} is malformed: {error!r}") from error


def _moved(state: GateState, kind: str, body: JsonObject, time: float) -> GateState:
    if kind == EPOCH_OPENED:
        return _opened(state, body, time)
    if kind == EPOCH_CLOSED:
        return _closed(state, str(body["epoch"]), str(body["reason"]))
    if kind == DECISION and body["decision"] in SPENDING:
        return _spent(state, body)
    if kind == BREAK_GLASS and state.window is not None:
        return replace(state, window=replace(state.window, promotions=0))
    return state


def gate_state(records: Iterable[AuditRecord]) -> GateState:
    """Fold a whole log."""
    return reduce(fold, records, GateState())


def ledger_from(records: Iterable[AuditRecord], policy: Policy) -> Ledger:
    """The ledger before the next look, from the log alone."""
    return gate_state(records).ledger(policy)


def commitment_of(task_ids: Iterable[str], salt: str) -> str:
    """Commitment to a sealed set: fixes its tasks without telling which, until the salt is shown."""
    return content_hash({"salt": salt, "tasks": sorted(task_ids)})


def find_decision(
    records: Sequence[AuditRecord],
    *,
    candidate_sha256: str,
    champion_sha256: str,
    anchor_sha256: str,
    policy_hash: str,
) -> AuditRecord | None:
    """The look that was already taken at a candidate against these opponents under this policy, if any.

    It stands: asking again can neither spend a second look nor turn a refusal into a promotion.
    """
    for record in reversed(records):
        if record.kind == DECISION and record.body["decision"] in SPENDING:
            names: tuple[Any, ...] = (
                record.body["candidate_sha256"],
                record.body["champion_sha256"],
                record.body["anchor_sha256"],
                record.body["policy_hash"],
            )
            if names == (candidate_sha256, champion_sha256, anchor_sha256, policy_hash):
                return record
    return None


def find_screen(
    records: Sequence[AuditRecord], given: JsonObject, *, reference_sha256: str | None
) -> AuditRecord | None:
    """The conclusive screen that was taken from the same given fields, if any.

    A divergence that was measured stands only for the reference that it was measured against.
    """
    for record in reversed(records):
        if record.kind == SCREEN and record.body["decision"] != "abstain":
            same = all(record.body[name] == value for name, value in given.items() if name != "candidate")
            kl = record.body["kl"]
            if same and (kl is None or kl["reference_sha256"] == reference_sha256):
                return record
    return None


def find_repeated(records: Sequence[AuditRecord], body: JsonObject) -> AuditRecord | None:
    """The last decision, if it says the very same: an abstention that still stands is not written again."""
    last = next((record for record in reversed(records) if record.kind == DECISION), None)
    return last if last is not None and last.body == body else None


def _ledger_under(window: Ledger | None, rules: LedgerRules) -> Ledger:
    if window is None:
        return Ledger(alpha=rules.alpha, looks=rules.looks_per_window, error_rate=rules.error_rate)
    return window.tightened(alpha=rules.alpha, looks=rules.looks_per_window, error_rate=rules.error_rate)


def _opened(state: GateState, body: JsonObject, time: float) -> GateState:
    number = int(body["number"])
    if number != len(state.epochs) + 1:
        raise ValueError(f"epoch number {number} follows {len(state.epochs)} epochs")
    epoch = Epoch(
        id=body["epoch"],
        number=number,
        commitment=body["commitment"],
        size=body["size"],
        decoding=body["decoding"],
        grading=body["grading"],
        opened_at=time,
    )
    return replace(state, epochs=(*state.epochs, epoch))


def _closed(state: GateState, epoch_id: str, reason: str) -> GateState:
    last = state.epochs[-1]
    if last.id != epoch_id or last.closed is not None:
        raise ValueError(f"epoch {epoch_id!r} is not open; the last one is {last.id!r}, closed: {last.closed!r}")
    return replace(state, epochs=(*state.epochs[:-1], replace(last, closed=reason)))


def _without_verifier(state: GateState, verifier: str, version: str) -> GateState:
    """An epoch whose answers were scored by what is not believed any more is looked at no further."""
    if not state.epochs or state.epochs[-1].closed is not None:
        return state
    if state.epochs[-1].grading.get("verifiers", {}).get(verifier) != version:
        return state
    return _closed(state, state.epochs[-1].id, f"verifier {verifier!r} {version!r} was invalidated")


def _spent(state: GateState, body: JsonObject) -> GateState:
    rules = LedgerRules(**body["policy"]["ledger"])
    promoted = body["decision"] == "promote"
    window = _ledger_under(state.window, rules).after(promoted=promoted)
    last = state.epochs[-1]
    if last.id != body["epoch"]:
        raise ValueError(f"the look names epoch {body['epoch']!r}, the last one opened is {last.id!r}")
    looks = last.looks + 1
    closed = "promotion" if promoted else "looks used up" if looks >= rules.looks_per_epoch else None
    return replace(state, window=window, epochs=(*state.epochs[:-1], replace(last, looks=looks, closed=closed)))
