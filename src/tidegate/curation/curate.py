"""From scored episodes to a training batch.

The order of the steps is part of what they promise: consent and split come before anything else looks at an
episode, caps and budget come after everything that could still drop an example, and the share of a user comes last,
where weights are final. Whatever goes in comes out again, as a kept or as a dropped item of the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tidegate.config.settings import CurationSettings
from tidegate.core.selection.balance import balanced, normalised_weights, within_user_share
from tidegate.core.selection.demonstrations import per_kind, per_prompt
from tidegate.core.selection.episodes import (
    deciding_scores,
    main_line,
    near_success_floor,
    not_searched,
    not_stale,
    of_train_split,
    successful,
    verdicts_by_episode,
    with_consent,
    with_verdict,
)
from tidegate.core.selection.limits import copy_key, distinct, dropped_example, per_user, within_budget
from tidegate.core.selection.near_copies import near_distinct
from tidegate.core.selection.replay import Earlier, replay_size, replayable
from tidegate.core.selection.sampling import balanced_draw, weighted_sample
from tidegate.core.selection.sequences import Fresh, origin_of, prompt_key, token_sequences
from tidegate.core.selection.sifting import EPISODE, Dropped, Sifted, no_preference, sift
from tidegate.core.strategy import episode_cluster
from tidegate.core.types import Episode, Example, Feedback, Verdict
from tidegate.curation.batch import Batch, make_batch
from tidegate.curation.shown import shown_demonstrations, unique_demonstrations
from tidegate.ports import Verifier

_Thing = TypeVar("_Thing")


def curate(
    episodes: Sequence[Episode],
    verdicts: Sequence[Verdict],
    feedback: Sequence[Feedback],
    *,
    settings: CurationSettings,
    seed: int,
    now: float,
    verifiers: Mapping[str, Verifier],
    demonstrations: Sequence[Example] = (),
    rationalized: Sequence[Fresh] = (),
    quarantined: Collection[str] = (),
    replay: Sequence[Earlier] = (),
    keep_failures: bool = False,
    cluster_of: Callable[[Episode], str] = episode_cluster,
) -> Batch:
    """Choose what trains, and with which weight.

    Steps: consent, split, main line, verdict, age, success or near-success, token sequences, quarantine, exact
    duplicates, near-copies, examples of one user, balance of kinds and strategies, budget; then demonstrations, those
    given here and those that came as feedback on train episodes; then replay of earlier batches; at last one user's
    share of the weight, and mean 1.

    Args:
        episodes: of the train split; others are dropped as ``not_train``.
        verdicts: of these episodes and of those replayed; others are ignored.
        feedback: of all kinds; only ``demonstration`` feedback is an item.
        settings: thresholds and caps.
        seed: decides between equals.
        now: end of the window, Unix seconds, from which ages count.
        verifiers: by name; a demonstration on a task must pass the task's verifier, and is dropped when that
            is not among them. Feedback alone trains only where no program can check.
        demonstrations: the operator's own; all of them train, a prompt's copies aside.
        rationalized: verified answers that were found with a hint and hold it no more, with the users whose tasks they
            answer; caps and weights hold for them and traffic together.
        quarantined: ids of examples that trained what was rolled back; nothing of their episodes trains again.
        replay: examples of earlier batches that may train again, one record an id.
        keep_failures: for objectives that learn from rewards. Every judged answer stays, and nothing that looks at
            answers drops or weighs any: copies, near-copies and strategies of a group are what its mean is made of. An
            answer that was picked among several does not (``searched``): it would lift that mean. All choices of its
            call may, as :func:`tidegate.core.searched.searched_groups` takes them apart.
        cluster_of: names the strategy of an episode, of which only the main line is passed.

    Returns:
        The batch; the same input in any order gives the same bytes.
    """
    judged = verdicts_by_episode(verdicts)
    steps = _Steps(
        settings=settings, seed=seed, quarantined=frozenset(map(origin_of, quarantined)), keep_failures=keep_failures
    )
    fresh = steps.fresh(episodes, judged, now=now, cluster_of=cluster_of, rationalized=rationalized)
    given = steps.given(demonstrations)
    shown = steps.shown(shown_demonstrations(episodes, feedback, verifiers), given, fresh)
    again = steps.again(replay, judged, window={episode.id for episode in episodes}, beside=(*fresh, *given, *shown))
    whole = within_user_share((*fresh, *given, *shown, *again), share=settings.max_user_share)
    return make_batch(
        [item.example for item in normalised_weights(whole)],
        steps.dropped,
        seed=seed,
        settings=settings.model_dump(mode="json"),
        keep_failures=keep_failures,
    )


@dataclass(slots=True, kw_only=True)
class _Steps:
    """The steps with what all of them need; collects what they drop."""

    settings: CurationSettings
    seed: int
    quarantined: frozenset[str]
    keep_failures: bool
    dropped: list[Dropped] = field(default_factory=list[Dropped])

    def take(self, sifted: Sifted[_Thing]) -> tuple[_Thing, ...]:
        self.dropped.extend(sifted.dropped)
        return sifted.kept

    def fresh(
        self,
        episodes: Sequence[Episode],
        judged: Mapping[str, Sequence[Verdict]],
        *,
        now: float,
        cluster_of: Callable[[Episode], str],
        rationalized: Sequence[Fresh],
    ) -> tuple[Fresh, ...]:
        settings, seed = self.settings, self.seed
        kept = self.take(with_consent(episodes))
        kept = self.take(of_train_split(kept))
        kept = self.take(main_line(kept))
        if self.keep_failures:
            kept = self.take(not_searched(kept))
        kept = self.take(with_verdict(kept, judged))
        kept = self.take(not_stale(kept, now=now, max_age_days=settings.max_age_days))
        scores = deciding_scores(kept, judged)
        if not self.keep_failures:
            floor = near_success_floor(
                list(scores.values()), threshold=settings.success_threshold, quantile=settings.near_success_quantile
            )
            kept = self.take(successful(kept, scores, threshold=settings.success_threshold, above=floor))
        fresh = self.take(token_sequences(kept, rewards=scores, cluster_of=cluster_of))
        fresh = self.take(self._not_quarantined((*fresh, *rationalized)))
        if not self.keep_failures:
            fresh = tuple(map(self._near_successes_weigh_less, fresh))
            fresh = self.take(distinct(fresh, copies=settings.max_per_prompt, seed=seed, prefer=self._is_success))
            fresh = self.take(near_distinct(fresh, most=settings.max_per_cluster, seed=seed, prefer=self._is_success))
        first = no_preference if self.keep_failures else self._is_success
        fresh = self.take(per_user(fresh, most=settings.max_per_user, seed=seed, prefer=first))
        fresh = balanced(fresh, by_cluster=not self.keep_failures)
        return self.take(weighted_sample(fresh, budget=settings.max_examples, seed=seed))

    def given(self, demonstrations: Sequence[Example]) -> tuple[Fresh, ...]:
        given = self.take(unique_demonstrations(demonstrations))
        return self.take(per_prompt(given, most=self.settings.max_per_prompt, seed=self.seed))

    def shown(self, sifted: Sifted[Fresh], given: Sequence[Fresh], fresh: Sequence[Fresh]) -> tuple[Fresh, ...]:
        settings, seed = self.settings, self.seed
        shown = self.take(self._not_quarantined(self.take(sifted)))
        prompts = Counter(prompt_key(item.example) for item in given)
        shown = self.take(per_prompt(shown, most=settings.max_per_prompt, seed=seed, used=prompts))
        users = Counter(item.user_key for item in fresh)
        shown = self.take(per_user(shown, most=settings.max_per_user, seed=seed, used=users))
        solved = Counter(item.example.kind for item in fresh if self._is_success(item) and _is_unaided(item))
        allowed = per_kind(
            shown,
            solved=solved,
            enough=settings.min_fresh,
            share=settings.demonstration_share,
            most=settings.max_examples,
            seed=seed,
        )
        return self.take(within_budget(self.take(allowed), budget=settings.max_examples, seed=seed))

    def again(
        self,
        replay: Sequence[Earlier],
        judged: Mapping[str, Sequence[Verdict]],
        *,
        window: Collection[str],
        beside: Sequence[Fresh],
    ) -> tuple[Fresh, ...]:
        settings, seed = self.settings, self.seed
        scores = None if self.keep_failures else deciding_scores([item.episode for item in replay], judged)
        pool = self.take(replayable(replay, window=window, scores=scores, threshold=settings.success_threshold))
        pool = self.take(self._not_quarantined(pool))
        if not self.keep_failures:
            copies = Counter(map(copy_key, beside))
            pool = self.take(distinct(pool, copies=settings.max_per_prompt, seed=seed, used=copies))
        users = Counter(item.user_key for item in beside)
        pool = self.take(per_user(pool, most=settings.max_per_user, seed=seed, used=users))
        size = replay_size(len(beside), share=settings.replay_share)
        return self.take(balanced_draw(pool, size=size, seed=seed))

    def _not_quarantined(self, fresh: Sequence[Fresh]) -> Sifted[Fresh]:
        """What did not train anything that was rolled back."""
        return sift(
            fresh,
            lambda item: "quarantined" if origin_of(item.example.id) in self.quarantined else None,
            dropped_example,
        )

    def _is_success(self, item: Fresh) -> bool:
        return item.example.reward is not None and item.example.reward >= self.settings.success_threshold

    def _near_successes_weigh_less(self, item: Fresh) -> Fresh:
        if self._is_success(item):
            return item
        return replace(item, example=replace(item.example, weight=self.settings.near_success_weight))


def _is_unaided(item: Fresh) -> bool:
    """Whether the model found the answer without a hint."""
    return item.example.source == EPISODE
