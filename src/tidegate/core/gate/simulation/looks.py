"""Streams of challengers: how a set of users answers to each of them.

Every generator returns windows of looks whose true gains are known. Success rates are differences of shares, 0.03 is
three percentage points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PAIRS = 2_000
DISCORDANCE = 0.14
_GRADES = np.array([0.25, 0.5, 0.75, 1.0])
_SMALL, _SMALL_SHARE = 0.25, 0.8  # size of a small win, and the share of the discordant units that are one
_SIBLING_SHARE = 0.5  # of a challenger's answers that are those of the challengers before it on the same set
_USERS = 200  # of unequal traffic behind the 2,000 units of a set
_TRAFFIC_SIGMA = 1.0  # of the logarithm of a user's traffic: the busiest tenth brings two fifths of it
_TASTE = 0.5  # how far a user's discordant units lean to one side: 7 points of success at 14 % discordance


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Outcomes of S windows of H looks.

    ``gains`` (S, H): true difference of the success rates. ``counts`` (S, H, C): units whose difference, challenger
    minus champion, is ``values`` (C,). Each look has ``PAIRS`` units.
    """

    gains: Floats
    values: Floats
    counts: Ints

    @property
    def means(self) -> Floats:
        """Observed difference of each look, (S, H)."""
        return self.counts @ self.values / PAIRS


Generator: TypeAlias = Callable[[Floats, np.random.Generator], Looks]

MIXED: tuple[tuple[float, float], ...] = ((-0.01, 0.5), (0.0, 0.25), (0.03, 0.25))
"""Challengers of an ordinary stream: (true gain, share)."""


def mixed_gains(shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """True gains drawn from ``MIXED``."""
    gains, shares = zip(*MIXED, strict=True)
    return rng.choice(np.array(gains), size=shape, p=shares)


def independent(gains: Floats, rng: np.random.Generator) -> Looks:
    """A fresh set for every look, passed or failed."""
    return _passed_or_failed(gains, *_win_loss(rng.binomial(PAIRS, DISCORDANCE, gains.shape), gains, rng))


def graded(gains: Floats, rng: np.random.Generator) -> Looks:
    """Rewards in quarters: where the arms differ, each size is as likely as another."""
    lean = gains / (DISCORDANCE * _GRADES.mean())
    each = DISCORDANCE / (2 * _GRADES.size)
    sides = [np.broadcast_to((each * (1 + sign * lean))[..., None], (*gains.shape, _GRADES.size)) for sign in (1, -1)]
    shares = np.concatenate([*sides, np.full((*gains.shape, 1), 1.0 - DISCORDANCE)], axis=-1)
    values = np.concatenate([_GRADES, -_GRADES, [0.0]])
    return Looks(gains=gains, values=values, counts=rng.multinomial(PAIRS, shares))


def skewed(gains: Floats, rng: np.random.Generator) -> Looks:
    """Graded rewards where four small wins pay for one whole loss: without a gain the mean is zero, but not symmetric.

    A gain makes the wins more and the losses fewer, so that the share of discordant units moves with it.
    """
    lean = gains / (2 * _SMALL * _SMALL_SHARE * DISCORDANCE)
    small = _SMALL_SHARE * DISCORDANCE * (1 + lean)
    large = _SMALL * _SMALL_SHARE * DISCORDANCE * (1 - lean)
    shares = np.stack([small, large, 1.0 - small - large], axis=-1)
    return Looks(gains=gains, values=np.array([_SMALL, -1.0, 0.0]), counts=rng.multinomial(PAIRS, shares))


def shared_sets(gains: Floats, rng: np.random.Generator, *, looks_per_set: int = 5) -> Looks:
    """Looks at one sealed set share its tasks, the champion's answers and half of the challengers' answers.

    A set is not replaced at a promotion, so that more is shared than the gate allows.
    """
    windows, looks = gains.shape
    wins, losses = np.empty((windows, looks), dtype=np.int64), np.empty((windows, looks), dtype=np.int64)
    size = (windows, PAIRS)
    rate, champion, sibling = np.empty(size), np.empty(size, dtype=bool), np.empty(size)
    for look in range(looks):
        if look % looks_per_set == 0:
            rate = task_rates(size, rng)
            champion, sibling = rng.random(size) < rate, rng.random(size)
        draws = np.where(rng.random(size) < _SIBLING_SHARE, sibling, rng.random(size))
        challenger = draws < shifted(rate, gains[:, look])
        wins[:, look] = (challenger & ~champion).sum(axis=-1)
        losses[:, look] = (champion & ~challenger).sum(axis=-1)
    return _passed_or_failed(gains, wins, losses)


def unequal_traffic(gains: Floats, rng: np.random.Generator, *, one_unit: bool) -> Looks:
    """Users who differ in taste and in traffic; a set holds one unit of each user, or all units of fewer users."""
    windows, looks = gains.shape
    wins, losses = np.empty((windows, looks), dtype=np.int64), np.empty((windows, looks), dtype=np.int64)
    users = PAIRS if one_unit else _USERS
    for look in range(looks):
        taste = rng.choice([-_TASTE, _TASTE], (windows, users))
        if one_unit:
            units = np.ones((windows, users), dtype=np.int64)
        else:
            traffic = rng.lognormal(0.0, _TRAFFIC_SIGMA, (windows, users))
            units = rng.multinomial(PAIRS, traffic / traffic.sum(axis=-1, keepdims=True))
        differing = rng.binomial(units, DISCORDANCE)
        lean = taste + gains[:, look, None] / DISCORDANCE
        won = rng.binomial(differing, (1 + lean) / 2)
        wins[:, look], losses[:, look] = won.sum(axis=-1), (differing - won).sum(axis=-1)
    return _passed_or_failed(gains, wins, losses)


def task_rates(shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Chance that the champion passes each task: mean one half, and two independent answers differ on 14 % of tasks."""
    return rng.beta(_concentration(), _concentration(), shape)


def shifted(rates: Floats, gains: Floats) -> Floats:
    """Chances of tasks (S, N) for an arm that is better by ``gains`` (S,): one shift of all log odds.

    Tasks that are always passed or always failed stay so, and about as many tasks differ between two arms as before.
    """
    shifts, means = _shifts()
    odds = np.exp(-np.interp(gains, means, shifts))[:, None]
    return rates / (rates + (1.0 - rates) * odds)


@cache
def _shifts() -> tuple[Floats, Floats]:
    """Shifts of the log odds, and the gain in mean success that each of them brings over the tasks' distribution."""
    a = _concentration()
    rates = stats.beta.ppf((np.arange(4096) + 0.5) / 4096, a, a)
    shifts = np.linspace(-8.0, 8.0, 321)
    passed = [np.mean(rates / (rates + (1.0 - rates) * np.exp(-shift))) - 0.5 for shift in shifts]
    return shifts, np.array(passed)


def _concentration() -> float:
    """The a of Beta(a, a) for which two independent answers to a task differ with chance ``DISCORDANCE``."""
    return DISCORDANCE / (1 - 2 * DISCORDANCE)  # 2 E[q (1 - q)] = a / (2 a + 1)


def _win_loss(differing: Ints, gains: Floats, rng: np.random.Generator) -> tuple[Ints, Ints]:
    wins = rng.binomial(differing, (1 + gains / DISCORDANCE) / 2)
    return wins, differing - wins


def _passed_or_failed(gains: Floats, wins: Ints, losses: Ints) -> Looks:
    counts = np.stack([wins, losses, PAIRS - wins - losses], axis=-1)
    return Looks(gains=gains, values=np.array([1.0, -1.0, 0.0]), counts=counts)
