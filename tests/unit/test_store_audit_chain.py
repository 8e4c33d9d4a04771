"""The hash chain itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidegate.core.audit import GENESIS_HASH, next_record, record_hash, verify_chain
from tidegate.core.errors import AuditError
from tidegate.core.types import AuditRecord


def chain(length: int) -> list[AuditRecord]:
    records: list[AuditRecord] = []
    for n in range(length):
        records.append(next_record(records[-1] if records else None, kind="note", body={"n": n}, time=n))
    return records


def test_the_hash_is_sha256_over_canonical_json():
    record = next_record(None, kind="note", body={"b": 1, "a": (2,)}, time=3)
    assert record.prev_hash == GENESIS_HASH == "0" * 64
    assert record.time == 3.0
    assert record.body == {"a": [2], "b": 1}
    # sha256 of {"body":{"a":[2],"b":1},"kind":"note","prev_hash":"000...","seq":1,"time":3.0}
    assert record.hash == "4c7e1a99095d6d4c581eb2e4258d0598e41ca3bc75a8f817d434c3d6f0d51038"


def test_a_whole_chain_verifies():
    assert verify_chain([]) == 0
    assert verify_chain(iter(chain(5))) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"time": 9.0}, "record 3 has the hash"),
        ({"kind": "x"}, "record 3 has the hash"),
        ({"body": {"n": 9}}, "record 3 has the hash"),
        ({"hash": "f" * 64}, "record 3 has the hash"),
        ({"prev_hash": "f" * 64}, "record 3 names"),
        ({"seq": 4}, "record 4 follows record 2; 3 is expected"),
    ],
)
def test_any_change_is_found_and_the_record_named(change: dict[str, object], words: str):
    records = chain(5)
    records[2] = replace(records[2], **change)
    with pytest.raises(AuditError, match=words):
        verify_chain(records)


def test_a_record_that_was_rehashed_breaks_the_next_link():
    records = chain(5)
    forged = replace(records[2], body={"n": 9})
    fields = {name: getattr(forged, name) for name in ("seq", "prev_hash", "time", "kind", "body")}
    records[2] = replace(forged, hash=record_hash(**fields))
    with pytest.raises(AuditError, match="record 4 names"):
        verify_chain(records)


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "change",
    [
        {"time": None},
        {"time": "x"},
        {"time": float("inf")},
        {"time": 10**400},
        {"body": {"n": float("nan")}},
        {"body": {"n": nested(100_000)}},
    ],
    ids=["none", "text", "infinite", "too large", "not a number", "too deep"],
)
def test_a_record_that_has_no_hash_is_named(change: dict[str, object]):
    records = chain(5)
    records[2] = replace(records[2], **change)
    with pytest.raises(AuditError, match="audit record 3 has no hash"):
        verify_chain(records)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_record_is_found(missing: int):
    records = chain(5)
    del records[missing]
    with pytest.raises(AuditError, match=f"{missing + 1} is expected"):
        verify_chain(records)
