"""Collapse: the same policy trained on its own successes, under three ways to choose what it trains on.

Each round the policy answers a window of the traffic's tasks, a program verifies the answers, a curation makes a batch
of them, and the policy is trained on it, starting from where it stands. At the end the gate's own collapse tests
compare it with the policy that it started from, the anchor, on tasks of the traffic.

Of the curation that real traffic goes through, what has no counterpart here is left out: users and their caps,
copies, near-successes (an answer is right or wrong).

Sources: Shumailov et al. (2024), AI models collapse when trained on recursively generated data; Gerstgrasser et al.
(2024), Is model collapse inevitable? (accumulate, never replace).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.core.errors import ConfigError
from tidegate.core.gate.collapse import collapse_alarms
from tidegate.core.gate.decisions import Alarm
from tidegate.core.gate.policy import CollapseRules
from tidegate.core.gate.samples import SampleEvidence, measure_samples
from tidegate.core.selection.weights import exploration_weights
from tidegate.core.types import Answer
from tidegate.lab.agent import (
    BALANCED,
    KINDS,
    STRATEGIES,
    TRAFFIC,
    Array,
    Indices,
    Policy,
    Tasks,
    draw_tasks,
    first_policy,
)

_WINDOW = 400  # tasks a round
_LR = 1.0
_STEPS = 20  # of gradient descent a round: about as far as the batch's own shares
_START, _TRAFFIC, _ANSWERS, _CHOICES, _SEALED, _SAMPLES = range(6)  # streams of random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """What becomes of a round's successes.

    ``most_frequent_only``: only those of the strategy that succeeded most often stay. ``balanced``: every kind weighs
    the same, and within a kind strategies get exploration weights. ``replay_share`` and ``demonstration_share`` in
    [0, 1): of the batch, from successes of all earlier rounds and from an expert, both the same for every kind.
    """

    name: str
    most_frequent_only: bool = False
    balanced: bool = False
    replay_share: float = 0.0
    demonstration_share: float = 0.0


CURATIONS = (
    Curation(name="aggressive", most_frequent_only=True),
    Curation(name="successes"),
    Curation(name="full", balanced=True, replay_share=0.15, demonstration_share=0.10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A policy in three numbers: success on the traffic's mix and on the balanced one, effective strategies."""

    traffic: float
    held_out: float
    strategies: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapseRun:
    """``standings`` before the first round and after each, ``alarms`` of the gate after the last."""

    seed: int
    curation: str
    standings: tuple[Standing, ...]
    alarms: tuple[Alarm, ...]

    @property
    def firing(self) -> tuple[str, ...]:
        """Names of the alarms that refuse the policy."""
        return tuple(alarm.name for alarm in self.alarms if alarm.fires)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """(N,) kinds, strategies and weights of training examples."""

    kinds: Indices
    strategies: Indices
    weights: Array


def run_collapse(*, seed: int, curation: Curation, rounds: int, rules: CollapseRules, level: float) -> CollapseRun:
    """Train for some rounds and let the gate's collapse tests look at the result.

    All curations of a seed start from the same policy and see the same tasks.

    Args:
        seed: of all random numbers, >= 0.
        curation: how batches are made.
        rounds: >= 1.
        rules: limits, tasks and samples of the tests.
        level: of all false alarms together.

    Raises:
        ConfigError: ``seed`` or ``rounds`` is out of range.
    """
    if seed < 0 or rounds < 1:
        raise ConfigError(f"collapse: seed = {seed!r}, rounds = {rounds!r}; seed >= 0 and rounds >= 1 are accepted")
    traffic, answers, choices = (np.random.default_rng([seed, stream]) for stream in (_TRAFFIC, _ANSWERS, _CHOICES))
    anchor = policy = first_policy(np.random.default_rng([seed, _START]))
    standings = [_standing(policy)]
    earlier: list[_Batch] = []
    for _ in range(rounds):
        tasks = draw_tasks(TRAFFIC, _WINDOW, traffic)
        fresh = _kept(tasks, policy.draw(tasks.kinds, answers), curation)
        batch = _mixed(fresh, earlier, curation, choices)
        earlier.append(fresh)
        policy = policy.trained(batch.kinds, batch.strategies, batch.weights, lr=_LR, steps=_STEPS)
        standings.append(_standing(policy))
    sealed = draw_tasks(TRAFFIC, rules.tasks, np.random.default_rng([seed, _SEALED]))
    evidence = sampled(sealed, challenger=policy, anchor=anchor, per_task=rules.samples, seed=seed)
    alarms = collapse_alarms(evidence, [KINDS[kind] for kind in sealed.kinds], rules, level=level, seed=seed)
    return CollapseRun(seed=seed, curation=curation.name, standings=tuple(standings), alarms=alarms)


def sampled(tasks: Tasks, *, challenger: Policy, anchor: Policy, per_task: int, seed: int) -> SampleEvidence:
    """Several answers of both policies to the same tasks, measured as the gate measures them."""
    names = [f"task-{number:05}" for number in range(len(tasks.kinds))]
    ours, theirs = (
        [
            _answers(names, tasks, policy, sample, np.random.default_rng([seed, _SAMPLES, place, sample]))
            for sample in range(per_task)
        ]
        for place, policy in enumerate((challenger, anchor))
    )
    return measure_samples(names, challenger=ours, anchor=theirs)


def _answers(
    names: Sequence[str], tasks: Tasks, policy: Policy, sample: int, rng: np.random.Generator
) -> dict[str, Answer]:
    """One answer to each task: a single token, the strategy's name."""
    strategies = policy.draw(tasks.kinds, rng)
    surprisals = -np.log(policy.probabilities[tasks.kinds, strategies])
    passed = tasks.solved_by[np.arange(len(names)), strategies]
    return {
        name: Answer(
            task_id=name,
            adapter_sha256="",
            sample=sample,
            seed=sample,
            passed=bool(right),
            score=float(right),
            no_reply=False,
            invalid_tool_call=False,
            refused=False,
            tokens=1,
            seconds=0.0,
            text=STRATEGIES[strategy],
            tools=(),
            surprisal=float(surprisal),
        )
        for name, strategy, surprisal, right in zip(names, strategies, surprisals, passed, strict=True)
    }


def _standing(policy: Policy) -> Standing:
    return Standing(traffic=policy.success(TRAFFIC), held_out=policy.success(BALANCED), strategies=policy.spread)


def _kept(tasks: Tasks, strategies: Indices, curation: Curation) -> _Batch:
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
    return _Batch(kinds, strategies, weights)


def _mixed(fresh: _Batch, earlier: Sequence[_Batch], curation: Curation, rng: np.random.Generator) -> _Batch:
    """The batch: fresh successes, replay and demonstrations in their shares. Replayed and shown examples weigh 1."""
    size = len(fresh.kinds) / (1.0 - curation.replay_share - curation.demonstration_share)
    parts = [
        (fresh.kinds, fresh.strategies),
        _replayed(earlier, round(size * curation.replay_share), rng),
        _shown(round(size * curation.demonstration_share), rng),
    ]
    kinds, strategies = (np.concatenate([part[column] for part in parts]) for column in range(2))
    return _Batch(kinds, strategies, np.concatenate([fresh.weights, np.ones(len(kinds) - len(fresh.kinds))]))


def _replayed(earlier: Sequence[_Batch], count: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
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
