"""All conditions of a promotion together: sealed sets open and close, the champion moves, the anchor stays."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from tidegate.core.gate.policy import Policy
from tidegate.core.gate.simulation.looks import PAIRS, Floats, shifted, task_rates
from tidegate.core.gate.simulation.rules import Bools
from tidegate.core.gate.state import GateState
from tidegate.core.statistics import Ledger, sign_test, tango_excludes_loss

Superiority: TypeAlias = Literal["ledger", "p < .05", "not worse"]
_LEVEL = 0.05


def certified(
    gains: Floats, policy: Policy, rng: np.random.Generator, *, superiority: Superiority = "ledger", bounds: bool = True
) -> Bools:
    """What is promoted when every challenger is compared with the present champion and with the first one, the anchor.

    A sealed set holds ``PAIRS`` tasks in as many slices as the policy allows to be judged apart; it closes at its
    first promotion or after the policy's looks. A promoted challenger is the next champion, with its gain for good.

    Args:
        gains: (S, H) true gain of each challenger over the champion that it meets.
        policy: ledger and margins.
        rng: source of answers.
        superiority: how "better than the champion" is decided.
        bounds: also require that no loss beyond the margins is possible: overall, on every slice, and against the
            anchor.

    Returns:
        (S, H) what was promoted.
    """
    rules, fresh = policy.ledger, GateState().ledger(policy)
    streams, looks = gains.shape
    size = (streams, PAIRS)
    ledgers = [fresh] * streams
    promoted = np.zeros(gains.shape, dtype=bool)
    level, age = np.zeros(streams), np.full(streams, rules.looks_per_epoch)
    rate, champion, anchor = np.empty(size), np.empty(size, dtype=bool), np.empty(size, dtype=bool)
    for look in range(looks):
        opened = np.flatnonzero(age >= rules.looks_per_epoch)
        rate[opened] = task_rates((opened.size, PAIRS), rng)
        champion[opened] = rng.random((opened.size, PAIRS)) < shifted(rate[opened], level[opened])
        anchor[opened] = rng.random((opened.size, PAIRS)) < rate[opened]
        age[opened] = 0
        challenger = rng.random(size) < shifted(rate, level + gains[:, look])
        passed = _superior(challenger, champion, ledgers, superiority)
        if bounds:
            passed &= _bounds_hold(challenger, champion, anchor, policy)
        ledgers = [ledger.after(promoted=bool(won)) for ledger, won in zip(ledgers, passed, strict=True)]
        promoted[:, look] = passed
        level = level + gains[:, look] * passed
        age = np.where(passed, rules.looks_per_epoch, age + 1)
    return promoted


def _superior(challenger: Bools, champion: Bools, ledgers: list[Ledger], superiority: Superiority) -> Bools:
    wins, losses = _counts(challenger, champion)
    if superiority == "not worse":
        return np.asarray(sign_test(losses, wins)) >= _LEVEL
    levels = np.array([ledger.level for ledger in ledgers]) if superiority == "ledger" else _LEVEL
    return np.asarray(sign_test(wins, losses)) <= levels


def _bounds_hold(challenger: Bools, champion: Bools, anchor: Bools, policy: Policy) -> Bools:
    rules = policy.non_inferiority
    holds = tango_excludes_loss(*_counts(challenger, champion), PAIRS, rules.overall_margin, rules.level)
    holds &= tango_excludes_loss(*_counts(challenger, anchor), PAIRS, rules.anchor_margin, rules.level)
    slices = max(PAIRS // rules.min_pairs_per_slice, 1)
    for part in np.array_split(np.arange(PAIRS), slices):
        counts = _counts(challenger[:, part], champion[:, part])
        holds &= tango_excludes_loss(*counts, part.size, rules.slice_margin, rules.level)
    return holds


def _counts(first: Bools, second: Bools) -> tuple[np.ndarray, np.ndarray]:
    """Tasks that only the first arm passes, and those that only the second does, (S,) each."""
    return (first & ~second).sum(axis=-1), (second & ~first).sum(axis=-1)
