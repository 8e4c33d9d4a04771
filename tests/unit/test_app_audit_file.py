"""Reading an exported audit log that somebody else wrote: whatever it holds, one error of one type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.app.gates import read_audit_file, verify_log
from tidegate.core.audit import next_record
from tidegate.core.errors import AuditError


def fields(**changes: Any) -> dict[str, Any]:
    record = next_record(None, kind="note", body={"n": 1}, time=1.0)
    return {name: getattr(record, name) for name in ("seq", "prev_hash", "time", "kind", "body", "hash")} | changes


def verified(path: Path, line: str) -> int:
    path.write_text(f"{line}\n", encoding="utf-8")
    return int(verify_log(read_audit_file(path))["records"])


def test_a_record_is_read_back(tmp_path: Path) -> None:
    assert verified(tmp_path / "audit.jsonl", json.dumps(fields())) == 1
    assert verified(tmp_path / "audit.jsonl", json.dumps(fields(time=1))) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq": "1"}, "seq = '1'"),
        ({"seq": None}, "seq = None"),
        ({"time": None}, "time = None"),
        ({"time": "x"}, "time = 'x'"),
        ({"kind": []}, r"kind = \[\]"),
        ({"body": [1]}, r"body = \[1\]"),
        ({"hash": 1}, "hash = 1"),
        ({"prev_hash": {}}, "prev_hash = {}"),
        ({"more": 1}, "more"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(AuditError, match=rf"audit.jsonl:1: not an audit record: .*{words}"):
        verified(tmp_path / "audit.jsonl", json.dumps(fields(**changes)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[" * 200_000, "not an audit record"),
        ('{"a":' * 200_000, "not an audit record"),
        ("[1, 2]", "not an audit record"),
        ("1", "not an audit record"),
        ("{}", "not an audit record"),
        (json.dumps(fields()).replace("1.0", "1e400"), "audit record 1 has no hash"),
        (json.dumps(fields()).replace("1.0", "1" + "0" * 400), "audit record 1 has no hash"),
        (json.dumps(fields()).replace("1.0", "1" + "0" * 9000), "not an audit record"),
        (json.dumps(fields(body={"n": float("nan")})), "audit record 1 has no hash"),
    ],
    ids=["lists", "objects", "list", "number", "empty", "infinite", "large", "longer", "not a number"],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(AuditError, match=words):
        verified(tmp_path / "audit.jsonl", line)
