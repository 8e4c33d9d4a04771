"""How many pairs a decision needs, and what a number of pairs can show.

Source: Miettinen (1968) and Connor (1987), Sample size for testing differences in proportions for the
paired-sample design, Biometrics 43, 207-211.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from scipy import optimize, stats

_UNSEEN = 1e-12  # probability on either side that a sum over counts leaves out
_EXACT_UP_TO = 1_000_000  # pairs


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


def sign_test_power(pairs: int, discordance: float, gain: float, level: float) -> float:
    """Chance that the exact sign test shows a gain; a little below the formula's, because wins are whole numbers.

    Args:
        pairs: n, >= 1.
        discordance: d, share of pairs on which the arms differ, in (0, 1].
        gain: g, true difference of the success rates, in [-d, d].
        level: one-sided level of the test, in (0, 1).

    Returns:
        The sum over D ~ Bin(n, d) of P(W is significant | D), where W ~ Bin(D, (1 + g / d) / 2).

    Raises:
        ValueError: a value is outside its range.
    """
    if pairs < 1 or not 0.0 < level < 1.0:
        raise ValueError(f"pairs = {pairs!r}, level = {level!r}: pairs >= 1, level in (0, 1) are accepted")
    if not 0.0 < discordance <= 1.0 or abs(gain) > discordance:
        raise ValueError(f"gain = {gain!r}, discordance = {discordance!r}: |gain| <= discordance in (0, 1] is accepted")
    fewest, most = stats.binom.ppf([_UNSEEN, 1.0 - _UNSEEN], pairs, discordance).astype(np.int64)
    differing = np.arange(fewest, most + 1)
    least_wins = stats.binom.isf(level, differing, 0.5) + 1.0  # the fewest W with P(Bin(D, 1/2) >= W) <= level
    shown = stats.binom.sf(least_wins - 1.0, differing, (1.0 + gain / discordance) / 2.0)
    return float(np.sum(stats.binom.pmf(differing, pairs, discordance) * shown))


def exact_pairs(discordance: float, gain: float, level: float, power: float = 0.8) -> int:
    """Pairs that the exact sign test needs; arguments and errors as :func:`required_pairs`.

    Found by halving between the formula's number and more: power rises with the pairs, up to steps far below what a
    plan can tell. From a million pairs on it is the formula's number, by then right to one part in a thousand.
    """
    fewest = most = required_pairs(discordance, gain, level, power)
    if fewest > _EXACT_UP_TO:
        return fewest
    while sign_test_power(most, discordance, gain, level) < power:
        fewest, most = most, most + max(most // 8, 8)
    while most - fewest > 1:
        middle = (fewest + most) // 2
        if sign_test_power(middle, discordance, gain, level) < power:
            fewest = middle
        else:
            most = middle
    return most


def _pairs(discordance: float, gain: float, level: float, power: float) -> float:
    z_level, z_power = float(stats.norm.isf(level)), float(stats.norm.ppf(power))
    spread = z_level * math.sqrt(discordance) + z_power * math.sqrt(discordance - gain * gain)
    return (spread / gain) ** 2
