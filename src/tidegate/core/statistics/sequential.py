"""Evidence that may be read after every pair: the canary's two processes and the detector of the steady state.

A pair compares one unit of each arm that met the same kind of traffic: d in [-1, 1] is the challenger's outcome minus
the champion's. Each process multiplies the results of bets on d that are fair or worse under a null hypothesis, so it
is a non-negative (super)martingale there and peeking costs nothing (Ville 1939). All of it rests on E[d | past] lying
in the null for *every* past: a user who gives several units to one arm breaks that, because the first unit tells about
the next.

Every function takes time along the last axis and any number of streams before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryEvidence:
    """Evidence about a challenger on live traffic, both >= 0 and 1 before the first pair.

    ``k_plus`` speaks against "the challenger loses the margin or more", ``k_minus`` against "the challenger does not
    lose". P(ever k >= c) <= 1 / c under the respective null. Numbers, or arrays of one number for each stream or pair;
    infinity where the largest double is passed.
    """

    k_plus: Any
    k_minus: Any


def canary_evidence(differences: ArrayLike, margin: float, bets: Sequence[float]) -> CanaryEvidence:
    """The evidence after all pairs.

    K+ is the mean over bets g of prod(1 + g (d + m) / (1 - m)), K- that of prod(1 - g d).

    Args:
        differences: (..., T) d of each pair in order of time, in [-1, 1].
        margin: m in [0, 1), the loss that a challenger must not have.
        bets: g, at least one, each in (0, 1).

    Returns:
        Evidence of shape (...); plain floats for one stream.

    Raises:
        ValueError: a value is outside its range.

    Source: Waudby-Smith and Ramdas (2024), Estimating means of bounded random variables by betting, JRSS B 86, 1-27.
    """
    d, g = _checked(differences, margin, bets)
    up, down = (logs.sum(axis=-2) for logs in _canary_logs(d, margin, g))
    return CanaryEvidence(k_plus=_mean_of_exp(up), k_minus=_mean_of_exp(down))


_MEAN_BETS = (0.05, 0.1, 0.2, 0.4, 0.7)


def betting_p_value(differences: ArrayLike, counts: ArrayLike | None = None) -> Any:
    """One-sided test of "the mean difference is above 0" that needs no symmetry: 1 over the evidence K+ without margin.

    Valid for every distribution on [-1, 1] with mean 0 or less, also where many small gains pay for few large losses,
    which is where the sign-flip test is not. It asks for more evidence in return.

    Args:
        differences: (V,) values in [-1, 1].
        counts: (..., V) how often each value occurs; once each by default.

    Returns:
        p in (0, 1], of shape (...); a plain float for one set of differences.

    Raises:
        ValueError: a value is outside its range.

    Source: Waudby-Smith and Ramdas (2024), as :func:`canary_evidence`; Markov's inequality makes it a p-value.
    """
    values, bets = _checked(differences, 0.0, _MEAN_BETS)
    often = np.ones(values.shape) if counts is None else np.asarray(counts, dtype=np.float64)
    logs = often @ np.log1p(values[:, None] * bets)
    evidence = np.logaddexp.reduce(logs, axis=-1) - math.log(len(bets))
    p = np.exp(-np.maximum(evidence, 0.0))
    return float(p) if np.ndim(p) == 0 else p


def canary_paths(differences: ArrayLike, margin: float, bets: Sequence[float]) -> CanaryEvidence:
    """The evidence after each pair, of shape (..., T); arguments and errors as :func:`canary_evidence`."""
    d, g = _checked(differences, margin, bets)
    up, down = (logs.cumsum(axis=-2) for logs in _canary_logs(d, margin, g))
    return CanaryEvidence(k_plus=_mean_of_exp(up), k_minus=_mean_of_exp(down))


@dataclass(frozen=True, slots=True, kw_only=True)
class EDetector:
    """Shiryaev-Roberts e-detector: has the champion become worse than the release before it by more than the margin?

    One process for each bet g, M_t = (M_{t-1} + 1) (1 - g (d + m) / (1 + m)), started anew at every pair and summed, so
    that a loss is found whenever it begins. While E[d | past] >= -m the mean number of pairs to a false alarm is at
    least ``alarm_at``.

    ``margin`` m in [0, 1); ``bets`` in (0, 1), at least one; ``alarm_at`` > 1; ``processes`` the M_t, one for each bet
    and 0 before the first pair.

    Raises:
        ValueError: a value is outside its range.

    Source: Shin, Ramdas and Rinaldo (2024), E-detectors: a nonparametric framework for sequential change detection.
    """

    margin: float
    bets: tuple[float, ...]
    alarm_at: float
    processes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse states that no sequence of pairs leads to."""
        _checked(0.0, self.margin, self.bets)
        if not self.alarm_at > 1.0:
            raise ValueError(f"alarm_at = {self.alarm_at!r}; a number above 1 is accepted")
        if not self.processes:
            object.__setattr__(self, "processes", (0.0,) * len(self.bets))
        if len(self.processes) != len(self.bets) or not all(process >= 0.0 for process in self.processes):
            raise ValueError(f"processes = {self.processes!r}; {len(self.bets)} numbers >= 0, one a bet, are accepted")

    @property
    def value(self) -> float:
        """M_t, averaged over the bets."""
        return sum(self.processes) / len(self.processes)

    @property
    def alarm(self) -> bool:
        """Whether M_t has reached ``alarm_at``."""
        return self.value >= self.alarm_at

    def update(self, difference: float) -> Self:
        """The detector after one more pair, d in [-1, 1].

        Raises:
            ValueError: the difference is outside its range.
        """
        processes = detector_paths([difference], self.margin, self.bets, start=self.processes)[..., -1, :]
        return replace(self, processes=tuple(processes.tolist()))

    def run(self, differences: ArrayLike) -> Floats:
        """M_t after each of the pairs (..., T), averaged over the bets, beginning at the present state.

        Raises:
            ValueError: a difference is outside its range.
        """
        return detector_paths(differences, self.margin, self.bets, start=self.processes).mean(axis=-1)


