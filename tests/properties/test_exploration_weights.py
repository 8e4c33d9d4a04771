"""Exploration weights: mean one, 1 / sqrt(frequency), and what a loop over one's own successes comes to rest at."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.selection.weights import exploration_weights

CLUSTERS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=60)


@given(CLUSTERS)
def test_the_mean_is_one_and_the_ratio_of_two_is_that_of_the_roots(clusters: list[str]) -> None:
    weights = exploration_weights(clusters)
    counts = Counter(clusters)
    assert math.fsum(weights) == pytest.approx(len(clusters))
    for weight, cluster in zip(weights, clusters, strict=True):
        assert weight * math.sqrt(counts[cluster]) == pytest.approx(weights[0] * math.sqrt(counts[clusters[0]]))


@given(CLUSTERS, st.randoms())
def test_the_order_of_the_examples_changes_no_weight(clusters: list[str], random: object) -> None:
    before = dict(zip(clusters, exploration_weights(clusters), strict=True))
    random.shuffle(clusters)  # type: ignore[attr-defined]
    assert dict(zip(clusters, exploration_weights(clusters), strict=True)) == before


def test_a_small_case_by_hand() -> None:
    assert list(exploration_weights(["a", "a", "a", "a", "b"])) == pytest.approx([5 / 6] * 4 + [5 / 3])
    assert list(exploration_weights(["a", "a"])) == pytest.approx([1.0, 1.0])
    assert exploration_weights([]) == ()


def test_a_loop_over_own_successes_keeps_every_strategy_that_works() -> None:
    chance = np.array([0.9, 0.6, 0.3])
    policy = np.full(3, 1 / 3)
    for _ in range(40):
        solved = np.round(policy * chance * 100_000).astype(int)
        clusters = np.repeat(["0", "1", "2"], solved).tolist()
        weights = dict(zip(clusters, exploration_weights(clusters), strict=True))
        share = np.array([count * weights.get(str(index), 0.0) for index, count in enumerate(solved)])
        policy = share / share.sum()
    np.testing.assert_allclose(policy, chance / chance.sum(), atol=1e-3)
