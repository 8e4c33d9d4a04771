"""Replay: what trained in earlier cycles trains again beside the fresh examples, so that it is not forgotten."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate.core.searched import is_searched
from tidegate.core.selection.episodes import is_train
from tidegate.core.selection.limits import dropped_example
from tidegate.core.selection.sequences import Fresh
from tidegate.core.selection.sifting import REPLAY, Sifted, sift
from tidegate.core.types import Episode, Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """An example of an earlier batch and the episode that it came from, as it is recorded now."""

    example: Example
    episode: Episode


def replayable(
    earlier: Sequence[Earlier],
    *,
    window: Collection[str],
    scores: Mapping[str, float] | None,
    threshold: float,
) -> Sifted[Fresh]:
    """What of the earlier batches may train again, by what is known now, as examples of source ``replay``.

    Dropped are episodes of which a call without consent or of another split was recorded since, those of the window
    itself (``in_window``: fresh examples are judged anew and not replaced), and sampled answers whose score is below
    the threshold: near-successes, failures that an objective with rewards had kept, and successes that a newer verdict
    took back. Of an episode that a search answered (``searched``) only the answer that was delivered trains again,
    which its verdict is about, and only where failures are not kept. Weights are 1 again.

    Args:
        earlier: one record an example id.
        window: ids of the window's episodes.
        scores: deciding score by episode id; None keeps answers of any score.
        threshold: of success, in [0, 1].
    """

    def reason_against(item: Earlier) -> str | None:
        episode = item.episode
        reason = None
        if not all(call.consent for call in episode.interactions):
            reason = "no_consent"
        elif not is_train(episode):
            reason = "not_train"
        elif episode.id in window:
            reason = "in_window"
        elif _is_of_a_search(item) and (scores is None or item.example.id != episode.id):
            reason = "searched"
        elif scores is not None and item.example.reward is not None and scores.get(episode.id, -1.0) < threshold:
            reason = "below_threshold"
        return reason

    ordered = sorted(earlier, key=lambda item: item.example.id)
    sifted = sift(ordered, reason_against, lambda item, reason: dropped_example(_replayed(item), reason))
    return Sifted(kept=tuple(map(_replayed, sifted.kept)), dropped=sifted.dropped)


def _is_of_a_search(item: Earlier) -> bool:
    """Whether the example is an answer of a searched episode; demonstrations about one are not."""
    return item.example.reward is not None and is_searched(item.episode)


def replay_size(others: int, *, share: float) -> int:
    """The largest number of replayed examples that are at most ``share`` of a batch with ``others`` more.

    Args:
        others: examples of the batch that are not replayed.
        share: in [0, 1).
    """
    return math.floor(share / (1 - share) * others + 1e-9)  # 1e-9: 0.15 / 0.85 * 17 may come out below 3


def _replayed(item: Earlier) -> Fresh:
    return Fresh(example=replace(item.example, source=REPLAY, weight=1.0), user_key=item.episode.user_key)
