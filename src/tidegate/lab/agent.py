"""A tiny agent: tasks of several kinds, strategies that solve some of them, and a softmax policy over strategies.

What stands for a language model here is a table. It shares a row of logits between all kinds, as weights are shared,
so that training on one kind of task moves the answers to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.core.statistics import effective_strategies

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

KINDS = ("sums", "percentages", "units", "dates")
STRATEGIES = ("recall", "calculator", "search", "code")

CHANCES: Array = np.array(
    [
        [0.90, 0.60, 0.20, 0.60],
        [0.10, 0.60, 0.10, 0.50],
        [0.05, 0.40, 0.60, 0.40],
        [0.05, 0.10, 0.50, 0.60],
    ]
)
"""(kinds, strategies): share of the tasks of a kind that a strategy solves. Answering from memory is best for easy sums
and nearly useless for the rest; each tool solves less of the sums and more kinds."""

TRAFFIC: Array = np.array([0.7, 0.1, 0.1, 0.1])
"""Shares of the kinds in what users ask: mostly sums."""

BALANCED: Array = np.full(len(KINDS), 1 / len(KINDS))
"""The mix that held-out success is taken over: every kind counts the same."""

_START_STD = 0.3  # of the logits at the start: every strategy is in use, none quite as often as another


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """T tasks: ``kinds`` (T,) as places in KINDS, and ``solved_by`` (T, S), whether a strategy solves it."""

    kinds: Indices
    solved_by: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """Logits over strategies: ``shared`` (S,) by all kinds, plus ``own`` (K, S) of each kind."""

    shared: Array
    own: Array

    @property
    def probabilities(self) -> Array:
        """(K, S), rows sum to 1."""
        return softmax(self.shared + self.own)

    def draw(self, kinds: Indices, rng: np.random.Generator) -> Indices:
        """(T,) one strategy for each task."""
        bounds = self.probabilities[kinds].cumsum(axis=1)[:, :-1]
        return (rng.random((len(kinds), 1)) > bounds).sum(axis=1)

    def success(self, mix: Array) -> float:
        """Expected success at temperature 1 over all tasks of a mix of kinds."""
        return float(mix @ (self.probabilities * CHANCES).sum(axis=1))

    @property
    def spread(self) -> float:
        """Effective number of strategies, in [1, S]: the mean over the kinds."""
        return float(np.mean([effective_strategies(row) for row in self.probabilities]))

    def trained(self, kinds: Indices, strategies: Indices, weights: Array, *, lr: float, steps: int) -> Policy:
        """The policy after gradient steps on the weighted negative log-likelihood of a batch.

        Args:
            kinds: (N,) of the tasks.
            strategies: (N,) that are imitated.
            weights: (N,) >= 0; an empty batch changes nothing.
            lr: step size, > 0.
            steps: of gradient descent over the whole batch.
        """
        if not len(weights):
            return self
        target = np.zeros_like(self.own)
        np.add.at(target, (kinds, strategies), weights / weights.sum())
        asked = target.sum(axis=1, keepdims=True)
        policy = self
        for _ in range(steps):
            ascent = lr * (target - asked * policy.probabilities)
            policy = Policy(policy.shared + ascent.sum(axis=0), policy.own + ascent)
        return policy


def softmax(logits: Array) -> Array:
    """Probabilities over the last axis; shape as the logits."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def first_policy(rng: np.random.Generator) -> Policy:
    """A policy that uses every strategy, some a little more than others."""
    return Policy(
        rng.normal(0.0, _START_STD, len(STRATEGIES)), rng.normal(0.0, _START_STD, (len(KINDS), len(STRATEGIES)))
    )


def draw_tasks(mix: Array, count: int, rng: np.random.Generator) -> Tasks:
    """``count`` tasks of a mix of kinds; whether a strategy solves a task is drawn once and never changes."""
    kinds = rng.choice(len(KINDS), size=count, p=mix)
    return Tasks(kinds, rng.random((count, len(STRATEGIES))) < CHANCES[kinds])
