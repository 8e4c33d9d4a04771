"""Recorded episodes as the monitors see them: who answered what, whether it passed, and what the answer was like."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.core.gate.samples import Strategy, strategy_of
from tidegate.core.hashing import canonical_json
from tidegate.core.refusals import is_refusal
from tidegate.core.rollout import Transcript
from tidegate.core.searched import answer_of, is_searched
from tidegate.core.selection.episodes import deciding_verdict, episode_kind, verdicts_by_episode
from tidegate.core.types import Episode, Interaction, Outcome, Split, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One episode that one release answered.

    ``prompt`` is equal for episodes that began with the same messages and tools. ``passed`` is None without a verdict
    and where the verifier abstained. ``tokens`` >= 0 were sampled over all main-line calls. ``surprisal``, their sum of
    -logprob in nats, and the ``temperature`` > 0 are None where tokens came from another distribution than the
    log-probabilities are of (greedy or filtered sampling, penalties), where calls differ in temperature, and where the
    engine gave no finite log-probabilities.
    """

    id: str
    release: str
    kind: str
    prompt: str
    passed: bool | None
    strategy: Strategy
    tokens: int
    no_reply: bool
    invalid_tool_call: bool
    refused: bool
    temperature: float | None
    surprisal: float | None


def recorded_answers(
    episodes: Sequence[Episode], verdicts: Sequence[Verdict], same_content: Mapping[str, str]
) -> tuple[tuple[RecordedAnswer, ...], dict[str, int]]:
    """Read train and dev episodes.

    Args:
        episodes: recorded ones, each once.
        verdicts: on these episodes; others are ignored.
        same_content: release id to the id under which releases of the same content are put together; a release that is
            not named stands for itself.

    Returns:
        The answers, and how many episodes were left out by reason: ``sealed``, ``no_consent``, ``no_main_line``,
        ``mixed_releases`` (several contents answered), ``searched`` (an answer was picked among several, which says
        little of the model), ``broken`` (a call without a choice, a tool call without a name).
    """
    judged = verdicts_by_episode(verdicts)
    answers: list[RecordedAnswer] = []
    excluded: Counter[str] = Counter()
    for episode in episodes:
        calls = [call for call in episode.interactions if call.main_line]
        releases = sorted({same_content.get(call.release_id, call.release_id) for call in calls})
        reason = _reason_against(episode, calls, releases)
        if reason is not None:
            excluded[reason] += 1
            continue
        verdict = deciding_verdict(episode.task, judged.get(episode.id, ()))
        try:
            answers.append(_answer(episode, calls, releases[0], verdict))
        except (KeyError, TypeError, ValueError):
            excluded["broken"] += 1
    return tuple(answers), dict(sorted(excluded.items()))


def _reason_against(episode: Episode, calls: Sequence[Interaction], releases: Sequence[str]) -> str | None:
    if episode.split is Split.SEALED or any(call.split is Split.SEALED for call in episode.interactions):
        return "sealed"
    if not all(call.consent for call in episode.interactions):
        return "no_consent"
    if not calls:
        return "no_main_line"
    if len(releases) > 1:
        return "mixed_releases"
    if is_searched(episode):
        return "searched"
    return None if all(call.choices for call in calls) else "broken"


def _answer(episode: Episode, calls: Sequence[Interaction], release: str, verdict: Verdict | None) -> RecordedAnswer:
    transcript = Transcript(messages=(), choices=tuple(answer_of(call) for call in calls))
    temperature = _temperature(calls)
    surprisal = transcript.surprisal if temperature is not None and transcript.tokens else None
    known = surprisal is not None and math.isfinite(surprisal)
    return RecordedAnswer(
        id=episode.id,
        release=release,
        kind=episode_kind(episode),
        prompt=_prompt(episode, calls),
        passed=None if verdict is None or verdict.outcome is Outcome.ABSTAIN else verdict.outcome is Outcome.PASS,
        strategy=strategy_of(transcript),
        tokens=transcript.tokens,
        no_reply=transcript.no_reply,
        invalid_tool_call=transcript.invalid_tool_call,
        refused=is_refusal(transcript.text),
        temperature=temperature if known else None,
        surprisal=surprisal if known else None,
    )


def _temperature(calls: Sequence[Interaction]) -> float | None:
    """The temperature at which all calls sampled without any filter, None where there is none."""
    settings = [call.sampling for call in calls]
    temperatures = {one.temperature for one in settings}
    return temperatures.pop() if len(temperatures) == 1 and all(one.unfiltered for one in settings) else None


def _prompt(episode: Episode, calls: Sequence[Interaction]) -> str:
    opening = episode.task or calls[0]
    text = canonical_json([opening.messages, opening.tools])
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
