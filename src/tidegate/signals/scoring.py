"""From recorded episodes to verdicts: every replayable episode that has ended is judged once per verifier version.

An episode without a task, under way, or recorded in a way that no transcript comes out of is counted by
reason and left without a verdict; a later call may judge it. One broken episode never stops the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tidegate.core.errors import ConfigError, TidegateError
from tidegate.core.rollout import DEFAULT_MAX_CALLS, Transcript, transcript_of
from tidegate.core.searched import answer_of
from tidegate.core.types import Episode, Interaction, JsonObject, Task, Verdict
from tidegate.ports.signals import Judgement, Verifier
from tidegate.signals.verifiers.findings import INVALID_TOOL_CALL, boundary, failed, reason_of

VerdictKey: TypeAlias = tuple[str, str, str]
"""Episode id, verifier name, verifier version."""

DEFAULT_OPEN_TTL_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """New verdicts, and how many episodes came to which end.

    ``counts`` has the judgements' reasons (``right``, ``wrong``, ``no_reply``, ``no_tool_call``,
    ``invalid_tool_call``, ``verifier_error``) and those of episodes without a new verdict (``known``, ``no_task``,
    ``open``, ``broken``, ``unknown_verifier``, ``bad_reference``, ``verifier_unavailable``).
    """

    verdicts: list[Verdict]
    counts: dict[str, int]


def verdict_key(verdict: Verdict) -> VerdictKey:
    """The key under which a verdict is kept once."""
    return (verdict.episode_id, verdict.verifier, verdict.version)


def score_episodes(
    episodes: Sequence[Episode],
    verifiers: Mapping[str, Verifier],
    known: Collection[VerdictKey],
    clock: Callable[[], float],
    *,
    open_ttl_s: float = DEFAULT_OPEN_TTL_S,
    max_calls: int = DEFAULT_MAX_CALLS,
) -> Scoring:
    """Judge the episodes that have no verdict yet.

    Args:
        episodes: recorded episodes, interactions in order of time.
        verifiers: by name.
        known: keys of the verdicts that exist.
        clock: Unix seconds.
        open_ttl_s: an episode that waits for tool results counts as under way for this long after its last
            call, seconds; then it is judged as it stands.
        max_calls: an episode with so many main-line calls has ended.
    """
    judge = _EpisodeJudge(
        verifiers=verifiers, known=frozenset(known), clock=clock, open_ttl_s=open_ttl_s, max_calls=max_calls
    )
    verdicts: list[Verdict] = []
    counts: Counter[str] = Counter()
    for episode in episodes:
        try:
            verdict = judge(episode)
        except _NoVerdictError as unjudged:
            counts[unjudged.reason] += 1
        else:
            verdicts.append(verdict)
            counts[reason_of(verdict.detail)] += 1
    return Scoring(verdicts=verdicts, counts=dict(sorted(counts.items())))


class _NoVerdictError(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpisodeJudge:
    verifiers: Mapping[str, Verifier]
    known: frozenset[VerdictKey]
    clock: Callable[[], float]
    open_ttl_s: float
    max_calls: int

    def __call__(self, episode: Episode) -> Verdict:
        task = episode.task
        if task is None:
            raise _NoVerdictError("no_task")
        verifier = self.verifiers.get(task.verifier)
        if verifier is None:
            raise _NoVerdictError("unknown_verifier")
        if (episode.id, verifier.name, verifier.version) in self.known:
            raise _NoVerdictError("known")
        calls = [interaction for interaction in episode.interactions if interaction.main_line]
        transcript = _transcript(task, calls)
        started = self.clock()
        if self._under_way(task, calls, started):
            raise _NoVerdictError("open")
        judgement = _judge(verifier, task, transcript)
        now = self.clock()
        return Verdict(
            episode_id=episode.id,
            verifier=verifier.name,
            version=verifier.version,
            outcome=judgement.outcome,
            score=judgement.score,
            detail=judgement.detail,
            seconds=now - started,
            created_at=now,
        )

    def _under_way(self, task: Task, calls: Sequence[Interaction], now: float) -> bool:
        """Whether tool results may still come."""
        if task.environment is None or len(calls) >= self.max_calls or not answer_of(calls[-1]).tool_calls:
            return False
        return now - calls[-1].created_at < self.open_ttl_s


def _transcript(task: Task, calls: Sequence[Interaction]) -> Transcript:
    """The episode as it ran; the last request must go on from the task's messages."""
    if not calls or any(not call.choices for call in calls):
        raise _NoVerdictError("broken")
    if calls[-1].messages[: len(task.messages)] != task.messages:
        raise _NoVerdictError("broken")
    return transcript_of(task, [call.messages for call in calls], [answer_of(call) for call in calls])


def judge_answer(verifiers: Mapping[str, Verifier], task: Task, transcript: Sequence[JsonObject]) -> Judgement:
    """Judge one transcript now, before it is anybody's episode; what a scorer raises is a failure marked for counting.

    Args:
        verifiers: by name.
        task: whose verifier judges.
        transcript: messages after the task's own.

    Raises:
        TidegateError: there is no such verifier, or it cannot work here.
    """
    verifier = verifiers.get(task.verifier)
    if verifier is None:
        raise ConfigError(f"verifier {task.verifier!r} is unknown; registered: {sorted(verifiers)}")
    return boundary(lambda: verifier.judge(task, transcript))


def _judge(verifier: Verifier, task: Task, transcript: Transcript) -> Judgement:
    try:
        verifier.check_reference(task.reference)
    except ValueError as error:
        raise _NoVerdictError("bad_reference") from error
    except ConfigError as error:
        raise _NoVerdictError("verifier_unavailable") from error
    if transcript.invalid_tool_call:
        return failed(INVALID_TOOL_CALL)
    try:
        return boundary(lambda: verifier.judge(task, transcript.messages))
    except TidegateError as error:
        raise _NoVerdictError("verifier_unavailable") from error
