"""How broad a policy still is: what it can solve in k tries, and how many strategies it really uses."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

_SUM_TOLERANCE = 1e-6
_MATRIX_TOLERANCE = 1e-6  # similarities are often single-precision cosines


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


def vendi_score(similarity: ArrayLike) -> float:
    """Effective number of different answers: exp of the entropy of the eigenvalues of K / n.

    Args:
        similarity: (N, N) matrix K, symmetric and positive semi-definite, with ones on the diagonal.

    Returns:
        A number in [1, N]: 1 when all answers are alike, N when none resembles another.

    Raises:
        ValueError: not a similarity matrix.

    Source: Friedman and Dieng (2023), The Vendi score: a diversity evaluation metric for machine learning, section 3.
    """
    matrix = np.asarray(similarity, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0 or not np.all(np.isfinite(matrix)):
        raise ValueError(f"similarity of shape {matrix.shape!r}; a finite square matrix is accepted")
    if not np.allclose(matrix, matrix.T, rtol=0.0, atol=_MATRIX_TOLERANCE):
        raise ValueError("similarity is not symmetric; a matrix with K[i, j] = K[j, i] is accepted")
    if not np.allclose(np.diagonal(matrix), 1.0, rtol=0.0, atol=_MATRIX_TOLERANCE):
        raise ValueError("similarity has other values than 1 on its diagonal; divide each kernel value by the norms")
    eigenvalues = np.linalg.eigvalsh(matrix) / len(matrix)
    if eigenvalues[0] < -_MATRIX_TOLERANCE:
        raise ValueError(
            f"similarity has the eigenvalue {eigenvalues[0] * len(matrix):.3g}; only those >= 0 are accepted"
        )
    shares = np.clip(eigenvalues, 0.0, None)
    return effective_strategies(shares / shares.sum())


def distinct_n(sequences: Iterable[Sequence[Hashable]], n: int) -> float:
    """Share of different n-grams among all n-grams of some answers, distinct-n.

    Args:
        sequences: answers as sequences of tokens; n-grams do not cross from one answer into the next.
        n: length of an n-gram, >= 1.

    Returns:
        A number in (0, 1], 1 when no n-gram occurs twice; 0 when no answer has ``n`` tokens.

    Raises:
        ValueError: ``n`` is below 1.

    Source: Li et al. (2016), A diversity-promoting objective function for neural conversation models, section 4.
    """
    if n < 1:
        raise ValueError(f"n = {n!r}; a length >= 1 is accepted")
    seen: set[tuple[Hashable, ...]] = set()
    total = 0
    for sequence in sequences:
        grams = [tuple(sequence[start : start + n]) for start in range(len(sequence) - n + 1)]
        seen.update(grams)
        total += len(grams)
    return len(seen) / total if total else 0.0
