"""The gate's examination of itself notices wrong arithmetic and a policy that can't decide."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gate_engine import make_policy
from tidegate.core.errors import GateError
from tidegate.core.gate import Abstain, Decision, Evidence, Policy, Promote, certify
from tidegate.core.gate.policy import CollapseRules
from tidegate.core.statistics import Ledger
from tidegate.gate import load_policy, self_test
from tidegate.gate.self_test import _LEVELS, _P_VALUES, _check_decisions, _check_values, _golden_values

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "gate_vectors.json").read_text(encoding="utf-8"))


def test_the_shipped_policy_passes() -> None:
    self_test(load_policy())


def test_the_built_in_values_are_those_of_the_vectors() -> None:
    assert list(_LEVELS) == VECTORS["ledger"]["levels"]
    assert list(_P_VALUES) == VECTORS["ledger"]["p"]
    golden = {name: right for name, _, right in _golden_values()}
    assert golden["sign_test(12, 3)"] == VECTORS["sign_test"][0]["p"]
    assert golden["paired_e_value(30, 10)"] == VECTORS["paired_e_value"][1]["e"]
    table = VECTORS["tango_95"]["cases"][0]["interval"]
    assert [golden[f"tango_interval(1, 7, 21)[{end}]"] for end in (0, 1)] == table
    assert golden["required_pairs(.14, .03, .0077)"] == VECTORS["power"][0]["pairs"]


def test_wrong_arithmetic_is_noticed() -> None:
    with pytest.raises(GateError, match=r"sign_test\(12, 3\) is 0.0176; 0.017578125 is right"):
        _check_values([("sign_test(0, 0)", 1.0, 1.0), ("sign_test(12, 3)", 0.0176, 0.017578125)])


def test_a_policy_under_which_nothing_can_pass_is_noticed() -> None:
    with pytest.raises(GateError, match=r"solves everything over 40 pairs ends in .*Promote is right"):
        self_test(make_policy(guardrails__no_reply_margin=1e-6))


def test_a_gate_that_lets_everything_through_is_noticed() -> None:
    def generous(evidence: Evidence, policy: Policy, ledger: Ledger) -> Decision:
        decision = certify(evidence, policy, ledger)
        assert not isinstance(decision, Abstain)
        return Promote(reasons=(), measured=decision.measured)

    with pytest.raises(GateError, match="an A/A pair over 40 pairs ends in 'promote: '; Refuse is right"):
        _check_decisions(make_policy(), generous)


def test_a_policy_whose_collapse_tests_can_find_nothing_is_noticed() -> None:
    rules = load_policy().collapse
    assert isinstance(rules, CollapseRules)
    self_test(make_policy(collapse=rules))
    with pytest.raises(GateError, match=r"in one way over 40 pairs ends in 'promote.*Refuse is right"):
        self_test(make_policy(collapse=replace(rules, tasks=6)))


def test_a_gate_that_mixes_up_its_arms_is_noticed() -> None:
    def mixed_up(evidence: Evidence, policy: Policy, ledger: Ledger) -> Decision:
        ours, theirs = evidence.pairs.challenger, evidence.pairs.champion
        swapped = replace(evidence.pairs, challenger=theirs, champion=ours, anchor=ours)
        return certify(replace(evidence, pairs=swapped), policy, ledger)

    with pytest.raises(GateError, match="a degraded challenger"):
        _check_decisions(make_policy(), mixed_up)
