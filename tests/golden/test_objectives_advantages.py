"""Advantages against golden numbers and numbers worked out by hand."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.objectives.advantages import (
    group_advantages,
    reinforce_pp,
    rloo,
    running_mean_advantages,
)

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("objective_vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "scale"), [("grpo_group", "group"), ("grpo_none", "none")])
def test_group_advantages_match_the_vectors(name: str, scale: Any) -> None:
    case = VECTORS[name]
    found = group_advantages(case["rewards"], ["a"] * len(case["rewards"]), scale=scale)
    assert found == pytest.approx(case["advantages"], abs=1e-6)


def test_the_mean_baseline_matches_the_vectors() -> None:
    case = VECTORS["mean_baseline_rounded_3"]
    found = group_advantages(case["rewards"], ["a"] * len(case["rewards"]), scale="none")
    assert found == pytest.approx(case["advantages"], abs=0.0005 + 1e-12)


def test_rloo_matches_the_vectors() -> None:
    case = VECTORS["rloo"]
    assert rloo(case["rewards"], ["a"] * 4) == pytest.approx(case["advantages"], abs=1e-6)


def test_groups_are_kept_apart_in_any_order() -> None:
    found = group_advantages([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"], scale="none")
    assert found == (0.5, -1.0, -0.5, 1.0)
    assert rloo([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"]) == (1.0, -2.0, -1.0, 2.0)


def test_batch_scale_divides_all_groups_by_one_number() -> None:
    rewards = [1.0, 0.0, 0.2, 0.1]
    found = group_advantages(rewards, ["a", "a", "b", "b"], scale="batch")
    divisor = statistics.stdev(rewards) + 1e-4
    assert found == pytest.approx([0.5 / divisor, -0.5 / divisor, 0.05 / divisor, -0.05 / divisor], rel=1e-12)


def test_reinforce_pp_by_hand() -> None:
    # Mean .5, sample variance (.25 + .25) / 1.
    divisor = math.sqrt(0.5) + 1e-4
    assert reinforce_pp([1.0, 0.0]) == pytest.approx([0.5 / divisor, -0.5 / divisor], rel=1e-12)


def test_running_means_by_hand() -> None:
    # Half-life 1: baseline of the third is (1 * .5 + 0) / 1.5, of the fourth (1 * .25 + 0 * .5 + 1) / 1.75.
    found = running_mean_advantages([1.0, 0.0, 1.0, 0.0], ["a"] * 4, half_life=1.0)
    assert found == pytest.approx([0.0, -1.0, 1 - 0.5 / 1.5, -1.25 / 1.75], rel=1e-12)
    mixed = running_mean_advantages([1.0, 0.3, 0.0, 0.3], ["a", "b", "a", "b"], half_life=math.inf)
    assert mixed == (0.0, 0.0, -1.0, 0.0)


def test_equal_rewards_and_groups_of_one_teach_nothing_and_are_seen() -> None:
    equal = [0.1] * 7  # the mean of these is not .1 to the last bit
    for found in (
        group_advantages(equal, ["a"] * 7),
        group_advantages(equal, ["a"] * 3 + ["b"] * 4, scale="batch"),
        group_advantages([1.0, 0.0], ["a", "b"]),
        rloo(equal, ["a"] * 7),
        rloo([1.0, 0.0], ["a", "b"]),
        reinforce_pp(equal),
        reinforce_pp([0.7]),
        running_mean_advantages(equal, ["a"] * 7, half_life=3.0),
    ):
        assert set(found) == {0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_rewards_are_refused(bad: float) -> None:
    message = f"reward 1 is {bad!r}; finite numbers"
    with pytest.raises(ValueError, match=message):
        group_advantages([1.0, bad], ["a", "a"])
    with pytest.raises(ValueError, match=message):
        rloo([1.0, bad], ["a", "a"])
    with pytest.raises(ValueError, match=message):
        reinforce_pp([1.0, bad])
    with pytest.raises(ValueError, match=message):
        running_mean_advantages([1.0, bad], ["a", "a"], half_life=2.0)


def test_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards and 1 groups; one for each reward is expected"):
        group_advantages([1.0, 0.0], ["a"])
    with pytest.raises(ValueError, match="2 rewards and 3 slices"):
        running_mean_advantages([1.0, 0.0], ["a"] * 3, half_life=2.0)
    with pytest.raises(ValueError, match="no rewards; at least one is expected"):
        rloo([], [])
    with pytest.raises(ValueError, match="no rewards"):
        reinforce_pp([])
    odd: Any = "std"
    with pytest.raises(ValueError, match="unknown scale 'std'; choose one of 'group', 'none', 'batch'"):
        group_advantages([1.0], ["a"], scale=odd)


@pytest.mark.parametrize("half_life", [0.0, -1.0, math.nan])
def test_bad_half_lives_are_refused(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life"):
        running_mean_advantages([1.0], ["a"], half_life=half_life)
