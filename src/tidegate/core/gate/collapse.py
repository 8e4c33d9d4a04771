"""Collapse: whether a challenger became narrow beside the anchor, from several answers of both to the same tasks.

An average can rise while a policy narrows: the tasks that it can solve at all become fewer, the ways in which it solves
them too. Six measures are compared, each task by task:

- *pass@k*, with k all samples of a task: whether any of them passes;
- *slices solved*: kinds of tasks of which some sample passes;
- the *effective number of strategies*, exp of the entropy of their shares;
- *distinct-2*: the share of different pairs of neighbouring words, an answer's ends included;
- the *Vendi score* over the cosine similarity of character trigrams;
- *token entropy*: the mean of -logprob over the sampled tokens, whose expectation is the entropy of the distribution
  sampled from (where neither top-p nor top-k filters, and at the temperature of the traffic).

A point estimate over a few hundred tasks crosses such limits by chance: pass@8 over 200 tasks has a standard error of
about 2 points. So an alarm needs both, an estimate beyond the limit and evidence that there is any narrowing at all: a
one-sided p at or below the level divided by the number of measures. Under "no change" swapping the two arms of a task
changes nothing, so that the p are exact however few tasks there are, and an unchanged challenger meets any false alarm
with a chance of at most the level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidegate.core.gate.decisions import Alarm
from tidegate.core.gate.policy import CollapseRules
from tidegate.core.gate.samples import Column, Counts, SampleEvidence
from tidegate.core.statistics import pass_at_k, sign_flip_test, sign_test

MEASURES = 6
_FLIPS = 1_999
"""Random swaps: the smallest p, 1 / 2000, lies well below the level of one measure."""


def collapse_missing(evidence: SampleEvidence, rules: CollapseRules, max_error_share: float) -> tuple[str, ...]:
    """One sentence for each reason why nothing can be concluded."""
    wanted = evidence.per_task * len(evidence.task_ids)
    missing: list[str] = []
    for name, arm in (("challenger", evidence.challenger), ("anchor", evidence.anchor)):
        errors = int(arm.cut_short.sum())
        if errors > max_error_share * wanted:
            missing.append(
                f"{errors} of {wanted} further answers of the {name} ended in engine errors, "
                f"more than {max_error_share:.0%}: the engine was measured, not the model"
            )
        if arm.surprisal is None and rules.min_entropy > 0.0:
            missing.append(
                f"the engine gave no log-probabilities of the {name}: the token entropy is unknown; min_entropy = 0 "
                "leaves it out"
            )
    return tuple(missing)


def collapse_alarms(
    evidence: SampleEvidence, kinds: Sequence[str], rules: CollapseRules, *, level: float, seed: int
) -> tuple[Alarm, ...]:
    """Compare every measure that the evidence holds. An answer that was cut short counts against the challenger.

    Args:
        evidence: samples of both arms.
        kinds: (T,) slice of each task.
        rules: limits.
        level: of all false alarms together.
        seed: of the random swaps; fixed before anything was answered.
    """
    ours, theirs, per_task = evidence.challenger, evidence.anchor, evidence.per_task
    each = level / MEASURES
    held = theirs.passed + theirs.cut_short

    def solved(counts: Counts) -> Column:
        return np.array([pass_at_k(per_task, int(count), per_task) for count in counts], dtype=np.float64)

    def ratio(name: str, number: int, mine: Column, other: Column, limit: float) -> Alarm:
        """An alarm on the ratio of means over the tasks that have a value."""
        both = (mine > 0.0) | (other > 0.0)
        mean, opponent = (float(column[both].mean()) if both.any() else 0.0 for column in (mine, other))
        return Alarm(
            name=name,
            tasks=int(both.sum()),
            challenger=mean,
            anchor=opponent,
            beyond=mean < limit * opponent,
            limit=f"at least {limit:g} of the anchor's",
            p=swap_p(other[both] - mine[both], np.random.default_rng([seed, number])),
            level=each,
        )

    mine, other = solved(ours.passed), solved(held)
    alarms = [
        Alarm(
            name=f"pass@{per_task}",
            tasks=len(mine),
            challenger=float(mine.mean()),
            anchor=float(other.mean()),
            beyond=float(other.mean() - mine.mean()) > rules.max_pass_at_k_drop,
            limit=f"at most {rules.max_pass_at_k_drop:g} below the anchor's",
            p=sign_test(int(np.sum(other > mine)), int(np.sum(mine > other))),
            level=each,
        ),
        _slices_lost(mine > 0.0, other > 0.0, kinds, rules.max_slices_lost, level=each, seed=seed),
        ratio("effective strategies", 1, ours.strategies, theirs.strategies, rules.min_strategies),
        ratio("distinct word pairs", 2, ours.distinct, theirs.distinct, rules.min_distinct),
        ratio("Vendi score", 3, ours.vendi, theirs.vendi, rules.min_distinct),
    ]
    if ours.surprisal is not None and theirs.surprisal is not None:
        mine, other = (ours.surprisal / np.maximum(ours.tokens, 1), theirs.surprisal / np.maximum(theirs.tokens, 1))
        alarms.append(ratio("token entropy (nats)", 4, mine, other, rules.min_entropy))
    return tuple(alarms)


def swap_p(losses: Column, rng: np.random.Generator) -> float:
    """One-sided p of "the anchor's mean is higher" from differences task by task, of any scale."""
    largest = float(np.max(np.abs(losses), initial=0.0))
    return sign_flip_test(losses / largest, rng, flips=_FLIPS) if largest > 0.0 else 1.0


def _slices_lost(
    ours: NDArray[np.bool_], theirs: NDArray[np.bool_], kinds: Sequence[str], limit: float, *, level: float, seed: int
) -> Alarm:
    """The alarm on kinds that only the anchor solves; p from random swaps of the arms of each task."""
    names, places = np.unique(np.array(kinds, dtype=np.str_), return_inverse=True)
    member = np.equal.outer(places, np.arange(len(names))).astype(np.float32)  # (T, K)

    def lost(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(...,) kinds of which the second arm solves some task and the first none, of (..., T)."""
        return ((second @ member > 0) & ~(first @ member > 0)).sum(axis=-1)

    rng = np.random.default_rng([seed, 0])
    swapped = rng.random((_FLIPS, len(ours))) < 0.5
    drawn = lost(np.where(swapped, theirs, ours), np.where(swapped, ours, theirs))
    count, solved = int(lost(ours, theirs)), int((theirs @ member > 0).sum())
    return Alarm(
        name="slices solved",
        tasks=len(ours),
        challenger=float(solved - count),
        anchor=float(solved),
        beyond=count > limit * solved,
        limit=f"at most {limit:g} of the anchor's lost",
        p=(int(np.count_nonzero(drawn >= count)) + 1) / (_FLIPS + 1),
        level=level,
    )
