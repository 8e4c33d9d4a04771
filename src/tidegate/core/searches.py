"""Search at serving: how one of several choices is picked for the client, by the rules of :mod:`tidegate.core.search`.

``best-of-N`` takes the choice that a verifier scores highest, ``majority-of-N`` the answer that most choices give.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidegate.core.search import best_of_n, majority_vote
from tidegate.core.strategy import vote_of
from tidegate.core.types import Choice

_FORM = re.compile(r"(best|majority)-of-([1-9][0-9]{0,3})")
_UNVERIFIED = -1.0  # below every score: an answer that a scorer breaks on must not win over one that it calls wrong


class SearchKind(StrEnum):
    """What decides."""

    BEST = "best"
    MAJORITY = "majority"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What decides among how many choices, ``n`` >= 2."""

    kind: SearchKind
    n: int

    def __str__(self) -> str:
        """As clients write it."""
        return f"{self.kind}-of-{self.n}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Index of the delivered choice, and how many choices speak for it: those that passed, or that gave its answer."""

    index: int
    support: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a verifier said of a choice: ``score`` in [0, 1], None where it gave none."""

    score: float | None
    passed: bool


def parse_search(text: str, *, most: int) -> Search:
    """Read ``best-of-N`` or ``majority-of-N``.

    Args:
        text: as a client wrote it.
        most: largest N; below 2 no search is accepted.

    Raises:
        ValueError: says what is accepted.
    """
    if most < 2:
        raise ValueError("this server does not search; server.max_search of its settings is below 2")
    found = _FORM.fullmatch(text)
    if found is None or not 2 <= int(found[2]) <= most:
        raise ValueError(f"'best-of-N' and 'majority-of-N' with N from 2 to {most} are accepted")
    return Search(kind=SearchKind(found[1]), n=int(found[2]))


def pick_best(scores: Sequence[Scored]) -> Picked:
    """The choice with the highest score, of equals the first; one without a score comes behind all that have one.

    Args:
        scores: one a choice, in order; at least one.
    """
    index = best_of_n(range(len(scores)), lambda at: _UNVERIFIED if (found := scores[at].score) is None else found)
    return Picked(index=index, support=sum(scored.passed for scored in scores))


def pick_majority(choices: Sequence[Choice]) -> Picked:
    """The first choice that gives the commonest answer; the first of all where every choice abstains.

    Args:
        choices: in order; at least one.
    """
    votes = [vote_of(choice) for choice in choices]
    given = [vote for vote in votes if vote is not None]
    if not given:
        return Picked(index=0, support=0)
    winner = majority_vote(given)
    return Picked(index=votes.index(winner), support=votes.count(winner))
