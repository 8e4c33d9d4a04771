"""From recorded episodes to the units of a live trial: who counts, for which arm, with which outcome.

Reads both databases, judges what a verifier can judge, and remembers what it has settled, so that a step reads only
what is new or still waits for its verdict. What it forgets with its process it finds again: units are in the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tidegate.core.chat import content_text
from tidegate.core.gate.live_assignment import LiveArm, unit_id
from tidegate.core.gate.live_leaks import leaks
from tidegate.core.gate.live_state import LiveUnit, Trial
from tidegate.core.hashing import canonical_json
from tidegate.core.searched import is_searched
from tidegate.core.types import Episode, Feedback, Interaction, Outcome, Split
from tidegate.ports import TrajectoryStore, Verifier
from tidegate.signals import score_episodes

_SOURCES = ((Split.TRAIN, Split.DEV), (Split.SEALED,))


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """Limits of what is read.

    ``metric`` names the feedback that is an outcome where no program can score; ``verdict_wait_s``: an episode
    without a verdict is given up after so long; ``late_s``: how long after its beginning a call may still be
    recorded; ``open_ttl_s`` and ``max_calls`` as :func:`tidegate.signals.score_episodes` has them.
    """

    metric: str
    verdict_wait_s: float
    late_s: float
    open_ttl_s: float
    max_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What is new: units in arrival order, why other episodes are none, and personal data that the subject let out."""

    units: tuple[LiveUnit, ...] = ()
    excluded: Mapping[str, int] = field(default_factory=dict[str, int])
    leaks: tuple[tuple[str, str], ...] = ()


class UnitReader:
    """Reads the episodes of one trial's present draw.

    Args:
        trial: whose draw it is.
        stores: of open and of sealed users, in this order.
        verifiers: by name.
        rules: limits.
        clock: Unix seconds.
    """

    def __init__(
        self,
        trial: Trial,
        *,
        stores: tuple[TrajectoryStore, TrajectoryStore],
        verifiers: Mapping[str, Verifier],
        rules: WatchRules,
        clock: Callable[[], float],
    ) -> None:
        self.draw = trial.draw
        self._stores = stores
        self._verifiers = verifiers
        self._rules = rules
        self._clock = clock
        self._after = trial.stages[0].since
        self._settled: dict[str, float] = {}
        self._outcomes: dict[str, float | None] = {}
        self._searched: dict[str, float] = {}
        # Episodes that only a person can judge may wait long: kept by name, so that nothing is read for them again.
        self._awaited: tuple[dict[str, Episode], dict[str, Episode]] = ({}, {})

    def gather(self, trial: Trial) -> Gathered:
        """Everything that came in since the last call.

        Raises:
            StoreError: a store is away; the next call finds what this one would have found.
        """
        now = self._clock()
        units: list[LiveUnit] = []
        known = set(trial.units)
        excluded: Counter[str] = Counter()
        found: list[tuple[str, str]] = []
        waiting: list[float] = []
        settled: dict[str, float] = {}
        for episode in self._episodes():
            begun = episode.interactions[0].created_at
            found += self._leaks_of(episode, trial)
            if not self._is_open(episode) and not any(episode.id in awaited for awaited in self._awaited):
                continue
            verdict = self._classify(episode, trial, known, now)
            if isinstance(verdict, LiveUnit):
                units.append(verdict)
                known.add(verdict.user)
            elif verdict is None:
                if episode.task is not None:
                    waiting.append(begun)
                continue
            elif verdict:
                excluded[verdict] += 1
            settled[episode.id] = begun
            for awaited in self._awaited:
                awaited.pop(episode.id, None)
        self._settle(settled, waiting, now)
        return Gathered(units=tuple(units), excluded=dict(sorted(excluded.items())), leaks=tuple(found))

    def _settle(self, settled: Mapping[str, float], waiting: Iterable[float], now: float) -> None:
        """Move on to the oldest episode that waits; late records still find their place."""
        self._settled.update(settled)
        self._after = max(self._after, min([now - self._rules.late_s, *(begun - 1e-3 for begun in waiting)]))
        for memory in (self._settled, self._searched):
            for name in [name for name, begun in memory.items() if begun <= self._after]:
                del memory[name]

    def _episodes(self) -> list[Episode]:
        """Episodes with a call that may be new, in order of time, with their outcomes known as far as they are."""
        found: list[Episode] = []
        outcomes: dict[str, float | None] = {}
        for store, splits, awaited in zip(self._stores, _SOURCES, self._awaited, strict=True):
            listed = {
                episode.id: episode for episode in store.list_episodes(splits=splits, after=self._after, active=True)
            }
            episodes = [*listed.values(), *(old for name, old in awaited.items() if name not in listed)]
            new = [episode for episode in episodes if self._is_open(episode) or episode.id in awaited]
            awaited.update({episode.id: _named(episode) for episode in new if episode.task is None})
            found += episodes
            outcomes |= self._judged(store, new)
        self._outcomes = outcomes
        return sorted(found, key=lambda episode: (episode.interactions[0].created_at, episode.id))

    def _is_open(self, episode: Episode) -> bool:
        """Whether it may still give a unit; a later turn of one that is settled is only searched."""
        return episode.interactions[0].created_at > self._after and episode.id not in self._settled

    def _judged(self, store: TrajectoryStore, episodes: Sequence[Episode]) -> dict[str, float | None]:
        """Outcomes in [0, 1] by episode; None where a verifier or a person gave one that says nothing."""
        outcomes = {episode.id: self._outcomes[episode.id] for episode in episodes if episode.id in self._outcomes}
        new = [episode for episode in episodes if episode.task is not None and episode.id not in outcomes]
        rules = self._rules
        scoring = score_episodes(
            new, self._verifiers, (), self._clock, open_ttl_s=rules.open_ttl_s, max_calls=rules.max_calls
        )
        store.append_verdicts(scoring.verdicts)
        for verdict in scoring.verdicts:
            outcomes[verdict.episode_id] = None if verdict.outcome is Outcome.ABSTAIN else verdict.score
        told = [episode for episode in episodes if episode.task is None and episode.id not in outcomes]
        if told:
            outcomes |= feedback_outcomes(told, store.list_feedback(metric_name=rules.metric))
        return outcomes

    def _classify(self, episode: Episode, trial: Trial, known: set[str], now: float) -> LiveUnit | str | None:
        """The unit, why there is none (empty: a user of neither arm), or None while the verdict is awaited."""
        arm = trial.assignment.arm_of(episode.user_key)
        if arm is None:
            return ""
        begun = episode.interactions[0].created_at
        release = trial.subject_release if arm is LiveArm.SUBJECT else trial.control_release
        if any(call.release_id != release for call in episode.interactions):
            return "other release"
        name = unit_id(trial.draw, episode.user_key)
        passed_over = (
            ("began before", begun <= self._since(trial, episode.user_key)),
            # the best of eight answers of a worse release is as good as one of a better one
            ("searched", is_searched(episode)),
            ("second unit of a user", name in known),
        )
        reason = next((reason for reason, holds in passed_over if holds), None)
        if reason is not None:
            return reason
        if episode.id not in self._outcomes:
            return None if now - begun <= self._rules.verdict_wait_s else "no verdict"
        outcome = self._outcomes[episode.id]
        return "no verdict" if outcome is None else LiveUnit(user=name, arm=arm, outcome=outcome, time=begun)

    @staticmethod
    def _since(trial: Trial, user_key: str) -> float:
        """When the user came into an arm: both arms of a wider share begin at the same moment."""
        for stage in trial.stages:
            if replace(trial.assignment, share=stage.share).arm_of(user_key) is not None:
                return stage.since
        return trial.stages[-1].since

    def _leaks_of(self, episode: Episode, trial: Trial) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for call in episode.interactions:
            if call.release_id != trial.subject_release or call.created_at <= self._after:
                continue
            if call.id not in self._searched:
                self._searched[call.id] = call.created_at
                found += [(kind, unit_id(trial.draw, call.id)) for kind in leaks_of_call(call)]
        return found


