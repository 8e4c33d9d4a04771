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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.core.errors import ConfigError
from tidegate.core.gate.collapse import collapse_alarms
from tidegate.core.gate.decisions import Alarm
from tidegate.core.gate.policy import CollapseRules
from tidegate.core.gate.samples import SampleEvidence, measure_samples
from tidegate.core.types import Answer
from tidegate.lab.agent import BALANCED, KINDS, STRATEGIES, TRAFFIC, Policy, Tasks, draw_tasks, first_policy
from tidegate.lab.batches import Batch, Curation, mixed, successes

_WINDOW = 400  # tasks a round
_LR = 1.0
_STEPS = 20  # of gradient descent a round: about as far as the batch's own shares
_START, _TRAFFIC, _ANSWERS, _CHOICES, _SEALED, _SAMPLES = range(6)  # streams of random numbers


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
    earlier: list[Batch] = []
    for _ in range(rounds):
        tasks = draw_tasks(TRAFFIC, _WINDOW, traffic)
        fresh = successes(tasks, policy.draw(tasks.kinds, answers), curation)
        batch = mixed(fresh, earlier, curation, choices)
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
