"""The hash chain of the audit log: what the next record is, and whether a chain recomputes.

A record's hash covers its number, its predecessor's hash, its time, kind and body, so that no record can be
changed, moved or taken out of the middle. A cut-off tail is only seen against a head hash kept elsewhere;
certificates and releases keep such hashes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tidegate.core.errors import AuditError
from tidegate.core.hashing import canonical_json, content_hash
from tidegate.core.types import AuditRecord, JsonObject

GENESIS_HASH = "0" * 64


def record_hash(*, seq: int, prev_hash: str, time: float, kind: str, body: JsonObject) -> str:
    """SHA-256 (64 hex digits) over every field of a record but the hash itself."""
    return content_hash({"seq": seq, "prev_hash": prev_hash, "time": float(time), "kind": kind, "body": body})


def next_record(head: AuditRecord | None, *, kind: str, body: JsonObject, time: float) -> AuditRecord:
    """The record that follows ``head``.

    Args:
        head: the last record, or None when the log is empty.
        kind: what happened, e.g. ``"decision"``.
        body: a JSON object; it is normalised, so that what is hashed is what a reader gets back.
        time: Unix seconds.

    Raises:
        AuditError: ``body`` cannot be written as canonical JSON.
    """
    seq = 1 if head is None else head.seq + 1
    prev_hash = GENESIS_HASH if head is None else head.hash
    try:
        normal = json.loads(canonical_json(dict(body)))
        digest = record_hash(seq=seq, prev_hash=prev_hash, time=time, kind=kind, body=normal)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise AuditError(
            f"audit record of kind {kind!r} cannot be written as JSON: {error}; finite numbers, text, lists and "
            "objects are accepted"
        ) from error
    return AuditRecord(seq=seq, prev_hash=prev_hash, time=float(time), kind=kind, body=normal, hash=digest)


def verify_chain(records: Iterable[AuditRecord]) -> int:
    """Recompute a whole log from its first record.

    Args:
        records: all records in order, from number 1.

    Returns:
        How many records were checked.

    Raises:
        AuditError: at the first record that differs; the message names its number.
    """
    seq, prev_hash = 0, GENESIS_HASH
    for record in records:
        check_link(record, seq=seq, prev_hash=prev_hash)
        seq, prev_hash = record.seq, record.hash
    return seq


def check_link(record: AuditRecord, *, seq: int, prev_hash: str) -> None:
    """Check that a record follows record ``seq``, whose hash is ``prev_hash`` (0 and the genesis hash before any).

    Raises:
        AuditError: it does not follow, or was changed; the message names its number.
    """
    if record.seq != seq + 1:
        raise AuditError(f"audit record {record.seq} follows record {seq}; {seq + 1} is expected: one is missing")
    if record.prev_hash != prev_hash:
        raise AuditError(
            f"audit record {record.seq} names {record.prev_hash!r} as its predecessor's hash; {prev_hash!r} is "
            f"expected: record {record.seq} or {seq} was changed"
        )
    try:
        digest = record_hash(
            seq=record.seq, prev_hash=record.prev_hash, time=record.time, kind=record.kind, body=record.body
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise AuditError(
            f"audit record {record.seq} has no hash: {error}; a finite time and a body of finite numbers, text, lists "
            "and objects are accepted"
        ) from error
    if record.hash != digest:
        raise AuditError(
            f"audit record {record.seq} has the hash {record.hash!r}, its content gives {digest!r}: "
            "it was changed after it was written"
        )
