"""How broad a policy still is: what it can solve in k tries, and how many strategies it really uses."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

_SUM_TOLERANCE = 1e-6


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` samples passes, 1 - C(n - c, k) / C(n, k).

    Args:
        n: samples drawn, >= 1.
        c: samples that pass, 0 <= c <= n.
        k: samples allowed, 1 <= k <= n.

    Raises:
        ValueError: the counts are impossible.

    Source: Chen et al. (2021), Evaluating large language models trained on code, equation 1.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n = {n!r}, c = {c!r}, k = {k!r}: 0 <= c <= n and 1 <= k <= n are accepted")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def effective_strategies(probabilities: ArrayLike) -> float:
    """Effective number of strategies: exp of the Shannon entropy (natural logarithm).

    Args:
        probabilities: (S,) share of answers that use each strategy, >= 0, sum 1.

    Returns:
        A number in [1, S]: 1 when one strategy does all, S when all are used equally.

    Raises:
        ValueError: not a vector of probabilities.

    Source: Hill (1973), Diversity and evenness, number of order 1.
    """
    shares = np.asarray(probabilities, dtype=np.float64)
    if shares.ndim != 1 or shares.size == 0 or not np.all(shares >= 0) or abs(shares.sum() - 1.0) > _SUM_TOLERANCE:
        raise ValueError(f"probabilities = {shares.tolist()!r}; a vector of numbers >= 0 with sum 1 is accepted")
    used = shares[shares > 0]
    return float(np.exp(-np.sum(used * np.log(used))))