def detector_paths(differences: ArrayLike, margin: float, bets: Sequence[float], *, start: ArrayLike = 0.0) -> Floats:
    """M_t of each bet after each pair, so that a long stream can be run in pieces.

    Args:
        differences: (..., T) d in [-1, 1].
        margin: m in [0, 1).
        bets: G numbers in (0, 1).
        start: the processes before the first pair, broadcast to (..., G).

    Returns:
        Processes of shape (..., T, G); the last of them is the ``start`` of the next piece.

    Raises:
        ValueError: a value is outside its range.
    """
    d, g = _checked(differences, margin, bets)
    with np.errstate(over="ignore"):
        paths = 1.0 - g * ((d[..., np.newaxis] + margin) / (1.0 + margin))
        state: Floats = np.broadcast_to(np.asarray(start, dtype=np.float64), (*d.shape[:-1], g.size))
        for time in range(d.shape[-1]):
            paths[..., time, :] *= state + 1.0
            state = paths[..., time, :]
    return paths


def _canary_logs(d: Floats, margin: float, g: Floats) -> tuple[Floats, Floats]:
    """Log results of each bet on each pair, (..., T, G), for K+ and for K-."""
    columns = d[..., np.newaxis]
    return np.log1p(g * ((columns + margin) / (1.0 - margin))), np.log1p(-g * columns)


def _mean_of_exp(logs: Floats) -> float | Floats:
    with np.errstate(over="ignore"):
        values = np.exp(logs).mean(axis=-1)
    return float(values) if np.ndim(values) == 0 else values


def _checked(differences: ArrayLike, margin: float, bets: Sequence[float]) -> tuple[Floats, Floats]:
    d, g = np.asarray(differences, dtype=np.float64), np.asarray(bets, dtype=np.float64)
    if not np.all(np.abs(d) <= 1.0):
        raise ValueError("differences hold a number outside [-1, 1]; challenger's minus champion's outcome is accepted")
    if not 0.0 <= margin < 1.0:
        raise ValueError(f"margin = {margin!r}; a number in [0, 1) is accepted")
    if g.ndim != 1 or g.size == 0 or not np.all((g > 0.0) & (g < 1.0)):
        raise ValueError(f"bets = {list(bets)!r}; at least one number in (0, 1) is accepted")
    return d, g
