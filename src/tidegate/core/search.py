"""Search over answers with a scoring function: the best of several, the vote of several, and beams of steps.

Nothing here asks an engine. Whoever samples answers passes them in, and passes steps in as ``expand``.

Sources: Wang et al. (2023), Self-consistency improves chain of thought reasoning in language models (the vote);
Yao et al. (2023), Tree of thoughts, algorithm 2 (beams over steps).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Candidate = TypeVar("Candidate")
Vote = TypeVar("Vote", bound=Hashable)
State = TypeVar("State")
Action = TypeVar("Action")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam(Generic[State, Action]):
    """A path of the search: ``states`` from the start on, and the ``actions`` between them, one fewer."""

    states: tuple[State, ...]
    actions: tuple[Action, ...]
    score: float

    @property
    def state(self) -> State:
        """Where the path has come to."""
        return self.states[-1]


def best_of_n(candidates: Sequence[Candidate], score: Callable[[Candidate], float]) -> Candidate:
    """The candidate with the highest score, of equals the first.

    Args:
        candidates: at least one.
        score: called once for each; any number but NaN, infinite ones included.

    Raises:
        ValueError: there is no candidate, or a score is NaN.
    """
    if not candidates:
        raise ValueError("best_of_n: there are no candidates; at least one is needed")
    scores = [_checked(score(candidate), candidate) for candidate in candidates]
    return candidates[scores.index(max(scores))]


def majority_vote(answers: Sequence[Vote]) -> Vote:
    """The answer that occurs most often, of equals the one seen first (self-consistency).

    Args:
        answers: normalised, so that equal answers are equal values; at least one. What abstains is left out before.

    Raises:
        ValueError: there is no answer.
    """
    if not answers:
        raise ValueError("majority_vote: there are no answers; at least one is needed")
    return Counter(answers).most_common(1)[0][0]


def beam_search(
    start: State,
    expand: Callable[[State], Iterable[tuple[Action, State]]],
    score: Callable[[State], float],
    *,
    width: int,
    depth: int,
) -> tuple[Beam[State, Action], ...]:
    """Grow paths step by step and keep the ``width`` best of each step.

    A path that can't be expanded is finished: it keeps its place among the others and competes with its score. Paths
    that end in equal states are kept apart. Equal scores stay in the order in which they were found, so that the
    result is the same each time. With a width that never cuts, it is exhaustive search.

    Args:
        start: the first state.
        expand: the steps from a state, as (action, next state) in a fixed order; nothing where it is final.
        score: of a state, the higher the better; any number but NaN, infinite ones included.
        width: paths kept, >= 1.
        depth: most steps of a path, >= 0.

    Returns:
        At most ``width`` paths, best first.

    Raises:
        ValueError: ``width`` or ``depth`` is too small, or a score is NaN.
    """
    if width < 1 or depth < 0:
        raise ValueError(f"beam_search: width = {width!r}, depth = {depth!r}; width >= 1 and depth >= 0 are accepted")
    beams: tuple[Beam[State, Action], ...] = (Beam(states=(start,), actions=(), score=_checked(score(start), start)),)
    for _ in range(depth):
        grown: list[Beam[State, Action]] = []
        moved = False
        for beam in beams:
            steps = list(expand(beam.state))
            moved = moved or bool(steps)
            grown += [_longer(beam, action, state, score) for action, state in steps] or [beam]
        if not moved:
            break
        beams = tuple(sorted(grown, key=lambda beam: -beam.score)[:width])
    return beams


def _longer(
    beam: Beam[State, Action], action: Action, state: State, score: Callable[[State], float]
) -> Beam[State, Action]:
    return Beam(states=(*beam.states, state), actions=(*beam.actions, action), score=_checked(score(state), state))


def _checked(score: float, scored: object) -> float:
    if math.isnan(score):
        raise ValueError(f"the score of {scored!r} is NaN; numbers that can be ordered are accepted")
    return score
