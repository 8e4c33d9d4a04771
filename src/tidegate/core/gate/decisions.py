"""What a look can end in: three distinct types, never one boolean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias


class Reply(StrEnum):
    """All that the proposing side learns from a certification.

    A refusal is one constant word: scores and per-task results stay with the gate, so that a stream of
    refusals teaches nothing about the sealed set.
    """

    PROMOTE = "promote"
    REJECT = "reject"
    ABSTAIN = "abstain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One non-inferiority test: the challenger's rate minus the other arm's must stay above ``-margin``.

    ``better`` and ``worse`` count the pairs on which only the challenger, or only the other arm, did well; of graded
    rewards they are the sums of the challenger's gains and losses. ``lower`` is the one-sided lower confidence bound
    of the difference.
    """

    name: str
    better: float
    worse: float
    pairs: int
    lower: float
    margin: float

    @property
    def difference(self) -> float:
        """Observed difference of the rates."""
        return (self.better - self.worse) / self.pairs

    @property
    def holds(self) -> bool:
        """Whether the bound excludes a loss as large as the margin."""
        return self.lower > -self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One comparison with the anchor that shows a challenger that became narrow.

    ``challenger`` and ``anchor`` are the measure's values over ``tasks``; ``beyond``: the former lies beyond ``limit``;
    ``p`` is that of "the challenger is no narrower", and an alarm needs it at or below ``level`` too.
    """

    name: str
    tasks: int
    challenger: float
    anchor: float
    beyond: bool
    limit: str
    p: float
    level: float

    @property
    def fires(self) -> bool:
        """Whether the challenger is refused for it."""
        return self.beyond and self.p <= self.level


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What one look at a sealed set measured, against the level that the ledger gave.

    ``wins`` and ``losses``: pairs on which the challenger, or the champion, has the higher reward. ``test`` is the
    one that gives ``p``. ``alarms``: the comparisons of further answers with the anchor's, empty where none were asked.
    """

    pairs: int
    wins: int
    losses: int
    test: Literal["sign test", "betting test"]
    p: float
    level: float
    bounds: tuple[Bound, ...]
    alarms: tuple[Alarm, ...] = ()

    @property
    def ties(self) -> int:
        """Pairs on which challenger and champion agree."""
        return self.pairs - self.wins - self.losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """Every condition holds. ``reasons`` say with which numbers."""

    reasons: tuple[str, ...]
    measured: Measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The evidence is complete and some condition does not hold."""

    reasons: tuple[str, ...]
    measured: Measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstain:
    """Not enough evidence: nothing is spent, nothing is concluded."""

    missing: tuple[str, ...]


Decision: TypeAlias = Promote | Refuse | Abstain


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenPassed:
    """The challenger may be certified."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenFailed:
    """The challenger is rejected before it costs a look."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenAbstained:
    """Too little was measured to let the challenger through or to reject it."""

    missing: tuple[str, ...]


ScreenResult: TypeAlias = ScreenPassed | ScreenFailed | ScreenAbstained


_REPLIES = {Promote: Reply.PROMOTE, Refuse: Reply.REJECT, Abstain: Reply.ABSTAIN}
_VERBS = {
    Promote: "promote",
    Refuse: "refuse",
    Abstain: "abstain",
    ScreenPassed: "pass",
    ScreenFailed: "fail",
    ScreenAbstained: "abstain",
}


def reply_of(decision: Decision) -> Reply:
    """The one word that leaves the gate."""
    return _REPLIES[type(decision)]


def verb(result: Decision | ScreenResult) -> str:
    """The word that records and reports use for a result."""
    return _VERBS[type(result)]


def reasons_of(result: Decision | ScreenResult) -> tuple[str, ...]:
    """The sentences behind a result."""
    return result.missing if isinstance(result, Abstain | ScreenAbstained) else result.reasons


def describe(result: Decision | ScreenResult) -> str:
    """One line for a person: ``refuse: 12 wins, 9 losses over 96 pairs: p = 0.33 > level 0.02``."""
    return f"{verb(result)}: {'; '.join(reasons_of(result))}"
