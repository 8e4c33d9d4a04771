"""Ranges of every figure, whatever was recorded."""

from __future__ import annotations

import random
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from monitor_world import one
from tidegate.core.hashing import canonical_json
from tidegate.core.monitors import SHIPPED_LIMITS, RecordedAnswer, compare, measure

TEXTS = st.text(alphabet="ab 4\u00e9", max_size=12)


@st.composite
def answers(draw: st.DrawFn, release: str, *, least: int = 1) -> list[RecordedAnswer]:
    count = draw(st.integers(least, 30))
    return [
        one(
            f"{release}-{number}",
            release=release,
            kind=draw(st.sampled_from("xyz")),
            prompt=draw(st.sampled_from("pqrst")),
            passed=draw(st.sampled_from([True, True, False, None])),
            strategy=(draw(st.sampled_from([(), ("calc",)])), draw(TEXTS)),
            tokens=draw(st.integers(1, 50)),
            refused=draw(st.booleans()),
            temperature=(temperature := draw(st.sampled_from([None, 0.5, 1.0]))),
            surprisal=None if temperature is None else draw(st.floats(0.0, 100.0)),
        )
        for number in range(count)
    ]


@given(answers("r1"), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_figures_keep_to_their_ranges_and_depend_on_no_order(found: list[RecordedAnswer], order: random.Random) -> None:
    figures = measure(found)
    assert measure(order.sample(found, len(found))) == figures
    canonical_json(asdict(figures))  # finite, and JSON
    assert figures.passed <= figures.judged <= figures.episodes == len(found)
    assert figures.kinds_solved <= figures.kinds <= 3
    for share in (figures.no_reply, figures.invalid_tool_call, figures.refused):
        assert 0.0 <= share <= 1.0
    assert (figures.k is None) == (figures.pass_at_k is None) == (figures.pass_at_1 is None) == (figures.prompts == 0)
    if figures.pass_at_k is not None and figures.pass_at_1 is not None and figures.k is not None:
        assert 2 <= figures.k <= 8
        assert 0.0 <= figures.pass_at_1 <= figures.pass_at_k + 1e-12 <= 1.0 + 1e-12
    assert (figures.success is None) == (figures.judged == 0)
    assert (figures.vendi is None) == (figures.passed == 0)
    if figures.vendi is not None and figures.strategies is not None and figures.distinct is not None:
        assert 1.0 - 1e-9 <= figures.vendi <= figures.vendi_answers + 1e-9
        assert 1.0 - 1e-9 <= figures.strategies <= figures.passed + 1e-9
        assert 0.0 < figures.distinct <= 1.0
    assert (figures.entropy is None) == (figures.temperature is None) == (figures.entropy_tokens == 0)
    assert figures.entropy is None or figures.entropy >= 0.0


@given(answers("r1", least=0), answers("r0", least=0), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_comparisons_are_json_and_flag_nothing_that_is_not_compared(
    release: list[RecordedAnswer], anchor: list[RecordedAnswer], seed: int
) -> None:
    for row in compare(release, anchor, SHIPPED_LIMITS, seed=seed):
        canonical_json(asdict(row))
        assert (row.value is None) == (row.anchor is None) == (row.count < row.needed)
        assert (row.narrower is None) == (row.limit is None or row.count < row.needed)
        assert row.p is None or 0.0 < row.p <= 1.0