def _named(episode: Episode) -> Episode:
    """The episode without what was said in it."""
    calls = (
        replace(call, messages=(), tools=(), prompt_token_ids=(), choices=()) for call in episode.interactions
    )  # fmt: skip
    return replace(episode, interactions=tuple(calls))


def leaks_of_call(call: Interaction) -> tuple[str, ...]:
    """Kinds of personal data in a call's answers that its request did not hold; none without consent to keep them."""
    told = [choice for choice in call.choices if choice.delivered]
    said = [text for choice in told for text in (choice.text, canonical_json(list(choice.tool_calls)))]
    given = [content_text(message.get("content")) for message in call.messages]
    given += [canonical_json([dict(message) for message in call.messages]), canonical_json(list(call.tools))]
    return leaks("\n".join(said), given)


def feedback_outcomes(episodes: Sequence[Episode], feedback: Sequence[Feedback]) -> dict[str, float | None]:
    """The first usable value for each episode that has feedback: a bool, or a number in [0, 1].

    Args:
        episodes: that no program can score.
        feedback: of one metric, oldest first, about an episode or about one of its calls.
    """
    by_name = {episode.id: episode.id for episode in episodes}
    by_name |= {call.id: episode.id for episode in episodes for call in episode.interactions if call.main_line}
    outcomes: dict[str, float | None] = {}
    for item in feedback:
        episode_id = by_name.get(item.episode_id or item.interaction_id or "")
        value = _as_outcome(item.value)
        if episode_id is not None and value is not None:
            outcomes.setdefault(episode_id, value)
    return outcomes


def rate_before(
    stores: tuple[TrajectoryStore, TrajectoryStore],
    *,
    verifiers: Mapping[str, Verifier],
    releases: Iterable[str],
    after: float,
    rules: WatchRules,
    clock: Callable[[], float],
) -> tuple[float, int] | None:
    """Sum and number of outcomes, one a user, that ``releases`` reached since ``after``; None when there are none."""
    wanted, outcomes = set(releases), dict[str, float]()
    for store, splits in zip(stores, _SOURCES, strict=True):
        episodes = [
            episode
            for episode in store.list_episodes(splits=splits, after=after)
            if {call.release_id for call in episode.interactions} <= wanted and not is_searched(episode)
        ]
        scored = score_episodes(
            episodes, verifiers, (), clock, open_ttl_s=rules.open_ttl_s, max_calls=rules.max_calls
        ).verdicts
        store.append_verdicts(scored)
        judged = {v.episode_id: v.score for v in scored if v.outcome is not Outcome.ABSTAIN}
        told = [episode for episode in episodes if episode.task is None]
        said = feedback_outcomes(told, store.list_feedback(metric_name=rules.metric)) if told else {}
        for episode in episodes:
            value = judged.get(episode.id, said.get(episode.id))
            if value is not None:
                outcomes.setdefault(episode.user_key, value)
    return (sum(outcomes.values()), len(outcomes)) if outcomes else None


def _as_outcome(value: Any) -> float | None:
    if isinstance(value, bool | int | float) and 0.0 <= float(value) <= 1.0:
        return float(value)
    return None
