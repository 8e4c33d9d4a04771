"""Live traffic: how often canary and steady state are wrong, how long they take, and what dependent units do to them.

A *unit* is one scored episode. Arms hold different users, so the outcomes of a pair are independent given the users,
and a pair differs far more often than two arms on the same task do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from tidegate.core.gate.policy import CanaryRules, HoldbackRules
from tidegate.core.gate.simulation.looks import Floats, Ints
from tidegate.core.gate.simulation.rules import Bools
from tidegate.core.statistics import canary_paths, detector_paths

SUCCESS = 0.7
"""Success rate of the champion's units."""

_SPREAD = 2.0  # a + b of the Beta distribution of users' success rates: standard deviation 0.26
_TRAFFIC_SIGMA = 1.5  # of the logarithm of a user's traffic: the busiest tenth brings three fifths of it
_BLOCK = 500  # pairs that a detector runs at once
_CHUNK = 100  # canaries that are run at once
Counting: TypeAlias = Literal["all", "once"]
Draw: TypeAlias = Callable[[int, np.random.Generator], Floats]
"""Differences (N, T) of the next block of pairs for N streams, or of all pairs for N canaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """Shares of canaries by their end, and the median number of pairs of those that were decided (NaN for none)."""

    promoted: float
    rolled_back: float
    inconclusive: float
    median_pairs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorResult:
    """``alarmed``: share of streams with an alarm. ``mean_pairs``: pairs run for each alarm, infinity without one.

    ``median_pairs``: to a stream's alarm, infinity when fewer than half had one.
    """

    alarmed: float
    mean_pairs: float
    median_pairs: float


def run_canaries(draw: Draw, rules: CanaryRules, canaries: int, rng: np.random.Generator) -> CanaryResult:
    """Run canaries, looked at after every pair, to promotion, rollback or the end of their pairs.

    Args:
        draw: differences of all pairs of some canaries.
        rules: bets, margin and thresholds.
        canaries: how many to run.
        rng: source of the outcomes.
    """
    ends, times = np.zeros(canaries, dtype=np.int64), np.zeros(canaries)
    for start in range(0, canaries, _CHUNK):
        size = min(_CHUNK, canaries - start)
        paths = canary_paths(draw(size, rng), rules.margin, rules.bets)
        up, down = _first(paths.k_plus >= rules.promote_at), _first(paths.k_minus >= rules.rollback_at)
        part = slice(start, start + size)
        times[part] = np.minimum(up, down)
        ends[part] = np.where(np.isinf(times[part]), 0, np.where(down <= up, -1, 1))
    decided = times[np.isfinite(times)]
    return CanaryResult(
        promoted=float(np.mean(ends == 1)),
        rolled_back=float(np.mean(ends == -1)),
        inconclusive=float(np.mean(ends == 0)),
        median_pairs=float(np.median(decided)) if decided.size else float("nan"),
    )


def run_detector(
    draw: Draw, rules: HoldbackRules, streams: int, pairs: int, rng: np.random.Generator
) -> DetectorResult:
    """Run streams until their alarm, or until they have seen ``pairs``.

    The mean time to an alarm is estimated as all pairs run over all alarms, which is right for streams that are cut
    off when alarms come at a steady rate.
    """
    state = np.zeros((streams, len(rules.bets)))
    times, running = np.full(streams, np.inf), np.arange(streams)
    ran = 0
    for start in range(0, pairs, _BLOCK):
        d = draw(streams, rng)[running]
        paths = detector_paths(d, rules.margin, rules.bets, start=state)
        first = _first(paths.mean(axis=-1) >= rules.alarm_at)
        times[running] = start + first
        ran += int(np.minimum(first, _BLOCK).sum())
        going = np.isinf(first)
        running, state = running[going], paths[going, -1]
        if not running.size:
            break
    alarms = int(np.isfinite(times).sum())
    return DetectorResult(
        alarmed=alarms / streams,
        mean_pairs=ran / alarms if alarms else float("inf"),
        median_pairs=float(np.median(times)),
    )


def independent_units(gain: float, pairs: int) -> Draw:
    """One unit a user: independent outcomes, the challenger's success is ``SUCCESS + gain``."""

    def draw(streams: int, rng: np.random.Generator) -> Floats:
        shape = (streams, pairs)
        challenger, champion = rng.random(shape) < SUCCESS + gain, rng.random(shape) < SUCCESS
        return challenger.astype(np.float64) - champion

    return draw


def block_of(gain: float) -> Draw:
    """As :func:`independent_units`, in the blocks that a detector runs."""
    return independent_units(gain, _BLOCK)


