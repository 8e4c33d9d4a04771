"""Which recorded episodes may train at all, in this order: consent, split, main line, verdict, success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate.core.selection.sifting import EPISODE, INTERACTION, Dropped, Sifted, sift
from tidegate.core.types import Episode, Outcome, Split, Task, Verdict


def episode_kind(episode: Episode) -> str:
    """The slice that an episode belongs to."""
    return episode.task.kind if episode.task is not None else "default"


def dropped_episode(episode: Episode, reason: str) -> Dropped:
    """The record of an episode that does not train."""
    return Dropped(id=episode.id, reason=reason, kind=episode_kind(episode), source=EPISODE)


def with_consent(episodes: Sequence[Episode]) -> Sifted[Episode]:
    """Drop every episode of which any call was made without consent: later prompts repeat earlier texts."""
    return sift(
        episodes,
        lambda episode: None if all(call.consent for call in episode.interactions) else "no_consent",
        dropped_episode,
    )


def of_train_split(episodes: Sequence[Episode]) -> Sifted[Episode]:
    """Drop everything outside the train split. A caller that passes such episodes has made an error."""
    return sift(
        episodes,
        lambda episode: None if is_train(episode) else "not_train",
        dropped_episode,
    )


def is_train(episode: Episode) -> bool:
    """Whether the episode and each of its calls are of the train split."""
    return episode.split is Split.TRAIN and all(call.split is Split.TRAIN for call in episode.interactions)


def main_line(episodes: Sequence[Episode]) -> Sifted[Episode]:
    """Take side calls (titles, summaries) out of episodes; drop episodes of which nothing stays."""
    kept: list[Episode] = []
    dropped: list[Dropped] = []
    for episode in episodes:
        kind = episode_kind(episode)
        calls = tuple(call for call in episode.interactions if call.main_line)
        dropped.extend(
            Dropped(id=call.id, reason="side_call", kind=kind, source=INTERACTION)
            for call in episode.interactions
            if not call.main_line
        )
        if calls:
            kept.append(replace(episode, interactions=calls))
        else:
            dropped.append(dropped_episode(episode, "no_main_line"))
    return Sifted(kept=tuple(kept), dropped=tuple(dropped))


def verdicts_by_episode(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """All verdicts of each episode."""
    result: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        result.setdefault(verdict.episode_id, []).append(verdict)
    return result


def deciding_verdict(task: Task | None, verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict that counts: the newest of the task's verifier; without a task the lowest of all verifiers'."""
    newest: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.created_at, verdict.version, verdict.score)):
        newest[verdict.verifier] = verdict
    if task is not None:
        return newest.get(task.verifier)
    return min(newest.values(), key=lambda verdict: (verdict.score, verdict.verifier), default=None)


def with_verdict(episodes: Sequence[Episode], verdicts: Mapping[str, Sequence[Verdict]]) -> Sifted[Episode]:
    """Drop episodes that no verifier has judged, or whose verifier abstained."""

    def reason_against(episode: Episode) -> str | None:
        verdict = deciding_verdict(episode.task, verdicts.get(episode.id, ()))
        if verdict is None:
            return "no_verdict"
        return "abstained" if verdict.outcome is Outcome.ABSTAIN else None

    return sift(episodes, reason_against, dropped_episode)


def successful(
    episodes: Sequence[Episode], verdicts: Mapping[str, Sequence[Verdict]], *, threshold: float
) -> Sifted[Episode]:
    """Keep episodes with a score of at least ``threshold``, in [0, 1]."""

    def reason_against(episode: Episode) -> str | None:
        verdict = deciding_verdict(episode.task, verdicts.get(episode.id, ()))
        return None if verdict is not None and verdict.score >= threshold else "below_threshold"

    return sift(episodes, reason_against, dropped_episode)
