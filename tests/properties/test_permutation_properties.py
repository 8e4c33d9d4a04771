"""The sign-flip test against exact enumeration, the sign test and its own promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tidegate.core.statistics import sign_flip_test, sign_test

GRADES = st.lists(st.sampled_from([-1.0, -0.5, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3, 1.0]), min_size=2, max_size=10)
FLIPS = 9_999


def rng() -> np.random.Generator:
    return np.random.default_rng(20261129)


def near(p: float) -> Any:
    """Five standard errors of FLIPS draws, and the one that the formula adds."""
    return pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / FLIPS) + 2 / FLIPS)


@given(GRADES)
def test_it_is_scipys_permutation_test(differences: list[float]) -> None:
    """Scipy lists all sign patterns of so few users, two at least; whole tenths make ties exact there too."""
    exact = stats.permutation_test(
        (np.rint(np.array(differences) * 10),),
        lambda values, axis: values.sum(axis=axis),
        permutation_type="samples",
        alternative="greater",
        n_resamples=np.inf,
        vectorized=True,
    )
    assert sign_flip_test(differences, rng(), flips=FLIPS) == near(float(exact.pvalue))


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([0.25, 1.0]))
def test_with_equal_sizes_it_is_the_sign_test(wins: int, losses: int, size: float) -> None:
    differences = np.repeat([size, -size, 0.0], [wins, losses, 5])
    assert sign_flip_test(differences, rng(), flips=FLIPS) == near(sign_test(wins, losses))


def test_sums_that_are_equal_but_for_rounding_tie() -> None:
    """0.1 + 0.2 exceeds 0.3 by 5e-17 in doubles; of the 8 patterns 5 reach the observed sum of zero."""
    assert sign_flip_test([0.1, 0.2, -0.3], rng(), flips=FLIPS) == near(5 / 8)


@given(st.lists(st.floats(-1, 1), max_size=40), st.integers(1, 50))
def test_p_is_never_zero_and_the_seed_gives_it_again(differences: list[float], flips: int) -> None:
    p = sign_flip_test(differences, np.random.default_rng(5), flips=flips)
    assert 1 / (flips + 1) <= p <= 1.0
    assert p == sign_flip_test(differences, np.random.default_rng(5), flips=flips)
    assert sign_flip_test([0.0] * len(differences), rng(), flips=flips) == 1.0


@pytest.mark.parametrize("flips", [19, 99])
def test_it_keeps_its_level_with_few_flips_and_unequal_sizes(flips: int) -> None:
    """8,000 looks at 30 users with symmetric differences; tolerance three standard errors of a rate at the level."""
    source, looks, level = rng(), 8000, 0.05
    sizes = source.exponential(0.2, (looks, 30)).clip(max=1.0)
    differences = sizes * source.choice([-1.0, 0.0, 1.0], (looks, 30))
    rejected = np.mean([sign_flip_test(row, source, flips=flips) <= level for row in differences])
    assert 0.03 < rejected <= level + 3 * math.sqrt(level * (1 - level) / looks)


@pytest.mark.parametrize(
    ("differences", "flips", "words"),
    [([[0.0]], 9, "a vector"), ([1.1], 9, "a vector"), ([math.nan], 9, "a vector"), ([0.5], 0, "flips = 0")],
)
def test_what_is_no_set_of_differences_is_refused(differences: Any, flips: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sign_flip_test(differences, rng(), flips=flips)


def test_skewed_differences_of_mean_zero_are_beyond_its_promise() -> None:
    """11 % of 2,000 users gain 0.25, 3 % lose 1; of 8,000 looks those with a small sum need no test: p is large."""
    source, values, level = rng(), np.array([0.25, -1.0, 0.0]), 0.1 / 13
    counts = source.multinomial(2000, [0.112, 0.028, 0.86], size=8000)
    far = counts[counts @ values > 2 * math.sqrt(2000 * 0.035)]
    rejected = sum(sign_flip_test(np.repeat(values, row), source, flips=999) <= level for row in far)
    assert rejected / 8000 > level + 2 * math.sqrt(level * (1 - level) / 8000)
