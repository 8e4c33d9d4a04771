"""From rewards to advantages: what an answer earned beyond a baseline. Plain numbers, no tensors.

Every function takes the rewards of a whole batch in one order and gives one advantage for each. The baseline never
depends on the answer's own reward in a way that would bias the direction of the policy gradient; dividing by a
standard deviation changes only the length of the step. Where nothing can be learned (all rewards of a group equal, a
group of one) the advantages are exactly 0; a trainer that finds no other must say so instead of taking a step that
changes nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean, stdev
from typing import Literal, get_args

Scale = Literal["group", "none", "batch"]

_STD_EPSILON = 1e-4
"""Added to standard deviations, as GRPO does: rewards that differ by rounding only are not blown up."""


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, scale: Scale = "group"
) -> tuple[float, ...]:
    """Rewards minus the mean of their group, divided by a standard deviation.

    ``group``: by (that of the group + 1e-4), GRPO; hard and easy prompts then weigh more than the ones between.
    ``none``: by nothing, Dr. GRPO; equal to :func:`rloo` up to the factor (K - 1) / K in groups of K.
    ``batch``: by (that of all rewards + 1e-4). Standard deviations are those of a sample, divided by K - 1.

    Args:
        rewards: finite numbers, at least one.
        groups: what each reward's group is called; equal for answers to the same prompt.
        scale: by what to divide.

    Returns:
        One number for each reward; they sum to 0 in each group. A group of one, and one of equal rewards, gets 0.

    Raises:
        ValueError: the lengths differ, a reward is not finite, there is none, or the scale is unknown.

    Source: Shao et al. (2024), DeepSeekMath, section 4.1.2; Liu et al. (2025), Understanding R1-Zero-like training.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"unknown scale {scale!r}; choose one of {', '.join(map(repr, get_args(Scale)))}")
    members = _members(rewards, groups, "groups")
    batch_std = _std(rewards)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        earned = [rewards[index] for index in indices]
        divisor = {"group": _std(earned) + _STD_EPSILON, "none": 1.0, "batch": batch_std + _STD_EPSILON}[scale]
        for index, centred in zip(indices, _centred(earned), strict=True):
            advantages[index] = centred / divisor
    return tuple(advantages)


def rloo(rewards: Sequence[float], groups: Sequence[Hashable]) -> tuple[float, ...]:
    """Leave-one-out: each reward minus the mean of the others in its group, ``K / (K - 1) (r - mean)``.

    The baseline is independent of the answer itself, so that the policy gradient with it is unbiased.

    Args:
        rewards: finite numbers, at least one.
        groups: what each reward's group is called; equal for answers to the same prompt.

    Returns:
        One number for each reward; they sum to 0 in each group. A group of one has no others and gets 0.

    Raises:
        ValueError: the lengths differ, a reward is not finite, or there is none.

    Source: Kool et al. (2019), Buy 4 REINFORCE samples, get a baseline for free; Ahmadian et al. (2024), Back to
    basics: revisiting REINFORCE-style optimization.
    """
    advantages = [0.0] * len(rewards)
    for indices in _members(rewards, groups, "groups").values():
        size = len(indices)
        for index, centred in zip(indices, _centred([rewards[i] for i in indices]), strict=True):
            advantages[index] = centred * size / (size - 1) if size > 1 else 0.0
    return tuple(advantages)


def reinforce_pp(rewards: Sequence[float]) -> tuple[float, ...]:
    """Rewards normalised over the whole batch, ``(r - mean) / (std + 1e-4)``, whatever prompts they belong to.

    Needs no groups, so it serves traffic with one answer a prompt; answers to easy prompts gain by it, those to hard
    ones lose. The standard deviation is that of a sample.

    Args:
        rewards: finite numbers, at least one.

    Returns:
        One number for each reward; they sum to 0. All are 0 when all rewards are equal, or for one reward.

    Raises:
        ValueError: a reward is not finite, or there is none.

    Source: Hu (2025), REINFORCE++, global advantage normalisation.
    """
    _refuse_rewards(rewards)
    divisor = _std(rewards) + _STD_EPSILON
    return tuple(centred / divisor for centred in _centred(rewards))


def running_mean_advantages(
    rewards: Sequence[float], slices: Sequence[Hashable], *, half_life: float
) -> tuple[float, ...]:
    """Rewards minus the exponentially weighted mean of the *earlier* rewards of their slice.

    ``r_i - sum_j<i w_j r_j / sum_j<i w_j`` with ``w_j = 2^(-n / half_life)`` for the reward that came n examples of
    the slice before the last earlier one. For traffic with one answer a prompt: slices differ in difficulty, and the
    baseline follows what the policy earns as it changes.

    Args:
        rewards: finite numbers in the order of time, at least one.
        slices: what each reward's slice is called.
        half_life: examples of a slice after which a reward weighs half, > 0; infinity gives the plain mean.

    Returns:
        One number for each reward. The first of a slice has no baseline and gets 0: it sets the baseline for the next.

    Raises:
        ValueError: the lengths differ, a reward is not finite, there is none, or ``half_life`` is not positive.

    Source: Williams (1992), reinforcement comparison; Sutton and Barto (2018), section 2.8.
    """
    if not half_life > 0:
        raise ValueError(f"half_life = {half_life!r}; a number of examples above 0 is accepted")
    advantages = [0.0] * len(rewards)
    kept = 2.0 ** (-1.0 / half_life)
    for indices in _members(rewards, slices, "slices").values():
        mean, weight = rewards[indices[0]], 1.0
        for index in indices[1:]:
            advantages[index] = rewards[index] - mean
            weight = kept * weight + 1.0
            mean += (rewards[index] - mean) / weight
    return tuple(advantages)


def _members(rewards: Sequence[float], names: Sequence[Hashable], what: str) -> dict[Hashable, list[int]]:
    """The places of each group's rewards."""
    _refuse_rewards(rewards)
    if len(names) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards and {len(names)} {what}; one for each reward is expected")
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        members[name].append(index)
    return members


def _refuse_rewards(rewards: Sequence[float]) -> None:
    if not rewards:
        raise ValueError("no rewards; at least one is expected")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward {index} is {reward!r}; finite numbers are accepted")


def _centred(rewards: Sequence[float]) -> list[float]:
    """Rewards minus their mean; exactly 0 where all are equal, which rounding of the mean could miss."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def _std(rewards: Sequence[float]) -> float:
    """Sample standard deviation; 0 for one reward."""
    return stdev(rewards) if len(rewards) > 1 else 0.0
