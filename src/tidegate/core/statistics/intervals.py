"""The score interval of a paired difference of proportions.

Source: Tango (1998), Equivalence test and confidence interval for the difference in proportions for the
paired-sample design, Statistics in Medicine 17, 891-908.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

_TOLERANCE = 1e-12  # far below any margin that a policy can mean


def tango_interval(b: float, c: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Two-sided confidence interval for (b - c) / n.

    The interval holds every difference that the score test with the constrained maximum-likelihood estimate
    of the nuisance parameter does not reject. It keeps its level where Wald intervals fail: few discordant
    pairs, or none.

    Args:
        b: pairs that only the first arm passes, >= 0. Of graded differences in [-1, 1] the sum of the positive ones:
            they vary no more than whole ones with the same sums, so that the interval is not too short.
        c: pairs that only the second arm passes, >= 0, or the sum of what the negative differences lose.
        n: all pairs, >= b + c.
        level: confidence in (0, 1); a one-sided test at a needs ``level = 1 - 2a``.

    Returns:
        Lower and upper end, both in [-1, 1]; (-1, 1) without any pair.

    Raises:
        ValueError: the counts or the level are impossible.
    """
    if min(b, c) < 0 or b + c > n:
        raise ValueError(f"b = {b!r}, c = {c!r}, n = {n!r}: b, c >= 0 and b + c <= n are accepted")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level = {level!r}; a confidence in (0, 1) is accepted")
    if n == 0:
        return -1.0, 1.0
    z = float(stats.norm.isf((1.0 - level) / 2.0))
    lower = _crossing(b, c, n, z) if b - c > -n else -1.0
    upper = -_crossing(c, b, n, z) if b - c < n else 1.0
    return lower, upper


def tango_lower_bound(b: float, c: float, n: int, alpha: float = 0.05) -> float:
    """One-sided lower confidence bound of (b - c) / n.

    Non-inferiority with margin m holds at level ``alpha`` when this exceeds -m.

    Args:
        b: pairs that only the first arm passes, or the sum of graded gains.
        c: pairs that only the second arm passes, or the sum of graded losses.
        n: all pairs.
        alpha: one-sided error in (0, 0.5).

    Raises:
        ValueError: the counts or the level are impossible.
    """
    return tango_interval(b, c, n, 1.0 - 2.0 * alpha)[0]


def tango_excludes_loss(
    b: ArrayLike, c: ArrayLike, n: ArrayLike, margin: float, alpha: float = 0.05
) -> NDArray[np.bool_]:
    """Whether ``tango_lower_bound(b, c, n, alpha) > -margin``, for many tables at once.

    The score statistic falls with the difference, so it is enough to look at it there instead of searching the bound.

    Args:
        b: pairs that only the first arm passes; ``b``, ``c`` and ``n`` broadcast.
        c: pairs that only the second arm passes.
        n: all pairs.
        margin: tolerated loss in (0, 1).
        alpha: one-sided error in (0, 0.5).

    Raises:
        ValueError: a value is outside its range.
    """
    first, second, pairs = (np.asarray(counts, dtype=np.float64) for counts in (b, c, n))
    if not (np.all(first >= 0) and np.all(second >= 0) and np.all(first + second <= pairs)):
        raise ValueError("a table is impossible; b, c >= 0 and b + c <= n are accepted")
    if not (0.0 < margin < 1.0 and 0.0 < alpha < 0.5):
        raise ValueError(f"margin = {margin!r}, alpha = {alpha!r}: margin in (0, 1), alpha in (0, 0.5) are accepted")
    return np.asarray(_score(first, second, pairs, -margin) > stats.norm.isf(alpha))


def _crossing(b: float, c: float, n: int, z: float) -> float:
    """The difference below the estimate at which the score statistic, which falls with it, is ``z``."""

    def excess(difference: float) -> float:
        return float(_score(b, c, n, difference)) - z

    return float(cast("float", optimize.brentq(excess, -1.0, (b - c) / n, xtol=_TOLERANCE)))


def _score(b: Any, c: Any, n: Any, difference: float) -> Any:
    """The score statistic for H0: p_b - p_c = ``difference``; huge where H0 makes the data impossible."""
    deviation = b - c - n * difference
    linear = (2 * n - b + c) * difference - b - c
    constant = -c * difference * (1.0 - difference)
    discriminant = np.maximum(linear * linear - 8.0 * n * constant, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        only_second = (np.sqrt(discriminant) - linear) / (4.0 * n)
        variance = n * (2.0 * only_second + difference * (1.0 - difference))
        score = np.where(variance > 0.0, deviation / np.sqrt(variance), np.copysign(1e300, deviation))
    return np.where(deviation == 0.0, 0.0, score)
