"""GRPO on a bandit with four arms: the whole update of a policy, small enough to be followed by hand.

Each step draws a group of K arms from the policy as it stands, rewards them, turns rewards into advantages, and moves
the logits z once for each sample in order: z += lr * min(rho A, clip(rho, 1 - eps, 1 + eps) A) * (onehot - p), where p
are the probabilities now and rho is that of the arm divided by what it was when the step began.

The factor is the clipped surrogate itself, as in the reference implementation that this reproduces; the gradient of
the surrogate would be 0 where the clip is active and rho A elsewhere. With the settings of the reference no ratio
leaves the clip range, so the two agree.

Sources: Shao et al. (2024), DeepSeekMath, section 4.1 (GRPO); Schulman et al. (2017), equation 7 (the clip).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tidegate.core.errors import ConfigError
from tidegate.core.objectives.advantages import group_advantages
from tidegate.lab.agent import Array, softmax

Baseline: TypeAlias = Literal["mean", "none"]
Scale: TypeAlias = Literal["group", "none"]

TRUE_REWARDS = (0.20, 0.50, 0.75, 0.92)
NOISE_STD = 0.04
BEST_ARM = 3
_AVERAGED = 10  # steps of the moving average
_DECIMALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BanditOptions:
    """How to run; the defaults are those of the reference.

    ``baseline``: what is subtracted from a reward, the mean of its group or nothing. ``scale``: what the difference is
    divided by, the group's standard deviation or nothing, as in
    :func:`~tidegate.core.objectives.advantages.group_advantages`. ``rounded``: to three decimals, the advantages.

    Raises:
        ConfigError: a value is out of range; accepted are ``seed`` >= 0, ``steps`` >= 1, ``group_size`` >= 2, ``lr`` in
            (0, 100], ``eps`` in (0, 1), and ``scale`` "group" with a baseline only.
    """

    seed: int = 42
    steps: int = 100
    group_size: int = 4
    lr: float = 0.15
    eps: float = 0.2
    baseline: Baseline = "mean"
    scale: Scale = "none"
    rounded: bool = True

    def __post_init__(self) -> None:
        """Out of range there is nothing to see: no step, no group, or logits that overflow."""
        ranges = {
            "seed": (self.seed >= 0, "a number >= 0"),
            "steps": (self.steps >= 1, "a number >= 1"),
            "group_size": (self.group_size >= 2, "a number >= 2"),
            "lr": (0.0 < self.lr <= 100.0, "a number in (0, 100]"),
            "eps": (0.0 < self.eps < 1.0, "a number in (0, 1)"),
        }
        for name, (holds, accepted) in ranges.items():
            if not holds:
                raise ConfigError(f"bandit: {name} = {getattr(self, name)!r}; {accepted} is accepted")
        if self.baseline == "none" and self.scale == "group":
            raise ConfigError("bandit: scale = 'group' divides what a baseline leaves; give it baseline = 'mean'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step showed, rounded to three decimals (``clip_fraction`` to two).

    ``step`` counts from 1. ``mean_reward`` is that of the group, ``reward_average`` the mean of the last ten
    ``mean_reward`` as they are shown. ``best_arm_probability`` is that after the step. ``clip_fraction``: share of
    samples whose ratio lay outside the clip range when their turn came.
    """

    step: int
    mean_reward: float
    best_arm_probability: float
    clip_fraction: float
    reward_average: float


def run_bandit(options: BanditOptions) -> tuple[Step, ...]:
    """Run all steps; the same options give the same figures.

    Noise and draws come from two generators with the same seed.
    """
    noise, draws = (np.random.default_rng(options.seed) for _ in range(2))
    logits: Array = np.zeros(len(TRUE_REWARDS))
    steps: list[Step] = []
    for number in range(1, options.steps + 1):
        begin = softmax(logits)
        arms = [int(draws.choice(len(begin), p=begin)) for _ in range(options.group_size)]
        rewards = [_reward(arm, noise) for arm in arms]
        clipped = 0
        for arm, advantage in zip(arms, advantages(rewards, options), strict=True):
            logits, outside = _moved(logits, arm, advantage, float(begin[arm]), options)
            clipped += outside
        means = [*(step.mean_reward for step in steps[1 - _AVERAGED :]), round(float(np.mean(rewards)), _DECIMALS)]
        steps.append(
            Step(
                step=number,
                mean_reward=means[-1],
                best_arm_probability=round(float(softmax(logits)[BEST_ARM]), _DECIMALS),
                clip_fraction=round(clipped / options.group_size, 2),
                reward_average=round(float(np.mean(means)), _DECIMALS),
            )
        )
    return tuple(steps)


def advantages(rewards: Sequence[float], options: BanditOptions) -> tuple[float, ...]:
    """Advantages of one group of rewards, in the same order."""
    centred = options.baseline == "mean"
    values = group_advantages(rewards, ["group"] * len(rewards), scale=options.scale) if centred else tuple(rewards)
    return tuple(round(value, _DECIMALS) for value in values) if options.rounded else values


def condensed(steps: Sequence[Step], rows: int = 10) -> Iterator[Step]:
    """About ``rows`` steps at equal distances for a table, and the first and the last one."""
    every = max(1, len(steps) // rows)
    return (step for step in steps if step.step in (1, len(steps)) or step.step % every == 0)


def _reward(arm: int, noise: np.random.Generator) -> float:
    return float(np.clip(TRUE_REWARDS[arm] + noise.normal(0.0, NOISE_STD), 0.0, 1.0))


def _moved(logits: Array, arm: int, advantage: float, begin: float, options: BanditOptions) -> tuple[Array, bool]:
    """Logits after one sample, and whether its ratio was outside the clip range."""
    probabilities = softmax(logits)
    ratio = float(probabilities[arm]) / begin
    limited = min(max(ratio, 1.0 - options.eps), 1.0 + options.eps)
    surrogate = min(ratio * advantage, limited * advantage)
    return logits + options.lr * surrogate * (np.eye(len(logits))[arm] - probabilities), ratio != limited
