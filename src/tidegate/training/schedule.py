"""Which sequences train in which step, and how fast. Pure: the seed is an argument."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.config.training import TrainingSettings

_FINAL_SHARE = 0.1
"""Learning rate of the last step as a share of the peak: small steps at the end, but no wasted ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step: indices of its sequences, and its learning rate."""

    epoch: int
    members: tuple[int, ...]
    learning_rate: float


def plan_run(units: Sequence[Sequence[object]], settings: TrainingSettings, *, seed: int) -> tuple[Step, ...]:
    """The steps of a run over units of sequences; see :func:`plan_steps`."""
    return plan_steps(
        len(units),
        batch_size=units_a_step(units, settings.batch_size),
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_fraction=settings.warmup_fraction,
        seed=seed,
    )


def units_a_step(units: Sequence[Sequence[object]], batch_size: int) -> int:
    """How many units make about ``batch_size`` sequences; at least one."""
    return max(1, batch_size * len(units) // sum(map(len, units)))


def plan_steps(
    count: int, *, batch_size: int, epochs: int, learning_rate: float, warmup_fraction: float, seed: int
) -> tuple[Step, ...]:
    """Every sequence once an epoch, in an order drawn anew for each.

    The batches of an epoch differ by at most one sequence: a short last batch would weigh its few sequences
    as much as full ones weigh many.

    Args:
        count: number of sequences, >= 1.
        batch_size: most sequences of a step, >= 1.
        epochs: passes, >= 1.
        learning_rate: peak, reached at the end of the warm-up.
        warmup_fraction: share of the steps over which the rate rises linearly, in [0, 1]; after it the rate falls
            along a half cosine to a tenth.
        seed: decides the order.
    """
    batches = math.ceil(count / batch_size)
    steps = batches * epochs
    warmup = round(warmup_fraction * steps)
    planned: list[Step] = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(f"tidegate.training/{seed}/{epoch}").shuffle(order)  # noqa: S311 - reproducible order, no secret
        for batch in range(batches):
            members = tuple(order[batch * count // batches : (batch + 1) * count // batches])
            rate = learning_rate * _share(len(planned), steps, warmup)
            planned.append(Step(epoch=epoch, members=members, learning_rate=rate))
    return tuple(planned)


def _share(index: int, steps: int, warmup: int) -> float:
    """Share of the peak rate at step ``index``, from 0."""
    if index < warmup:
        return (index + 1) / warmup
    progress = (index - warmup) / max(1, steps - warmup - 1)
    return _FINAL_SHARE + (1.0 - _FINAL_SHARE) * 0.5 * (1.0 + math.cos(math.pi * progress))
