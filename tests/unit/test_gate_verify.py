"""The log recomputes, and any edit is found even where the chain was hashed again to hide it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate_engine import GateWorld, make_policy, make_tasks, sealed_traffic
from tidegate.core.audit import next_record
from tidegate.core.errors import AuditError
from tidegate.core.gate import verify_audit
from tidegate.core.gate.verify import same_json
from tidegate.core.types import AuditRecord
from tidegate.gate import KeyPair


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[AuditRecord]:
    """Screen, abstention, refusal, promotion, and a refusal in a second epoch."""
    return asyncio.run(history(tmp_path_factory.mktemp("keys")))


async def history(folder: Path) -> list[AuditRecord]:
    world = GateWorld(key=KeyPair.load_or_create(folder / "gate.pem"))
    world.audit.append("release_added", {"release": "r0"}, time=1.0)
    await world.screen("good", 0.8, make_tasks(20, "d"))
    await world.certify("early", 0.8, sealed_traffic(10))
    await world.certify("bad", 0.1, sealed_traffic(60))
    await world.certify("good", 0.8, sealed_traffic(60))
    await world.certify("late", 0.45, sealed_traffic(120))
    return list(world.audit.read())


def rehashed(records: list[AuditRecord], edit: Callable[[list[dict[str, Any]]], None]) -> list[AuditRecord]:
    """The log after an edit by someone who recomputes the whole chain."""
    bodies = [
        {"kind": record.kind, "body": copy.deepcopy(dict(record.body)), "time": record.time} for record in records
    ]
    edit(bodies)
    chain: list[AuditRecord] = []
    for entry in bodies:
        chain.append(next_record(chain[-1] if chain else None, **entry))
    return chain


def test_an_honest_log_recomputes(records: list[AuditRecord]) -> None:
    kinds = [record.kind for record in records]
    assert kinds == [
        "release_added",
        "screen",
        "decision",
        "epoch_opened",
        "decision",
        "decision",
        "epoch_opened",
        "decision",
    ]
    report = verify_audit(records)
    assert (report.records, report.screens, report.decisions, report.promotions) == (8, 1, 4, 1)
    assert report.recomputed == {"screen": 1, "decision": 4}
    assert report.head == records[-1].hash
    assert [epoch.closed for epoch in report.epochs] == ["promotion", None]


def test_it_recomputes_after_a_way_through_a_file(records: list[AuditRecord]) -> None:
    def travelled(record: AuditRecord) -> AuditRecord:
        return AuditRecord(
            seq=record.seq,
            prev_hash=record.prev_hash,
            time=record.time,
            kind=record.kind,
            body=json.loads(json.dumps(record.body)),
            hash=record.hash,
        )

    assert verify_audit(travelled(record) for record in records).decisions == 4


def test_an_empty_log_recomputes() -> None:
    assert verify_audit([]).head == "0" * 64


def test_a_decision_holds_all_that_it_was_taken_from(records: list[AuditRecord]) -> None:
    body = records[5].body
    assert body["decision"] == "promote"
    assert body["reply"] == "promote"
    assert body["epoch"] == "epoch-1"
    assert (body["window"], body["look"], body["epoch_look"], body["promotions"]) == (1, 2, 2, 0)
    assert (body["spend"], body["level"]) == (pytest.approx(0.02), pytest.approx(0.02))
    assert body["policy_hash"] == make_policy().hash
    assert body["policy"] == make_policy().values()
    assert body["verifiers"] == {"exact": "1"}
    assert body["measured"]["pairs"] == 60 == len(body["outcomes"]["tasks"])
    assert body["measured"]["wins"] - body["measured"]["losses"] == 60 * body["measured"]["bounds"][0]["difference"]
    assert set(body["outcomes"]) == {"tasks", "kinds", "kind", "challenger", "champion", "anchor"}
    assert body["decoding"]["temperature"] == 0.9
    assert body["not_measured"] == ["canary", "collapse"]
    for name in ("candidate", "champion_sha256", "anchor_sha256", "base_sha256", "manifest_hash", "signer", "salt"):
        assert body[name]
    assert records[1].body["not_measured"] == ["kl", "canary prompts"]


def edit_chain(records: list[AuditRecord], how: str) -> list[AuditRecord]:
    changed = list(records)
    if how == "edited":
        body = dict(records[4].body) | {"decision": "promote"}
        old = records[4]
        changed[4] = AuditRecord(
            seq=old.seq, prev_hash=old.prev_hash, time=old.time, kind=old.kind, body=body, hash=old.hash
        )
    elif how == "reordered":
        changed[4], changed[5] = changed[5], changed[4]
    else:
        del changed[4]
    return changed


@pytest.mark.parametrize("how", ["edited", "reordered", "dropped"])
def test_a_broken_chain_is_found(records: list[AuditRecord], how: str) -> None:
    with pytest.raises(AuditError, match=r"audit record [56]"):
        verify_audit(edit_chain(records, how))


@pytest.mark.parametrize("change", [{"time": 9.0}, {"body": {"release": "r9"}}, {"kind": "release_moved"}])
def test_an_edit_of_what_no_decision_rests_on_breaks_the_chain(
    records: list[AuditRecord], change: dict[str, Any]
) -> None:
    with pytest.raises(AuditError, match="audit record 1 has the hash"):
        verify_audit([replace(records[0], **change), *records[1:]])


def set_field(index: int, *path: str, to: Any) -> Callable[[list[dict[str, Any]]], None]:
    def edit(entries: list[dict[str, Any]]) -> None:
        place = entries[index]["body"]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = to

    return edit


def drop(index: int) -> Callable[[list[dict[str, Any]]], None]:
    def edit(entries: list[dict[str, Any]]) -> None:
        del entries[index]

    return edit


def swap(first: int, second: int) -> Callable[[list[dict[str, Any]]], None]:
    def edit(entries: list[dict[str, Any]]) -> None:
        entries[first], entries[second] = entries[second], entries[first]

    return edit


def flip_all_losses(entries: list[dict[str, Any]]) -> None:
    outcomes = entries[4]["body"]["outcomes"]
    outcomes["challenger"]["passed"] = list(range(len(outcomes["tasks"])))


def flip_a_dev_answer(entries: list[dict[str, Any]]) -> None:
    challenger = entries[1]["body"]["outcomes"]["challenger"]
    challenger["passed"] = sorted({*challenger["passed"]} ^ {0})


def reuse_tasks(entries: list[dict[str, Any]]) -> None:
    """Make the second epoch a copy of the first, commitment and all."""
    entries[6]["body"] |= {"commitment": entries[3]["body"]["commitment"], "size": 60}
    again = copy.deepcopy(entries[4]["body"])
    fresh = entries[7]["body"]
    for name in ("salt", "outcomes", "available", "measured", "commitment"):
        fresh[name] = again[name]


def remove_field(index: int, name: str) -> Callable[[list[dict[str, Any]]], None]:
    def edit(entries: list[dict[str, Any]]) -> None:
        del entries[index]["body"][name]

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (set_field(4, "decision", to="promote"), r"record 5 \(decision\), field 'decision' holds 'promote'"),
        (set_field(4, "level", to=0.5), r"record 5 .*field 'level' holds 0.5; recomputing gives 0.02"),
        (set_field(4, "measured", "p", to=0.001), r"record 5 .*field 'measured'"),
        (set_field(4, "reasons", to=["it was fine"]), r"record 5 .*field 'reasons'"),
        (set_field(4, "reply", to="promote"), r"record 5 .*field 'reply'"),
        (set_field(4, "policy", "ledger", "alpha", to=0.05), r"record 5 .*field 'level' holds"),
        (set_field(4, "policy", "ledger", "alpha", to=0.9), r"record 5 .*looser than the one in force: ledger.al"),
        (set_field(4, "policy", "name", to="friendly"), r"record 5 .*field 'policy_hash' holds"),
        (set_field(4, "outcomes", "challenger", "passed", to=["x"]), r"record 5 .*is malformed: passed is not a list"),
        (set_field(4, "outcomes", "challenger", "passed", to=[60]), r"record 5 .*is malformed: passed holds no rising"),
        (
            set_field(4, "outcomes", "challenger", "tokens", to=[1]),
            r"record 5 .*is malformed: tokens is not a list",
        ),
        (set_field(4, "outcomes", "challenger", "tokens", to=[-1] * 60), r"record 5 .*is malformed: tokens holds -1"),
        (set_field(4, "outcomes", "anchor", "rewards", to=[2.0] * 60), r"record 5 .*is malformed: rewards are not 60"),
        (set_field(4, "outcomes", "anchor", "luck", to=[]), r"record 5 .*is malformed: .* hold \['luck'\]"),
        (set_field(4, "outcomes", "kind", to=[2] * 60), r"record 5 .*is malformed: kind holds numbers from 2 to 2"),
        (set_field(4, "outcomes", "tasks", to=["b", "a"]), r"record 5 .*is malformed: tasks are not in rising order"),
        (set_field(4, "policy", "ledger", "looks_per_window", to=10**400), r"record 5 .*is malformed: .*too large"),
        (set_field(4, "outcomes", to=7), r"record 5 .*is malformed"),
        (set_field(4, "outcomes", to={}), r"record 5 .*lacks the field 'tasks'"),
        (set_field(4, "salt", to="other"), r"record 5 .*field 'commitment'"),
        (set_field(3, "commitment", to="0" * 64), r"record 5 .*field 'commitment'"),
        (flip_all_losses, r"record 5 .*field 'decision' holds 'refuse'; recomputing gives 'promote'"),
        (remove_field(4, "outcomes"), r"record 5 \(decision\) lacks the field 'outcomes'"),
        (remove_field(4, "level"), r"record 5 .*field 'level' is missing"),
        (set_field(4, "remark", to="x"), r"record 5 .*field 'remark' holds 'x'; no such field is written"),
        (drop(4), r"record 5 \(decision\), field 'epoch_look' holds 2; recomputing gives 1"),
        (swap(4, 5), r"record 5 \(decision\), field 'epoch_look'"),
        (flip_a_dev_answer, r"record 2 \(screen\), field 'challenger_passed'"),
        (set_field(1, "decision", to="fail"), r"record 2 \(screen\), field 'decision'"),
        (set_field(1, "canary_prompts", to=[1]), r"record 2 \(screen\) is malformed"),
        (reuse_tasks, r"record 8 .*field"),
        (set_field(6, "number", to=3), r"record 7 of kind 'epoch_opened' is malformed"),
    ],
)
def test_an_edit_is_found_behind_a_chain_that_was_hashed_again(
    records: list[AuditRecord], edit: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    forged = rehashed(records, edit)
    with pytest.raises(AuditError, match=words):
        verify_audit(forged)


async def test_a_task_may_not_serve_two_epochs(tmp_path: Path) -> None:
    """A gate whose sealed store forgot what was used writes a log that is found to reuse tasks."""
    world = GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))
    await world.certify("good", 0.8, sealed_traffic(60))
    world.sealed = type(world.sealed)()
    await world.certify("better", 0.95, sealed_traffic(60))
    with pytest.raises(AuditError, match=r"record 4 .*'outcomes': task 's0000' of epoch 'epoch-2' was used by epoch"):
        verify_audit(world.audit.read())


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (0.3, 0.3001, False),
        (1.0, 1, True),
        (1.0, True, False),
        (1, True, False),
        (1, 2, False),
        ("a", "a", True),
        ([1, 2], (1, 2), True),
        ([1], [1, 2], False),
        ([1], 1, False),
        ({"a": [0.1]}, {"a": [0.1]}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, None, True),
    ],
)
def test_numbers_agree_up_to_rounding_and_all_else_exactly(left: Any, right: Any, same: bool) -> None:
    assert same_json(left, right) is same
