"""How many pairs a decision needs, and what a number of pairs can show.

Source: Miettinen (1968) and Connor (1987), Sample size for testing differences in proportions for the
paired-sample design, Biometrics 43, 207-211.
"""

from __future__ import annotations

import math
from typing import cast

from scipy import optimize, stats


def required_pairs(discordance: float, gain: float, level: float, power: float = 0.8) -> int:
    """Pairs for a one-sided paired test, (z_level sqrt(d) + z_power sqrt(d - g^2))^2 / g^2.

    Args:
        discordance: d, share of pairs on which the arms differ, in (0, 1].
        gain: g, true difference of the success rates, in (0, d].
        level: one-sided level of the test, in (0, 0.5].
        power: wanted chance to see the gain, in [0.5, 1).

    Returns:
        The number of pairs, rounded up.

    Raises:
        ValueError: a value is outside its range.
    """
    if not (0.0 < gain <= discordance <= 1.0):
        raise ValueError(f"gain = {gain!r}, discordance = {discordance!r}: 0 < gain <= discordance <= 1 is accepted")
    if not (0.0 < level <= 0.5 <= power < 1.0):
        raise ValueError(f"level = {level!r}, power = {power!r}: 0 < level <= 0.5 <= power < 1 is accepted")
    return math.ceil(_pairs(discordance, gain, level, power))


def detectable_gain(pairs: int, discordance: float, level: float, power: float = 0.8) -> float | None:
    """Smallest true gain that ``pairs`` pairs show with the given power; None when even d itself is too small.

    Args:
        pairs: pairs at hand, >= 1.
        discordance: d in (0, 1].
        level: one-sided level of the test, in (0, 0.5].
        power: wanted chance to see the gain, in [0.5, 1).

    Raises:
        ValueError: a value is outside its range.
    """
    if pairs < 1:
        raise ValueError(f"pairs = {pairs!r}; a number >= 1 is accepted")
    if required_pairs(discordance, discordance, level, power) > pairs:
        return None
    smallest = discordance * 1e-6
    if _pairs(discordance, smallest, level, power) <= pairs:
        return smallest

    def excess(gain: float) -> float:
        return _pairs(discordance, gain, level, power) - pairs

    return float(cast("float", optimize.brentq(excess, smallest, discordance)))


def _pairs(discordance: float, gain: float, level: float, power: float) -> float:
    z_level, z_power = float(stats.norm.isf(level)), float(stats.norm.ppf(power))
    spread = z_level * math.sqrt(discordance) + z_power * math.sqrt(discordance - gain * gain)
    return (spread / gain) ** 2
