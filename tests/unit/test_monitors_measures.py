"""Figures of one release, worked out by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from monitor_world import drawn, one
from tidegate.core.monitors import by_kind, measure
from tidegate.core.monitors.measures import VENDI_ANSWERS

SMALL = [
    one("a", prompt="p", strategy=((), "it is four"), tokens=4, surprisal=2.0),
    one("b", prompt="p", strategy=((), "it is four"), tokens=2, surprisal=4.0),
    one("c", prompt="p", passed=False, strategy=((), "five"), refused=True, temperature=0.5, surprisal=9.0, tokens=3),
    one("d", prompt="q", kind="names", passed=False, strategy=((), ""), no_reply=True, tokens=0, surprisal=None),
    one("e", prompt="q", kind="names", passed=None, tokens=6, temperature=None, surprisal=None, invalid_tool_call=True),
]


def test_figures_of_five_answers_by_hand() -> None:
    figures = measure(SMALL)
    assert (figures.episodes, figures.judged, figures.passed, figures.success) == (5, 4, 2, 0.5)
    assert (figures.kinds, figures.kinds_solved, figures.coverage) == (2, 1, 0.5)
    # Prompt p: 2 of 3 pass. k = 3, so that pass@1 is 2/3 and any of all three passes.
    assert (figures.prompts, figures.k, figures.pass_at_k) == (1, 3, 1.0)
    assert figures.pass_at_1 == pytest.approx(2 / 3)
    # Twice the same: one strategy, one answer; 4 of 8 word pairs differ, an answer's ends included.
    assert figures.strategies == pytest.approx(1.0)
    assert figures.vendi == pytest.approx(1.0)
    assert (figures.distinct, figures.vendi_answers) == (0.5, 2)
    # At temperature 1: 2 + 4 nats over 4 + 2 tokens; c was sampled at another temperature.
    assert (figures.temperature, figures.entropy, figures.entropy_tokens) == (1.0, 1.0, 6)
    assert (figures.tokens, figures.no_reply, figures.invalid_tool_call, figures.refused) == (3.0, 0.2, 0.2, 0.2)


def test_two_answers_that_share_only_their_blank_ends_are_nearly_two() -> None:
    figures = measure([one("a", strategy=((), "abc")), one("b", strategy=((), "xyz"))])
    assert figures.strategies == pytest.approx(2.0)
    # Trigrams of "   abc   " and "   xyz   ": of 7 the blank one twice, so norm 3 and cosine 2 * 2 / 9.
    eigenvalues = np.linalg.eigvalsh(np.array([[1.0, 4 / 9], [4 / 9, 1.0]])) / 2.0
    expected = math.exp(-sum(share * math.log(share) for share in eigenvalues))
    assert figures.vendi == pytest.approx(expected)


def test_where_no_prompt_has_two_verdicts_there_is_no_pass_at_k() -> None:
    figures = measure([one("a", prompt="p"), one("b", prompt="p", passed=None), one("c", prompt="q")])
    assert (figures.prompts, figures.k, figures.pass_at_1, figures.pass_at_k) == (0, None, None, None)


def test_k_is_at_most_eight_and_over_the_prompts_that_allow_it() -> None:
    often = [one(f"a{i}", prompt="p", passed=i < 3) for i in range(12)]
    rarely = [one(f"b{i}", prompt="q") for i in range(7)]
    figures = measure([*often, *rarely])
    assert (figures.k, figures.prompts, figures.pass_at_1) == (8, 1, 0.25)
    assert figures.pass_at_k == pytest.approx(1.0 - math.comb(9, 8) / math.comb(12, 8))


def test_without_a_verdict_only_what_needs_none_is_there() -> None:
    figures = measure([one("a", passed=None, temperature=None, surprisal=None)])
    missing = (figures.success, figures.coverage, figures.strategies, figures.distinct, figures.vendi, figures.entropy)
    assert missing == (None,) * 6
    assert (figures.episodes, figures.tokens, figures.temperature) == (1, 4.0, None)


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one recorded answer"):
        measure([])


def test_the_order_of_the_answers_makes_no_difference() -> None:
    answers = drawn("r1", 0, episodes=700, prompts=9)
    shuffled = random.Random(1).sample(answers, len(answers))
    assert measure(shuffled) == measure(answers)
    assert measure(answers).vendi_answers == VENDI_ANSWERS < measure(answers).passed
    assert list(by_kind(shuffled)) == ["kind-0", "kind-1", "kind-2", "kind-3"]
    assert sum(len(found) for found in by_kind(shuffled).values()) == 700


def test_the_vendi_score_looks_at_the_beginning_of_long_answers() -> None:
    long = [one(name, strategy=((), "word " * 200 + name * 50)) for name in "ab"]
    assert measure(long).vendi == pytest.approx(1.0)
    assert measure(long).strategies == pytest.approx(2.0)
