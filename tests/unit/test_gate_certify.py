"""The decision over a sealed set: every condition, alone, can stop a promotion; missing data never helps one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gate_engine import Pair, Row, columns_of, make_policy
from tidegate.core.gate import (
    Abstain,
    Evidence,
    Promote,
    Refuse,
    Reply,
    certify,
    describe,
    reply_of,
)
from tidegate.core.gate.certify import POOLED, slices
from tidegate.core.statistics import Ledger, betting_p_value, sign_test, tango_lower_bound

PASS, FAIL = Row(passed=True), Row(passed=False)
POLICY = make_policy()
LEDGER = Ledger(alpha=0.1, looks=5)


def pairs_of(*groups: tuple[int, Row, Row, Row], kinds: tuple[str, ...] = ("a",)) -> list[Pair]:
    """Groups of (count, challenger, champion, anchor); kinds take turns."""
    arms = [arms for count, *arms in groups for _ in range(count)]
    return [
        Pair(task_id=f"t{i:03}", kind=kinds[i % len(kinds)], challenger=a, champion=b, anchor=c)
        for i, (a, b, c) in enumerate(arms)
    ]


def evidence(pairs: list[Pair]) -> Evidence:
    return Evidence(pairs=columns_of(pairs), available=len(pairs))


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
        "guardrail 'no refusals'",
        "guardrail 'length'",
        "guardrail 'speed'",
        "overall against the anchor",
    ]
    assert measured.bounds[0].difference == pytest.approx(20 / 60)
    assert describe(decision) == (
        "promote: 20 wins, 0 losses over 60 pairs: p = 9.5e-07 <= level 0.02; all 8 non-inferiority bounds hold"
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
    decision = certify(Evidence(pairs=columns_of(GOOD[:asked]), available=available), POLICY, LEDGER)
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
    cut = Row(passed=False, engine_error=True)
    pairs = pairs_of((2, FAIL, cut, FAIL), (2, cut, PASS, FAIL), (2, PASS, cut, cut), (54, PASS, PASS, FAIL))
    decision = certify(evidence(pairs), make_policy(sealed__max_error_share=0.5), LEDGER)
    assert isinstance(decision, Refuse)
    assert (decision.measured.wins, decision.measured.losses) == (0, 4)


def test_a_verifier_error_is_a_failure_of_its_own_arm() -> None:
    raised = Row(passed=False, verifier_error=True)
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


def test_a_rise_of_refusals_refuses_unless_the_task_asked_for_them() -> None:
    assert broken_bounds(with_flags("challenger", 10, refused=True)) == ["guardrail 'no refusals'"]
    asked_for = [replace(pair, challenger=replace(pair.challenger, refused=True)) for pair in GOOD[:50]]
    assert all(pair.challenger.passed for pair in asked_for)
    assert isinstance(certify(evidence(asked_for + GOOD[50:]), POLICY, LEDGER), Promote)


@pytest.mark.parametrize(
    ("tokens", "milliseconds", "broken"),
    [
        (21, 210, ["guardrail 'length'"]),
        (20, 200, []),  # just twice as long, at the same pace
        (10, 301, ["guardrail 'speed'"]),
        (10, 300, []),  # just three times as slow
        (20, 401, []),  # longer in all, not slower a token
        (40, 4000, ["guardrail 'length'", "guardrail 'speed'"]),
        (1, 1, []),  # shorter and faster is no fault
    ],
)
def test_long_winded_or_slow_answers_refuse(tokens: int, milliseconds: int, broken: list[str]) -> None:
    pairs = with_flags("challenger", 20, tokens=tokens, milliseconds=milliseconds)
    if broken:
        assert broken_bounds(pairs) == broken
    else:
        assert isinstance(certify(evidence(pairs), POLICY, LEDGER), Promote)


def test_length_and_speed_are_held_to_the_other_arm_on_the_same_task() -> None:
    """Long answers of both arms are no rise, and the champion's own long answers make up for the challenger's."""
    both = [
        replace(pair, challenger=replace(pair.challenger, tokens=500), champion=replace(pair.champion, tokens=400))
        for pair in GOOD
    ]
    assert isinstance(certify(evidence(both), POLICY, LEDGER), Promote)
    half = with_flags("challenger", 20, tokens=50)
    balanced = [replace(pair, champion=replace(pair.champion, tokens=50)) for pair in half[:20]] + half[20:]
    decision = certify(evidence(balanced), POLICY, LEDGER)
    assert isinstance(decision, Refuse | Promote)
    length = next(bound for bound in decision.measured.bounds if bound.name == "guardrail 'length'")
    assert (length.better, length.worse) == (20, 20)


def test_length_that_brings_success_is_not_overlong_for_either_arm() -> None:
    """An agent that gives up after one call is always shorter than one that answers after two."""
    short, long = Row(passed=False, tokens=10), Row(passed=True, tokens=50)
    both = [Row(passed=True, tokens=10), Row(passed=True, tokens=50)]
    pairs = [
        *(Pair(task_id=f"a{n:02}", kind="a", challenger=long, champion=short, anchor=short) for n in range(30)),
        *(Pair(task_id=f"b{n:02}", kind="a", challenger=short, champion=long, anchor=short) for n in range(5)),
        *(Pair(task_id=f"c{n:02}", kind="a", challenger=both[1], champion=both[0], anchor=short) for n in range(3)),
        *(Pair(task_id=f"d{n:02}", kind="a", challenger=both[0], champion=both[0], anchor=short) for n in range(22)),
    ]
    decision = certify(evidence(pairs), POLICY, LEDGER)
    assert isinstance(decision, Promote)
    length = next(bound for bound in decision.measured.bounds if bound.name == "guardrail 'length'")
    assert (length.better, length.worse) == (0, 3)


@pytest.mark.parametrize("arm", ["challenger", "champion"])
def test_what_was_cut_short_counts_as_long_and_slow_for_the_challenger(arm: str) -> None:
    pairs = with_flags(arm, 10, engine_error=True, tokens=0, milliseconds=0)
    decision = certify(evidence(pairs), make_policy(sealed__max_error_share=0.5), LEDGER)
    assert isinstance(decision, Refuse | Promote)
    counts = {bound.name: (bound.better, bound.worse) for bound in decision.measured.bounds}
    assert counts["guardrail 'length'"] == counts["guardrail 'speed'"] == (0, 10)


def graded_pairs(*groups: tuple[int, float, float, float]) -> list[Pair]:
    """Groups of (count, challenger, champion, anchor) rewards; nothing passes."""
    rewards = [arms for count, *arms in groups for _ in range(count)]
    rows = [[Row(passed=False, reward=reward) for reward in arms] for arms in rewards]
    return [Pair(task_id=f"t{i:03}", kind="a", challenger=a, champion=b, anchor=c) for i, (a, b, c) in enumerate(rows)]


def graded(pairs: list[Pair], seed: int = 5) -> Evidence:
    return replace(evidence(pairs), graded=True, seed=seed)


def test_graded_rewards_are_compared_by_size() -> None:
    """Thirty small losses against twenty large gains: a sign test would refuse."""
    pairs = graded_pairs((20, 0.9, 0.2, 0.2), (30, 0.50, 0.52, 0.2), (10, 0.4, 0.4, 0.2))
    decision = certify(graded(pairs), POLICY, LEDGER)
    assert isinstance(decision, Promote)
    measured = decision.measured
    assert (measured.wins, measured.losses, measured.test) == (20, 30, "betting test")
    assert measured.p == pytest.approx(betting_p_value([0.7] * 20 + [-0.02] * 30))
    overall = measured.bounds[0]
    assert (overall.better, overall.worse) == (pytest.approx(14.0), pytest.approx(0.6))
    assert overall.lower == pytest.approx(tango_lower_bound(14.0, 0.6, 60, 0.05))
    assert describe(decision).startswith("promote: 20 wins, 30 losses over 60 pairs, mean difference +0.223: p = ")
    assert isinstance(certify(replace(graded(pairs), graded=False), POLICY, LEDGER), Refuse)


def test_small_gains_that_pay_for_few_large_losses_are_no_improvement() -> None:
    """The mean is a little below zero; sign flips, which take symmetry for granted, would see next to nothing of it."""
    pairs = graded_pairs((220, 0.75, 0.5, 0.2), (60, 0.0, 1.0, 0.0), (1720, 0.4, 0.4, 0.2))
    decision = certify(graded(pairs), POLICY, LEDGER)
    assert isinstance(decision, Refuse)
    assert decision.measured.p == 1.0


def test_many_small_gains_do_not_pay_for_a_graded_loss_beyond_the_margin() -> None:
    pairs = graded_pairs((50, 0.52, 0.5, 0.5), (10, 0.1, 0.9, 0.5))
    decision = certify(graded(pairs), POLICY, LEDGER)
    assert isinstance(decision, Refuse)
    assert decision.measured.wins > decision.measured.losses
    assert any(reason.startswith("overall against the champion: 1.0 better, 8.0 worse") for reason in decision.reasons)


def test_a_cut_short_graded_answer_counts_in_full_against_the_challenger() -> None:
    cut = Row(passed=False, reward=0.7, engine_error=True)
    pairs = graded_pairs((58, 0.5, 0.5, 0.5))
    pairs[0] = replace(pairs[0], challenger=cut)
    pairs[1] = replace(pairs[1], champion=cut)
    decision = certify(graded(pairs), POLICY, LEDGER)
    assert isinstance(decision, Refuse)
    assert (decision.measured.bounds[0].better, decision.measured.bounds[0].worse) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "values", "chances"),
    [
        ("many small, one large loss", (0.05, -0.95), (0.95, 0.05)),
        ("rare large gains", (0.9, -0.1), (0.1, 0.9)),
        ("mostly ties", (0.0, 0.5, -0.5), (0.9, 0.05, 0.05)),
        ("passes", (0.0, 1.0, -1.0), (0.86, 0.07, 0.07)),
    ],
)
def test_the_bound_of_graded_differences_keeps_its_level(
    name: str, values: tuple[float, ...], chances: tuple[float, ...]
) -> None:
    """Simulated: how often the lower bound at level .05 lies above the true mean, 0, over 1,655 users."""
    del name
    runs, users = 2000, 1655
    counts = np.random.default_rng(0).multinomial(users, chances, runs)
    sizes = np.array(values)
    assert abs(float(sizes @ chances)) < 1e-12
    gains, losses = counts @ np.clip(sizes, 0.0, None), counts @ np.clip(-sizes, 0.0, None)
    wrong = sum(tango_lower_bound(float(b), float(c), users) > 0.0 for b, c in zip(gains, losses, strict=True))
    assert wrong / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


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
    with pytest.raises(ValueError, match="no outcomes of the anchor"):
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
    assert {name: members.sum() for name, members in slices(columns_of(pairs), 20).items()} == expected
