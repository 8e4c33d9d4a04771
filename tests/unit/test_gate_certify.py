"""The decision over a sealed set: every condition, alone, can stop a promotion; missing data never helps one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gate_engine import make_policy
from tidegate.core.gate import (
    Abstain,
    ArmOutcome,
    Evidence,
    Pair,
    Promote,
    Refuse,
    Reply,
    certify,
    describe,
    reply_of,
)
from tidegate.core.gate.certify import POOLED, slices
from tidegate.core.statistics import Ledger, sign_test

PASS, FAIL = ArmOutcome(passed=True), ArmOutcome(passed=False)
POLICY = make_policy()
LEDGER = Ledger(alpha=0.1, looks=5)


def pairs_of(*groups: tuple[int, ArmOutcome, ArmOutcome, ArmOutcome], kinds: tuple[str, ...] = ("a",)) -> list[Pair]:
    """Groups of (count, challenger, champion, anchor); kinds take turns."""
    arms = [arms for count, *arms in groups for _ in range(count)]
    return [
        Pair(task_id=f"t{i:03}", kind=kinds[i % len(kinds)], challenger=a, champion=b, anchor=c)
        for i, (a, b, c) in enumerate(arms)
    ]


def evidence(pairs: list[Pair]) -> Evidence:
    return Evidence(pairs=tuple(pairs), available=len(pairs))


GOOD = pairs_of((20, PASS, FAIL, FAIL), (30, PASS, PASS, FAIL), (10, FAIL, FAIL, FAIL))


def test_a_clear_improvement_is_promoted_with_its_numbers() -> None:
    decision = certify(evidence(GOOD), POLICY, LEDGER)
    assert isinstance(decision, Promote)
    measured = decision.measured
    assert (measured.wins, measured.losses, measured.ties, measured.pairs) == (20, 0, 40, 60)
    assert measured.p == sign_test(20, 0)
    assert measured.level == pytest.approx(0.02)
    assert [bound.name for bound in measured.bounds] == [
        "overall against the champion",
        "slice 'a'",
        "guardrail 'replies'",
        "guardrail 'valid tool calls'",
        "overall against the anchor",
    ]
    assert measured.bounds[0].difference == pytest.approx(20 / 60)
    assert describe(decision) == (
        "promote: 20 wins, 0 losses over 60 pairs: p = 9.5e-07 <= level 0.02; all 5 non-inferiority bounds hold"
    )
    assert reply_of(decision) is Reply.PROMOTE


def test_an_insignificant_gain_is_refused_with_its_numbers() -> None:
    pairs = pairs_of((12, PASS, FAIL, FAIL), (9, FAIL, PASS, FAIL), (75, PASS, PASS, FAIL))
    decision = certify(evidence(pairs), POLICY, LEDGER)
    assert isinstance(decision, Refuse)
    assert decision.reasons[0] == "12 wins, 9 losses over 96 pairs: p = 0.33 > level 0.02"
    assert reply_of(decision) is Reply.REJECT


def test_the_level_is_the_ledgers() -> None:
    pairs = evidence(pairs_of((5, PASS, FAIL, FAIL), (55, PASS, PASS, FAIL)))
    assert isinstance(certify(pairs, POLICY, LEDGER), Refuse)  # p = 0.03125
    assert isinstance(certify(pairs, POLICY, LEDGER.after(promoted=True)), Promote)  # level 0.04


@pytest.mark.parametrize(
    ("available", "asked", "words"),
    [(39, 0, "39 of 40 pairs"), (60, 39, "answers to 39 of 40 pairs")],
)
def test_too_few_pairs_abstain(available: int, asked: int, words: str) -> None:
    decision = certify(Evidence(pairs=tuple(GOOD[:asked]), available=available), POLICY, LEDGER)
    assert decision == Abstain(missing=(words,))
    assert reply_of(decision) is Reply.ABSTAIN
    assert describe(decision) == f"abstain: {words}"


def test_just_enough_pairs_decide() -> None:
    assert not isinstance(certify(evidence(GOOD[:40]), POLICY, LEDGER), Abstain)


def with_flags(arm: str, count: int, **flags: bool) -> list[Pair]:
    """GOOD with flags set on the last ``count`` outcomes of one arm."""
    changed = [replace(pair, **{arm: replace(getattr(pair, arm), **flags)}) for pair in GOOD[-count:]]
    return GOOD[:-count] + changed


@pytest.mark.parametrize("arm", ["challenger", "champion", "anchor"])
def test_many_engine_errors_of_any_arm_abstain(arm: str) -> None:
    assert not isinstance(certify(evidence(with_flags(arm, 3, engine_error=True)), POLICY, LEDGER), Abstain)
    decision = certify(evidence(with_flags(arm, 4, engine_error=True)), POLICY, LEDGER)
    assert isinstance(decision, Abstain)
    assert decision.missing == (
        f"4 of 60 answers of the {arm} ended in engine errors, more than 5%: the engine was measured, not the model",
    )


def test_engine_errors_count_against_the_challenger_wherever_they_happen() -> None:
    cut = ArmOutcome(passed=False, engine_error=True)
    pairs = pairs_of((2, FAIL, cut, FAIL), (2, cut, PASS, FAIL), (2, PASS, cut, cut), (54, PASS, PASS, FAIL))
    decision = certify(evidence(pairs), make_policy(sealed__max_error_share=0.5), LEDGER)
    assert isinstance(decision, Refuse)
    assert (decision.measured.wins, decision.measured.losses) == (0, 4)


def test_a_verifier_error_is_a_failure_of_its_own_arm() -> None:
    raised = ArmOutcome(passed=False, verifier_error=True)
    pairs = pairs_of((20, PASS, raised, FAIL), (40, PASS, PASS, FAIL))
    decision = certify(evidence(pairs), POLICY, LEDGER)
    assert isinstance(decision, Promote)
    assert decision.measured.wins == 20


def broken_bounds(pairs: list[Pair]) -> list[str]:
    """Names of the bounds that alone refuse ``pairs``; superiority must hold."""
    decision = certify(evidence(pairs), POLICY, LEDGER)
    assert isinstance(decision, Refuse)
    assert decision.measured.p <= decision.measured.level
    names = [bound.name for bound in decision.measured.bounds if not bound.holds]
    assert [reason.split(":")[0] for reason in decision.reasons] == names
    return names


def test_a_loss_on_one_slice_refuses() -> None:
    gains = pairs_of((40, PASS, FAIL, FAIL))
    losses = [
        replace(pair, task_id=f"x{pair.task_id}", kind="b")
        for pair in pairs_of((8, FAIL, PASS, FAIL), (12, PASS, PASS, FAIL))
    ]
    assert broken_bounds(gains + losses) == ["slice 'b'"]


def test_a_rise_of_silence_refuses() -> None:
    assert broken_bounds(with_flags("challenger", 10, no_reply=True)) == ["guardrail 'replies'"]


def test_a_rise_of_invalid_tool_calls_refuses() -> None:
    assert broken_bounds(with_flags("challenger", 10, invalid_tool_call=True)) == ["guardrail 'valid tool calls'"]


def test_the_same_faults_of_both_arms_are_no_rise() -> None:
    pairs = [
        replace(
            pair,
            challenger=replace(pair.challenger, no_reply=not pair.challenger.passed),
            champion=replace(pair.champion, no_reply=not pair.challenger.passed),
        )
        for pair in GOOD
    ]
    assert isinstance(certify(evidence(pairs), POLICY, LEDGER), Promote)


def test_engine_errors_do_not_hide_from_guardrails() -> None:
    pairs = with_flags("challenger", 10, engine_error=True)
    decision = certify(evidence(pairs), make_policy(sealed__max_error_share=0.5), LEDGER)
    assert isinstance(decision, Refuse)
    failed = {bound.name for bound in decision.measured.bounds if not bound.holds}
    assert {"guardrail 'replies'", "guardrail 'valid tool calls'"} <= failed
    opponents = with_flags("champion", 10, engine_error=True, no_reply=True)
    decision = certify(evidence(opponents), make_policy(sealed__max_error_share=0.5), LEDGER)
    assert isinstance(decision, Promote | Refuse)
    assert next(b for b in decision.measured.bounds if b.name == "guardrail 'replies'").better == 0


def test_a_loss_against_the_anchor_refuses() -> None:
    pairs = pairs_of((20, PASS, FAIL, PASS), (20, FAIL, FAIL, PASS), (20, PASS, PASS, PASS))
    assert broken_bounds(pairs) == ["overall against the anchor"]


def test_an_overall_margin_may_refuse_what_is_superior() -> None:
    pairs = pairs_of((20, PASS, FAIL, FAIL), (7, FAIL, PASS, FAIL), (13, PASS, PASS, FAIL))
    strict = make_policy(non_inferiority__overall_margin=1e-9, non_inferiority__slice_margin=0.9)
    assert isinstance(certify(evidence(pairs), make_policy(), LEDGER), Promote)
    bound = certify(evidence(pairs), strict, LEDGER)
    assert isinstance(bound, Promote)  # significance at 0.02 implies a positive bound at 0.05
    assert bound.measured.bounds[0].lower > 0


def test_certify_without_an_anchor_is_an_error() -> None:
    pairs = [replace(pair, anchor=None) for pair in GOOD]
    with pytest.raises(ValueError, match="'t000' has no outcome of the anchor"):
        certify(evidence(pairs), POLICY, LEDGER)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": 20, "b": 25}, {"a": 20, "b": 25}),
        ({"a": 20, "b": 12, "c": 9}, {"a": 20, POOLED: 21}),
        ({"a": 30, "b": 25, "c": 3}, {"a": 30, f"b {POOLED}": 28}),
        ({"a": 10, "b": 9}, {POOLED: 19}),
        ({}, {}),
    ],
)
def test_thin_slices_are_pooled_and_never_lost(sizes: dict[str, int], expected: dict[str, int]) -> None:
    pairs = [
        Pair(task_id=f"{kind}{i}", kind=kind, challenger=PASS, champion=PASS)
        for kind, size in sizes.items()
        for i in range(size)
    ]
    assert {name: len(members) for name, members in slices(pairs, 20).items()} == expected
