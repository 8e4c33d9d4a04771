"""Which recorded episodes may train at all, in this order: consent, split, main line, verdict, age, success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tidegate.core.searched import is_searched
from tidegate.core.selection.sifting import EPISODE, INTERACTION, Dropped, Sifted, sift
from tidegate.core.types import Episode, Outcome, Split, Task, Verdict

_DAY_S = 86_400.0


def episode_kind(episode: Episode) -> str:
    """The slice that an episode belongs to."""
    return episode.task.kind if episode.task is not None else "default"


def dropped_episode(episode: Episode, reason: str, *, reward: float | None = None) -> Dropped:
    """The record of an episode that does not train."""
    return Dropped(id=episode.id, reason=reason, kind=episode_kind(episode), source=EPISODE, reward=reward)


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


def not_searched(episodes: Sequence[Episode]) -> Sifted[Episode]:
    """Drop episodes with an answer that was picked among several: it is no draw from the model."""
    return sift(episodes, lambda episode: "searched" if is_searched(episode) else None, dropped_episode)


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


def not_stale(episodes: Sequence[Episode], *, now: float, max_age_days: float) -> Sifted[Episode]:
    """Drop episodes whose last call is more than ``max_age_days`` older than ``now``, in Unix seconds."""
    oldest = now - max_age_days * _DAY_S

    def reason_against(episode: Episode) -> str | None:
        return "stale" if max(call.created_at for call in episode.interactions) < oldest else None

    return sift(episodes, reason_against, dropped_episode)


def deciding_scores(episodes: Sequence[Episode], verdicts: Mapping[str, Sequence[Verdict]]) -> dict[str, float]:
    """Score of the deciding verdict by episode id; episodes without one, or with an abstention, are left out."""
    deciding = {episode.id: deciding_verdict(episode.task, verdicts.get(episode.id, ())) for episode in episodes}
    return {
        identifier: verdict.score
        for identifier, verdict in deciding.items()
        if verdict is not None and verdict.outcome is not Outcome.ABSTAIN
    }


def near_success_floor(scores: Sequence[float], *, threshold: float, quantile: float) -> float:
    """The score that a near-success must exceed: the larger of a quantile of all scores and half the threshold.

    Both halves keep plain failures out. With two different scores, whatever they are, the quantile is one of them, and
    what exceeds the lower is a success: nothing comes near. Half the threshold holds off the crumbs that some scorers
    give for a wrong answer where scores are graded.

    Args:
        scores: (N,) of the window, successes included, in [0, 1].
        threshold: of success, in [0, 1].
        quantile: in [0, 1]; taken as the smallest score that at least this share of the scores does not exceed, 1
            therefore lets nothing in.
    """
    if not scores:
        return threshold
    place = float(np.quantile(np.asarray(scores, dtype=np.float64), quantile, method="inverted_cdf"))
    return max(place, threshold / 2)


def successful(
    episodes: Sequence[Episode], scores: Mapping[str, float], *, threshold: float, above: float | None = None
) -> Sifted[Episode]:
    """Keep episodes with a score of at least ``threshold``, in [0, 1], and those whose score exceeds ``above``."""

    def reason_against(episode: Episode) -> str | None:
        score = scores.get(episode.id)
        passes = score is not None and (score >= threshold or (above is not None and score > above))
        return None if passes else "below_threshold"

    return sift(
        episodes,
        reason_against,
        lambda episode, reason: dropped_episode(episode, reason, reward=scores.get(episode.id)),
    )
