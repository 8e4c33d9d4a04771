"""From the verified answers of a round to a training batch: what stays, with which weight, and what is mixed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.core.selection.weights import exploration_weights
from tidegate.lab.agent import BALANCED, STRATEGIES, Array, Indices, Tasks, draw_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """What becomes of a round's successes.

    ``most_frequent_only``: only those of the strategy that succeeded most often stay. ``balanced``: every kind weighs
    the same, and within a kind strategies get exploration weights. ``replay_share`` and ``demonstration_share`` in
    [0, 1): of the batch, from successes of all earlier rounds and from an expert, both the same for every kind.

    Raises:
        ValueError: the two shares leave nothing for fresh successes.
    """

    name: str
    most_frequent_only: bool = False
    balanced: bool = False
    replay_share: float = 0.0
    demonstration_share: float = 0.0

    def __post_init__(self) -> None:
        """Shares are shares, and fresh successes have one."""
        replay, shown = self.replay_share, self.demonstration_share
        if not (replay >= 0.0 and shown >= 0.0 and replay + shown < 1.0):
            raise ValueError(
                f"curation {self.name!r}: replay_share = {replay!r}, demonstration_share = {shown!r}; shares >= 0 "
                "with a sum below 1 are accepted"
            )


CURATIONS = (
    Curation(name="aggressive", most_frequent_only=True),
    Curation(name="successes"),
    Curation(name="full", balanced=True, replay_share=0.15, demonstration_share=0.10),
)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """(N,) kinds, strategies and weights of training examples."""

    kinds: Indices
    strategies: Indices
    weights: Array


def successes(tasks: Tasks, strategies: Indices, curation: Curation) -> Batch:
    """The successes of a round that may train, with their weights."""
    right = tasks.solved_by[np.arange(len(strategies)), strategies]
    kinds, strategies = tasks.kinds[right], strategies[right]
    if curation.most_frequent_only and len(strategies):
        leading = strategies == np.bincount(strategies).argmax()
        kinds, strategies = kinds[leading], strategies[leading]
    weights = np.ones(len(kinds))
    if curation.balanced:
        seen = Counter(kinds.tolist())
        for kind, count in seen.items():
            bonus = exploration_weights([STRATEGIES[strategy] for strategy in strategies[kinds == kind]])
            weights[kinds == kind] = np.array(bonus) * len(kinds) / (len(seen) * count)
    return Batch(kinds, strategies, weights)


def mixed(fresh: Batch, earlier: Sequence[Batch], curation: Curation, rng: np.random.Generator) -> Batch:
    """The batch: fresh successes, replay and demonstrations in their shares. Replayed and shown examples weigh 1."""
    size = len(fresh.kinds) / (1.0 - curation.replay_share - curation.demonstration_share)
    parts = [
        (fresh.kinds, fresh.strategies),
        _replayed(earlier, round(size * curation.replay_share), rng),
        _shown(round(size * curation.demonstration_share), rng),
    ]
    kinds, strategies = (np.concatenate([part[column] for part in parts]) for column in range(2))
    return Batch(kinds, strategies, np.concatenate([fresh.weights, np.ones(len(kinds) - len(fresh.kinds))]))


def _replayed(earlier: Sequence[Batch], count: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """``count`` successes of all earlier rounds, every kind that there is as likely as the others."""
    if not count or not any(len(batch.kinds) for batch in earlier):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    kinds = np.concatenate([batch.kinds for batch in earlier])
    strategies = np.concatenate([batch.strategies for batch in earlier])
    counts = np.bincount(kinds)
    shares = 1.0 / counts[kinds]
    chosen = rng.choice(len(kinds), size=count, p=shares / shares.sum())
    return kinds[chosen], strategies[chosen]


def _shown(count: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """``count`` demonstrations of an expert who takes any strategy that solves the task, the kinds balanced."""
    tasks = draw_tasks(BALANCED, count, rng)
    preference = rng.random(tasks.solved_by.shape) * tasks.solved_by
    solvable = tasks.solved_by.any(axis=1)
    return tasks.kinds[solvable], preference[solvable].argmax(axis=1)
