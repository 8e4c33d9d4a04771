"""Ledger and epochs as a fold over the log."""

from __future__ import annotations

from typing import Any

import pytest

from gate_engine import make_policy
from tidegate.core.audit import next_record
from tidegate.core.errors import AuditError
from tidegate.core.gate import gate_state, ledger_from
from tidegate.core.gate.state import commitment_of, find_decision
from tidegate.core.statistics import Ledger
from tidegate.core.types import AuditRecord

POLICY = make_policy()


def log(*entries: tuple[str, dict[str, Any]]) -> list[AuditRecord]:
    records: list[AuditRecord] = []
    for kind, body in entries:
        records.append(next_record(records[-1] if records else None, kind=kind, body=body, time=1.0))
    return records


def opened(number: int, size: int = 60) -> tuple[str, dict[str, Any]]:
    body = {"epoch": f"epoch-{number}", "number": number, "commitment": "c", "size": size}
    return "epoch_opened", {**body, "decoding": {}, "grading": {"max_calls": 3}}


def look(decision: str, number: int, policy: Any = POLICY, **extra: Any) -> tuple[str, dict[str, Any]]:
    return "decision", {"decision": decision, "epoch": f"epoch-{number}", "policy": policy.values(), **extra}


def test_an_empty_log_is_a_fresh_window_without_an_epoch() -> None:
    assert ledger_from([], POLICY) == Ledger(alpha=0.1, looks=5)
    assert gate_state([]).open_epoch(POLICY) is None


def test_looks_are_counted_and_abstentions_and_strangers_are_not() -> None:
    records = log(
        ("release_added", {"release": "r1"}), opened(1), look("refuse", 1), look("abstain", 1), look("refuse", 1)
    )
    assert ledger_from(records, POLICY) == Ledger(alpha=0.1, looks=5, used=2, spend=0.02)
    epoch = gate_state(records).open_epoch(POLICY)
    assert epoch is not None
    assert (epoch.id, epoch.looks, epoch.size, epoch.closed) == ("epoch-1", 2, 60, None)


def test_a_promotion_closes_the_epoch_and_raises_the_level() -> None:
    state = gate_state(log(opened(1), look("promote", 1)))
    assert state.epochs[0].closed == "promotion"
    assert state.open_epoch(POLICY) is None
    assert state.ledger(POLICY).level == pytest.approx(0.04)


def test_an_epoch_closes_when_its_looks_are_used_up() -> None:
    state = gate_state(log(opened(1), *[look("refuse", 1)] * 3))
    assert state.epochs[0].closed == "looks used up"
    assert state.open_epoch(POLICY) is None


def test_a_stricter_policy_uses_no_epoch_that_is_too_small_or_looked_at_too_often() -> None:
    state = gate_state(log(opened(1), look("refuse", 1), look("refuse", 1)))
    assert state.open_epoch(POLICY) is not None
    assert state.open_epoch(make_policy(ledger__looks_per_epoch=2)) is None
    assert state.open_epoch(make_policy(sealed__max_pairs=99, sealed__min_pairs=61)) is None


def test_only_the_last_epoch_can_be_open() -> None:
    state = gate_state(log(opened(1), look("refuse", 1), opened(2)))
    epoch = state.open_epoch(POLICY)
    assert epoch is not None
    assert epoch.id == "epoch-2"


def test_a_window_ends_after_its_looks() -> None:
    records = log(opened(1), look("promote", 1), opened(2), *[look("refuse", 2)] * 3, opened(3), look("refuse", 3))
    ledger = ledger_from(records, POLICY)
    assert (ledger.window, ledger.used, ledger.promotions, ledger.level) == (2, 0, 0, pytest.approx(0.02))


def test_a_looser_policy_waits_for_the_next_window_and_a_tighter_one_does_not() -> None:
    loose = make_policy(ledger__alpha=0.5)
    tight = make_policy(ledger__alpha=0.01)
    records = log(opened(1), look("refuse", 1))
    assert ledger_from(records, loose).level == pytest.approx(0.02)
    assert ledger_from(records, tight).level == pytest.approx(0.002)
    assert ledger_from([], loose).level == pytest.approx(0.1)
    mixed = log(opened(1), look("refuse", 1, tight), look("refuse", 1, loose))
    assert ledger_from(mixed, loose).spend_per_look == pytest.approx(0.002)


@pytest.mark.parametrize(
    "entries",
    [
        [opened(2)],
        [("epoch_opened", {"number": 1})],
        [("epoch_opened", {name: value for name, value in opened(1)[1].items() if name != "grading"})],
        [look("refuse", 1)],
        [opened(1), look("refuse", 2)],
        [opened(1), ("decision", {"decision": "refuse", "epoch": "epoch-1"})],
        [("decision", {})],
    ],
)
def test_impossible_records_are_found(entries: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(AuditError, match=f"audit record {len(entries)} of kind '{entries[-1][0]}' is malformed"):
        gate_state(log(*entries))


def test_the_commitment_hides_order_but_fixes_tasks_and_salt() -> None:
    assert commitment_of(["a", "b"], "s") == commitment_of(["b", "a"], "s")
    assert len({commitment_of(ids, salt) for ids in (["a"], ["a", "b"]) for salt in ("s", "t")}) == 4


def test_a_look_is_found_by_everything_that_it_depended_on() -> None:
    names = {"candidate_sha256": "c", "champion_sha256": "h", "anchor_sha256": "a", "policy_hash": "p"}
    records = log(opened(1), look("abstain", 1, **names), look("refuse", 1, **names))
    assert find_decision(records[:2], **names) is None
    assert find_decision(records, **names) is records[2]
    for name in names:
        assert find_decision(records, **(names | {name: "x"})) is None
