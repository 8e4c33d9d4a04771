"""The bandit lab: advantages, the clip, what each setting reaches, and values that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidegate.core.errors import ConfigError
from tidegate.lab.bandit import NOISE_STD, TRUE_REWARDS, BanditOptions, advantages, condensed, run_bandit

REWARDS = (0.2, 0.5, 0.75, 0.92)
SEEDS = range(20)


def reached(**options: Any) -> list[float]:
    """Probability of the best arm after the last step, in rising order over the seeds."""
    return sorted(run_bandit(BanditOptions(seed=seed, **options))[-1].best_arm_probability for seed in SEEDS)


def test_advantages_by_hand() -> None:
    assert advantages(REWARDS, BanditOptions()) == (-0.393, -0.093, 0.157, 0.328)
    exact = advantages(REWARDS, BanditOptions(rounded=False))
    assert exact == pytest.approx((-0.3925, -0.0925, 0.1575, 0.3275))
    scaled = advantages([1.0, 0, 0, 1, 0, 0, 0, 0], BanditOptions(scale="group", rounded=False))
    assert scaled == pytest.approx([1.619835 if place in (0, 3) else -0.539945 for place in range(8)], abs=1e-6)
    assert advantages(REWARDS, BanditOptions(baseline="none")) == REWARDS
    assert advantages([0.5] * 4, BanditOptions(scale="group")) == (0.0,) * 4


def test_the_same_options_give_the_same_figures_and_another_seed_others() -> None:
    assert run_bandit(BanditOptions(steps=20)) == run_bandit(BanditOptions(steps=20))
    assert run_bandit(BanditOptions(steps=20)) != run_bandit(BanditOptions(steps=20, seed=1))


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    assert run_bandit(BanditOptions(steps=30))[:12] == run_bandit(BanditOptions(steps=12))


def test_the_average_is_that_of_the_last_ten_figures_shown() -> None:
    steps = run_bandit(BanditOptions(steps=25, seed=7))
    for number, step in enumerate(steps, 1):
        shown = [earlier.mean_reward for earlier in steps[max(0, number - 10) : number]]
        assert step.reward_average == round(float(np.mean(shown)), 3)


def test_a_large_step_is_clipped_and_a_wider_range_clips_less() -> None:
    narrow, wide = (run_bandit(BanditOptions(lr=5.0, eps=eps)) for eps in (0.05, 0.6))
    assert sum(step.clip_fraction for step in narrow) > sum(step.clip_fraction for step in wide) > 0.0
    assert all(0.0 <= step.clip_fraction < 1.0 for step in narrow)  # the first sample of a group has ratio 1
    assert narrow[-1].best_arm_probability != wide[-1].best_arm_probability


def test_ratios_count_as_clipped_on_both_sides_of_the_range() -> None:
    """An independent walk through the first step's samples."""
    options = BanditOptions(steps=1, lr=5.0, eps=0.05, group_size=8, seed=3)
    noise, draws = np.random.default_rng(3), np.random.default_rng(3)
    arms = [draws.choice(4, p=[0.25] * 4) for _ in range(8)]
    rewards = [min(1.0, max(0.0, TRUE_REWARDS[arm] + noise.normal(0.0, NOISE_STD))) for arm in arms]
    logits, low, high = np.zeros(4), 0, 0
    for arm, reward in zip(arms, rewards, strict=True):
        now = np.exp(logits) / np.exp(logits).sum()
        ratio, advantage = now[arm] / 0.25, round(reward - sum(rewards) / 8, 3)
        low, high = low + (ratio < 0.95), high + (ratio > 1.05)
        logits += 5.0 * min(ratio * advantage, float(np.clip(ratio, 0.95, 1.05)) * advantage) * (np.eye(4)[arm] - now)
    (step,) = run_bandit(options)
    assert min(low, high) >= 1
    assert step.clip_fraction == round((low + high) / 8, 2)
    assert step.best_arm_probability == round(float(np.exp(logits)[3] / np.exp(logits).sum()), 3)


def test_the_reference_settings_do_not_reach_near_one_and_others_do() -> None:
    """The figures of the documentation, over 20 seeds."""
    reference = reached()
    assert (reference[0], float(np.median(reference)), reference[-1]) == pytest.approx((0.864, 0.911, 0.933), abs=6e-4)
    assert reached(scale="group")[0] >= 0.98
    assert reached(lr=1.0)[0] >= 0.975
    assert reached(scale="group", steps=300)[0] >= 0.995


def test_without_a_baseline_a_run_may_settle_on_a_wrong_arm() -> None:
    """Every reward is positive, so that any arm that is drawn is drawn more often after."""
    assert reached(baseline="none")[0] < 0.25


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed = -1; a number >= 0"),
        ({"steps": 0}, "steps = 0; a number >= 1"),
        ({"group_size": 1}, "group_size = 1; a number >= 2"),
        ({"lr": 0.0}, r"lr = 0.0; a number in \(0, 100\]"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"lr": 1e9}, "lr = 1000000000.0"),
        ({"eps": 1.0}, r"eps = 1.0; a number in \(0, 1\)"),
        ({"baseline": "none", "scale": "group"}, "give it baseline = 'mean'"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BanditOptions(**options)


@pytest.mark.parametrize("lr", [1e-6, 100.0])
def test_the_ends_of_the_range_stay_finite(lr: float) -> None:
    steps = run_bandit(BanditOptions(lr=lr, scale="group", rounded=False, eps=0.99, group_size=16))
    assert all(0.0 <= step.best_arm_probability <= 1.0 for step in steps)


def test_a_table_shows_first_last_and_every_tenth() -> None:
    assert [step.step for step in condensed(run_bandit(BanditOptions(steps=25)))] == [1, *range(2, 25, 2), 25]
    assert [step.step for step in condensed(run_bandit(BanditOptions(steps=3)))] == [1, 2, 3]
    assert [step.step for step in condensed(run_bandit(BanditOptions(steps=40)), rows=4)] == [1, 10, 20, 30, 40]
