"""Rules of promotion that are in use, and the gate's, on the same looks.

All but the last are what published recipes do with one look; none of them knows of the looks before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.core.gate.simulation.looks import PAIRS, Floats, Looks
from tidegate.core.statistics import Ledger, betting_p_value, sign_flip_test, sign_test

Bools = NDArray[np.bool_]

LEDGER = "the ledger"
NOT_WORSE = "not significantly worse"
EACH_TIME = "p < .05 each time"
_LEVEL = 0.05
_PROBES, _PROBE_MARGIN = 8, 0.17
_FLIPS, _RESAMPLES = 999, 999


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """What a rule did.

    ``fdr``: mean over windows of false promotions over promotions, where a false promotion is a challenger that is not
    better. ``harmful``: promotions of worse challengers in 100 looks. ``power`` and ``first_power``: share of better
    challengers that are promoted, at any look and at the first of a window; NaN where there is none. ``drift``: mean
    sum of the true gains of what was promoted, for each row.
    """

    fdr: float
    harmful: float
    power: float
    first_power: float
    drift: float


def promotions(looks: Looks, ledger: Ledger, rng: np.random.Generator) -> dict[str, Bools]:
    """What each rule promotes, (S, H); every row starts with ``ledger``."""
    better, worse = _p_values(looks, rng)
    each_time = better < _LEVEL
    return {
        "score >= champion": looks.means >= 0.0,
        "margin >= .17 on 8 probes": _probed(looks, rng),
        NOT_WORSE: worse >= _LEVEL,
        EACH_TIME: each_time,
        "p < .05 and bootstrap": each_time & _bootstrap_agrees(looks, each_time, rng),
        LEDGER: under_ledger(better if _all_or_nothing(looks) else betting_p_value(looks.values, looks.counts), ledger),
    }


def under_ledger(p: Floats, ledger: Ledger) -> Bools:
    """What the ledger promotes, window after window along each row."""
    promoted = np.zeros(p.shape, dtype=bool)
    for row in range(p.shape[0]):
        state = ledger
        for look in range(p.shape[1]):
            _, promoted[row, look], state = state.record(float(p[row, look]))
    return promoted


def measure(gains: Floats, promoted: Bools) -> RuleResult:
    """Count what a rule did with challengers of known gain, (S, H) each."""
    good = gains > 0.0
    false, total = (promoted & ~good).sum(axis=-1), promoted.sum(axis=-1)
    return RuleResult(
        fdr=float(np.mean(false / np.maximum(total, 1))),
        harmful=100.0 * float(np.mean(promoted & (gains < 0.0))),
        power=_share((promoted & good).sum(), good.sum()),
        first_power=_share((promoted & good)[:, 0].sum(), good[:, 0].sum()),
        drift=float(np.mean((gains * promoted).sum(axis=-1))),
    )


def _p_values(looks: Looks, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """One-sided p-values of "better" and of "worse", the sign test or, for graded rewards, sign flips."""
    if _all_or_nothing(looks):
        wins, losses = looks.counts[..., 0], looks.counts[..., 1]
        return np.asarray(sign_test(wins, losses)), np.asarray(sign_test(losses, wins))
    better, worse = np.ones(looks.gains.shape), np.ones(looks.gains.shape)
    means = looks.means
    for index in np.ndindex(looks.gains.shape):
        # On the other side of zero p is above one half and decides nothing, so it is left at 1.
        sign, target = (1.0, better) if means[index] > 0.0 else (-1.0, worse)
        target[index] = sign_flip_test(sign * np.repeat(looks.values, looks.counts[index]), rng, flips=_FLIPS)
    return better, worse


def _all_or_nothing(looks: Looks) -> bool:
    return set(looks.values.tolist()) <= {-1.0, 0.0, 1.0}


def _probed(looks: Looks, rng: np.random.Generator) -> Bools:
    """Whether the challenger is ahead by the margin on eight tasks."""
    probes = rng.multinomial(_PROBES, looks.counts / PAIRS)
    return probes @ looks.values / _PROBES >= _PROBE_MARGIN


def _bootstrap_agrees(looks: Looks, asked: Bools, rng: np.random.Generator) -> Bools:
    """Whether the percentile bootstrap's two-sided 95 % interval lies above zero, for the looks that are asked for."""
    agrees = np.zeros(asked.shape, dtype=bool)
    for row, look in np.argwhere(asked):
        resampled = rng.multinomial(PAIRS, looks.counts[row, look] / PAIRS, size=_RESAMPLES) @ looks.values
        agrees[row, look] = np.quantile(resampled, _LEVEL / 2) > 0.0
    return agrees


def _share(part: int, whole: int) -> float:
    return float(part) / float(whole) if whole else float("nan")