def sticky_units(gain: float, pairs: int, users: int) -> Draw:
    """All units of ``users`` sticky users in each arm, who differ in success and in traffic."""

    def draw(streams: int, rng: np.random.Generator) -> Floats:
        outcomes = [_units(rng, streams, pairs, users, success) for success in (SUCCESS + gain, SUCCESS)]
        return outcomes[0] - outcomes[1]

    return draw


def holdback_units(counting: Counting, share: float, rng: np.random.Generator, *, streams: int, users: int) -> Draw:
    """Blocks of pairs of a permanent holdback of ``share`` of ``users`` while both releases are equally good.

    ``all``: the same users stay held back and give all their units. ``once``: each period draws the users anew, and a
    user gives one unit a period. Every block comes from the same ``streams`` populations.
    """
    success = _user_rates(rng, (streams, users), SUCCESS)
    held = max(round(share * users), 1)
    traffic = [np.cumsum(rng.lognormal(0.0, _TRAFFIC_SIGMA, (streams, size)), axis=-1) for size in (held, users - held)]

    def draw_all(rows: int, rng: np.random.Generator) -> Floats:
        del rows
        champion, before = (
            _picked(rng, traffic[1], success[:, held:], _BLOCK),
            _picked(rng, traffic[0], success[:, :held], _BLOCK),
        )
        return champion.astype(np.float64) - before

    def draw_once(rows: int, rng: np.random.Generator) -> Floats:
        periods = -(-_BLOCK // held)
        blocks: list[Floats] = []
        for _ in range(periods):
            chosen = np.argpartition(rng.random((rows, users)), 2 * held, axis=-1)[:, : 2 * held]
            rates = np.take_along_axis(success, rng.permuted(chosen, axis=-1), axis=-1)
            passed = rng.random(rates.shape) < rates
            blocks.append(passed[:, :held].astype(np.float64) - passed[:, held:])
        return np.concatenate(blocks, axis=-1)[:, :_BLOCK]

    return draw_all if counting == "all" else draw_once


def changing_world(rules: CanaryRules, fall: float, *, equal_shares: bool) -> Draw:
    """Equally good arms, one unit a user, in a world in which success falls evenly by ``fall`` during the canary.

    Units are paired in arrival order. ``equal_shares``: the control holds as large a share of users as the canary;
    otherwise everybody else, so that a unit of the canary meets one of long before.
    """
    pairs = rules.horizon_pairs

    def draw(streams: int, rng: np.random.Generator) -> Floats:
        stages = np.minimum(np.arange(pairs) // rules.pairs_per_weight, len(rules.weights) - 1)
        chance = np.array(rules.weights)[stages]
        challenger, equal = (np.cumsum(rng.geometric(chance, (streams, pairs)), axis=-1) for _ in range(2))
        champion = equal if equal_shares else _others(challenger, pairs)
        first, second = (
            rng.random(arrivals.shape) < SUCCESS + fall * (0.5 - np.minimum(arrivals / challenger[:, -1:], 1.0))
            for arrivals in (challenger, champion)
        )
        return first.astype(np.float64) - second

    return draw


def _others(taken: Ints, pairs: int) -> Ints:
    """The first ``pairs`` arrivals, numbered from 1, that are not among ``taken`` (S, T)."""
    free = np.ones((taken.shape[0], pairs + taken.shape[1]), dtype=bool)
    rows, columns = np.nonzero(taken <= free.shape[1])
    free[rows, taken[rows, columns] - 1] = False
    return np.argsort(~free, axis=-1, kind="stable")[:, :pairs] + 1


def _units(rng: np.random.Generator, streams: int, pairs: int, users: int, success: float) -> Floats:
    traffic = np.cumsum(rng.lognormal(0.0, _TRAFFIC_SIGMA, (streams, users)), axis=-1)
    return _picked(rng, traffic, _user_rates(rng, (streams, users), success), pairs).astype(np.float64)


def _picked(rng: np.random.Generator, cumulated: Floats, success: Floats, pairs: int) -> Bools:
    """Outcomes (S, T) of units whose users come in proportion to their traffic."""
    points = rng.random((cumulated.shape[0], pairs)) * cumulated[:, -1:]
    who = np.stack([np.searchsorted(row, point) for row, point in zip(cumulated, points, strict=True)])
    return rng.random(points.shape) < np.take_along_axis(success, who, axis=-1)


def _user_rates(rng: np.random.Generator, shape: tuple[int, int], mean: float) -> Floats:
    return rng.beta(_SPREAD * mean, _SPREAD * (1.0 - mean), shape)


def _first(reached: Bools) -> Floats:
    """Number of pairs up to the first True along the last axis, infinity where there is none."""
    return np.where(reached.any(axis=-1), reached.argmax(axis=-1) + 1.0, np.inf)
