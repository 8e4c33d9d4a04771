"""Which changes of a policy are looser: every field has a direction, and no change hides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tidegate.core.gate.policy import Policy, policy_from_values
from tidegate.core.gate.strictness import looser_fields
from tidegate.gate import load_policy

STRICT = load_policy()
UNTELLABLE = {
    "canary.bets",
    "holdback.bets",
    "holdback.period_days",
    "guardrails.length_factor",
    "guardrails.latency_factor",
}
FREE = {"name"}


def changed(name: str, value: Any, policy: Policy = STRICT) -> Policy:
    section, _, field = name.rpartition(".")
    values = policy.values()
    (values[section] if section else values)[field] = value
    return policy_from_values(values)


def leaves() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in STRICT.values().items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        found += [(f"{name}.{field}" if field else name, item) for field, item in inner]
    return [(name, value) for name, value in found if name not in ("format", "decoding")]


def others(name: str, value: Any) -> tuple[Any, Any]:
    """Two values on either side of the shipped one."""
    if name == "screen.kl_budget":
        return 0.1, 0.2
    if name == "screen.dev_rule":
        return "above", "not_below"
    if name == "ledger.error_rate":
        return "fdr", "fwer"
    if isinstance(value, list):
        return value[:-1], [item / 2 for item in value]
    if isinstance(value, str):
        return "one", "other"
    return (value + 1, value + 2) if isinstance(value, int) else (value * 1.1, value * 1.2)


@pytest.mark.parametrize(("name", "value"), leaves())
def test_a_change_is_looser_one_way_and_not_the_other(name: str, value: Any) -> None:
    one, other = (changed(name, side) for side in others(name, value))
    ways = [bool(looser_fields(a, b)) for a, b in ((one, other), (other, one))]
    assert ways.count(True) == (0 if name in FREE else 2 if name in UNTELLABLE else 1)
    assert not looser_fields(one, one)
    for found in (*looser_fields(one, other), *looser_fields(other, one)):
        assert found.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "strict", "loose"),
    [
        ("ledger.alpha", 0.05, 0.2),
        ("ledger.error_rate", "fwer", "fdr"),
        ("ledger.looks_per_epoch", 1, 9),
        ("sealed.min_pairs", 2000, 10),
        ("non_inferiority.anchor_margin", 0.005, 0.05),
        ("non_inferiority.min_pairs_per_slice", 100, 5000),
        ("screen.dev_rule", "above", "not_below"),
        ("screen.kl_budget", 0.1, None),
        ("collapse.min_distinct", 0.95, 0.1),
        ("canary.weights", (0.01, 0.1, 0.2, 0.5), (0.5,)),
        ("canary.promote_at", 100.0, 2.0),
        ("canary.rollback_at", 20.0, 1e9),
        ("holdback.share", 0.1, 0.0001),
        ("triggers.rollbacks_per_window", 1, 99),
    ],
)
def test_the_direction_is_the_one_that_protects(name: str, strict: Any, loose: Any) -> None:
    assert looser_fields(changed(name, strict), changed(name, loose))
    assert not looser_fields(changed(name, loose), changed(name, strict))


@pytest.mark.parametrize("stage", ["canary", "holdback", "collapse"])
def test_leaving_a_stage_out_is_looser_and_told_once(stage: str) -> None:
    without = changed(stage, "none")
    (found,) = looser_fields(STRICT, without)
    assert found.startswith(f"{stage}: ")
    assert found == f"{stage}: rules -> 'none'"
    assert not looser_fields(without, STRICT)


def test_a_last_step_to_nearly_everybody_is_looser() -> None:
    assert looser_fields(STRICT, changed("canary.weights", (*STRICT.values()["canary"]["weights"], 0.99)))
