"""How a run's steps are cut into the parts that TRL computes one after another. Pure: no tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.training.schedule import Step
from tidegate.training.updates import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """``members`` holds the indices of units of each part, ``a_step`` parts for each step in order.

    ``tokens`` has one entry a part, padding included: as many times the longest sequence as there are sequences.
    """

    members: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    a_step: int

    @property
    def widest(self) -> int:
        """Most tokens of a part, padding included."""
        return max(self.tokens)

    def tokens_of_step(self, number: int) -> int:
        """Tokens of all parts of step ``number``, from 0, padding included."""
        return sum(self.tokens[number * self.a_step : (number + 1) * self.a_step])


def cut_steps(units: Sequence[Unit], steps: Sequence[Step], *, max_tokens: int) -> Parts:
    """Cut every step into the same number of parts: the smallest with at most ``max_tokens`` in each.

    A trainer of transformers accumulates gradients over a fixed number of parts. Where no number fits, as a unit is
    longer by itself, there are as many parts as the smallest step has units.

    Args:
        units: of the run.
        steps: which units train in which step, at least one.
        max_tokens: of a part, padding included.
    """
    most = min(len(step.members) for step in steps)
    parts = _cut(units, steps, 1)
    for count in range(2, most + 1):
        if parts.widest <= max_tokens:
            break
        parts = _cut(units, steps, count)
    return parts


def _cut(units: Sequence[Unit], steps: Sequence[Step], count: int) -> Parts:
    members: list[tuple[int, ...]] = []
    for step in steps:
        ordered = sorted(step.members, key=lambda index: (_longest(units[index]), index))
        size = len(ordered)
        members += [tuple(ordered[part * size // count : (part + 1) * size // count]) for part in range(count)]
    return Parts(members=tuple(members), tokens=tuple(_padded(units, part) for part in members), a_step=count)


def _padded(units: Sequence[Unit], part: Sequence[int]) -> int:
    return sum(len(units[index]) for index in part) * max(_longest(units[index]) for index in part)


def _longest(unit: Unit) -> int:
    """Tokens up to the last trained one: nothing that is trained depends on later ones."""
    return 1 + max(sequence.input_length for sequence in unit)
