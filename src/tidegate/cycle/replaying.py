"""What earlier cycles trained on, read back for replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.core.errors import ConfigError
from tidegate.core.selection.replay import Earlier
from tidegate.core.selection.sequences import origin_of
from tidegate.core.types import Episode, Example, Split
from tidegate.curation import Batch, episodes_shown, read_batch
from tidegate.cycle.stages import CycleStages


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierExamples:
    """One record an example id, and what became of the batches and examples that were looked at.

    ``counts``: batches that were ``read``, ``quarantined``, ``missing`` or ``unreadable`` (changed, damaged or of
    another schema), and examples whose episode the store does not know (``without_episode``).
    """

    examples: tuple[Earlier, ...]
    counts: Mapping[str, int]


def earlier_examples(stages: CycleStages, batches: Sequence[str], *, until: float) -> EarlierExamples:
    """Read the batches of earlier cycles; one that cannot be read is counted and left out.

    Args:
        stages: of the cycle.
        batches: manifest hashes, oldest first; of an example in several the newest record stands.
        until: end of the window, Unix seconds.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, Example] = {}
    quarantined = frozenset(stages.quarantined())
    for name in batches:
        found = "quarantined" if name in quarantined else _read(stages, name)
        if isinstance(found, Batch):
            examples |= {example.id: example for example in found.examples}
        counts["read" if isinstance(found, Batch) else found] += 1
    episodes = _episodes(stages, until) if examples else {}
    earlier: list[Earlier] = []
    for identifier, example in sorted(examples.items()):
        episode = episodes.get(origin_of(identifier))
        if episode is None:
            counts["without_episode"] += 1
        else:
            earlier.append(Earlier(example=example, episode=episode))
    return EarlierExamples(examples=tuple(earlier), counts=dict(sorted(counts.items())))


def _read(stages: CycleStages, name: str) -> Batch | str:
    path = stages.batches_dir / name
    if not path.is_dir():
        return "missing"
    try:
        return read_batch(path)
    except ConfigError:
        return "unreadable"


def _episodes(stages: CycleStages, until: float) -> dict[str, Episode]:
    """Train episodes by their id and by that of each demonstration about them."""
    episodes = stages.trajectories.list_episodes(splits=(Split.TRAIN,), until=until)
    shown = episodes_shown(episodes, stages.trajectories.list_feedback())
    return {**shown, **{episode.id: episode for episode in episodes}}
