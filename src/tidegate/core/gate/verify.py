"""Recomputing the whole log: every decision from its evidence, every level from the looks before it.

A log that somebody wrote anew, chain and all, recomputes too. Certificates hold it: each was signed over the hash
of the decision that it rests on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.core.audit import GENESIS_HASH, verify_chain
from tidegate.core.errors import AuditError
from tidegate.core.gate.live_records import LOOK_GIVEN, look_at_canary, look_at_steady
from tidegate.core.gate.live_state import CANARY_LOOK, STEADY_LOOK
from tidegate.core.gate.records import DECISION_GIVEN, SCREEN_GIVEN, decide, decide_screen
from tidegate.core.gate.state import DECISION, SCREEN, Epoch, GateState, fold
from tidegate.core.types import AuditRecord, JsonObject, Release

_RELATIVE_TOLERANCE = 1e-9  # special functions differ in the last digits between library builds


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """How the body of a kind of record follows from what was given.

    ``given``: fields that are taken from the record as they stand. ``derive`` makes the whole body of those fields
    and the gate's state before the record; it raises KeyError, TypeError, ValueError or AttributeError where a given
    field is malformed, AuditError where it does not fit the state.
    """

    given: frozenset[str]
    derive: Callable[[JsonObject, GateState], JsonObject]


RECOMPUTED: Mapping[str, Recomputation] = {
    DECISION: Recomputation(given=DECISION_GIVEN, derive=lambda given, state: decide(given, state)[1]),
    SCREEN: Recomputation(given=SCREEN_GIVEN, derive=lambda given, _: decide_screen(given)[1]),
    CANARY_LOOK: Recomputation(given=LOOK_GIVEN, derive=lambda given, state: look_at_canary(given, state)[1]),
    STEADY_LOOK: Recomputation(given=LOOK_GIVEN, derive=lambda given, state: look_at_steady(given, state)[1]),
}
"""Every kind of record that is recomputed; the others only move the state or pass through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What was recomputed. ``head`` is the hash of the last record; keep it elsewhere to notice a cut tail.

    ``recomputed``: records by kind, for the kinds of ``RECOMPUTED`` that the log holds.
    """

    records: int
    recomputed: Mapping[str, int]
    screens: int
    decisions: int
    promotions: int
    epochs: tuple[Epoch, ...]
    head: str


def verify_audit(records: Iterable[AuditRecord]) -> AuditReport:
    """Check the hash chain and recompute every record of the kinds in ``RECOMPUTED``.

    Raises:
        AuditError: at the first difference; the message names the record's number and the field.
    """
    log = list(records)
    verify_chain(log)
    state = GateState()
    recomputed: Counter[str] = Counter()
    promotions = 0
    epoch_of_task: dict[str, str] = {}
    for record in log:
        recomputation = RECOMPUTED.get(record.kind)
        if recomputation is not None:
            _compare(record, _recomputed(record, recomputation, state))
            recomputed[record.kind] += 1
        if record.kind == DECISION:
            _claim_tasks(record, epoch_of_task)
            promotions += record.body["decision"] == "promote"
        state = fold(state, record)
    return AuditReport(
        records=len(log),
        recomputed=dict(recomputed),
        screens=recomputed[SCREEN],
        decisions=recomputed[DECISION],
        promotions=promotions,
        epochs=state.epochs,
        head=log[-1].hash if log else GENESIS_HASH,
    )


def check_certificates(records: Iterable[AuditRecord], releases: Iterable[Release]) -> int:
    """Compare the gate certificates of releases with the decisions that they name.

    Certificates that a person signed rest on no decision and are passed over. Signatures are not checked here.

    Args:
        records: the whole log.
        releases: what was released, in any order.

    Returns:
        How many certificates were compared.

    Raises:
        AuditError: a certificate names no recorded promotion of just that release's content; the message names the
            release.
    """
    by_hash = {record.hash: record for record in records}
    compared = 0
    for release in releases:
        if release.certificate is not None and release.certificate.get("kind") == "gate":
            _compare_certificate(release, release.certificate, by_hash)
            compared += 1
    return compared


def _compare_certificate(release: Release, certificate: JsonObject, by_hash: Mapping[str, AuditRecord]) -> None:
    where = f"the certificate of release {release.id!r} (number {release.number})"
    if certificate.get("adapter_sha256") != release.adapter_sha256:
        raise AuditError(
            f"{where} is for adapter {certificate.get('adapter_sha256')!r}; the release is {release.adapter_sha256!r}"
        )
    record = by_hash.get(str(certificate.get("decision_hash")))
    if record is None or record.kind != DECISION:
        raise AuditError(
            f"{where} rests on the decision {certificate.get('decision_hash')!r}; the log holds no such decision: it "
            "was rewritten or cut, or belongs to another data directory. Compare it with an earlier export"
        )
    wanted = {
        "decision": "promote",
        "candidate_sha256": release.adapter_sha256,
        "base_sha256": release.base_sha256,
        "policy_hash": certificate.get("policy_hash"),
        "signer": certificate.get("signer"),
    }
    for name, value in wanted.items():
        if record.body.get(name) != value:
            raise AuditError(
                f"{where} does not fit audit record {record.seq} ({record.kind}), on which it rests: field {name!r} "
                f"holds {record.body.get(name)!r}, the certificate needs {value!r}"
            )


def _recomputed(record: AuditRecord, recomputation: Recomputation, state: GateState) -> JsonObject:
    try:
        return recomputation.derive({name: record.body[name] for name in recomputation.given}, state)
    except KeyError as error:
        raise AuditError(f"audit record {record.seq} ({record.kind}) lacks the field {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise AuditError(f"audit record {record.seq} ({record.kind}) is malformed: {error}") from error
    except AuditError as error:
        raise AuditError(f"audit record {record.seq} ({record.kind}) does not fit the log: {error}") from error


def _compare(record: AuditRecord, expected: JsonObject) -> None:
    for name in sorted(set(expected) | set(record.body)):
        where = f"audit record {record.seq} ({record.kind}), field {name!r}"
        if name not in record.body:
            raise AuditError(f"{where} is missing; recomputing gives {expected[name]!r}")
        if name not in expected:
            raise AuditError(f"{where} holds {record.body[name]!r}; no such field is written")
        if not same_json(record.body[name], expected[name]):
            raise AuditError(f"{where} holds {record.body[name]!r}; recomputing gives {expected[name]!r}")


def _claim_tasks(record: AuditRecord, epoch_of_task: dict[str, str]) -> None:
    """No sealed task may be looked at in two epochs."""
    epoch = record.body["epoch"]
    for task_id in record.body["outcomes"]["tasks"]:
        first = epoch_of_task.setdefault(task_id, epoch)
        if first != epoch:
            raise AuditError(
                f"audit record {record.seq} ({record.kind}), field 'outcomes': task {task_id!r} of epoch {epoch!r} "
                f"was used by epoch {first!r} already"
            )


def same_json(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal, numbers up to rounding of the last digits."""
    if left is right:
        return True
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return set(left) == set(right) and all(same_json(left[name], right[name]) for name in left)
    if _is_list(left) and _is_list(right):
        return len(left) == len(right) and all(same_json(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, int | float) and not isinstance(right, bool):
        return abs(left - right) <= _RELATIVE_TOLERANCE * max(abs(left), abs(right))
    return type(left) is type(right) and left == right


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
