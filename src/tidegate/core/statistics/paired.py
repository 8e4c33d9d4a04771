"""Tests of paired binary outcomes: only the pairs on which the two arms differ carry evidence.

A *win* is a task that the challenger passes and the champion fails, a *loss* the other way round. Given the
number of discordant pairs, wins are Bin(W + L, 1/2) when both arms are equally good. Both functions take
scalars or arrays that broadcast.
"""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats = NDArray[np.float64]


@overload
def sign_test(wins: int, losses: int) -> float: ...
@overload
def sign_test(wins: ArrayLike, losses: ArrayLike) -> float | Floats: ...
def sign_test(wins: ArrayLike, losses: ArrayLike) -> float | Floats:
    """Exact one-sided sign test, P(Bin(W + L, 1/2) >= W).

    Args:
        wins: W >= 0, pairs that only the challenger passes.
        losses: L >= 0, pairs that only the champion passes.

    Returns:
        The p-value in (0, 1]; 1 when no pair is discordant.

    Raises:
        ValueError: a count is negative or no whole number.

    Source: Dixon and Mood (1946), The statistical sign test; conditional form of McNemar (1947).
    """
    won, lost = _counts(wins, losses)
    return _scalar_or_array(stats.binom.sf(won - 1, won + lost, 0.5))


@overload
def paired_e_value(wins: int, losses: int) -> float: ...
@overload
def paired_e_value(wins: ArrayLike, losses: ArrayLike) -> float | Floats: ...
def paired_e_value(wins: ArrayLike, losses: ArrayLike) -> float | Floats:
    """Evidence for the challenger that may be read after every pair.

    The mixture likelihood ratio of win probability q uniform on (1/2, 1) against 1/2:
    e = 2^(W+L+1) B(W+1, L+1) P(Beta(W+1, L+1) > 1/2). A non-negative martingale of expectation 1 when
    q = 1/2 and a supermartingale below, so P(ever e >= 1/a) <= a.

    Args:
        wins: W >= 0.
        losses: L >= 0.

    Returns:
        The e-value >= 0; infinity where it exceeds the largest double.

    Raises:
        ValueError: a count is negative or no whole number.

    Source: Ville (1939); Robbins (1970), Statistical methods related to the law of the iterated logarithm.
    """
    won, lost = _counts(wins, losses)
    with np.errstate(over="ignore", divide="ignore"):
        upper_tail = np.log(special.betaincc(won + 1, lost + 1, 0.5))
        logarithm = (won + lost + 1) * np.log(2.0) + special.betaln(won + 1, lost + 1) + upper_tail
        return _scalar_or_array(np.exp(logarithm))


def _counts(wins: ArrayLike, losses: ArrayLike) -> tuple[Floats, Floats]:
    won, lost = np.asarray(wins, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    for name, counts in (("wins", won), ("losses", lost)):
        if not np.all(np.isfinite(counts)) or np.any(counts < 0) or np.any(counts != np.floor(counts)):
            raise ValueError(f"{name} is {counts.tolist()!r}; whole numbers >= 0 are accepted")
    return won, lost


def _scalar_or_array(values: Floats) -> float | Floats:
    return float(values) if np.ndim(values) == 0 else values
