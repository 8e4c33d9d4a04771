"""What a search at serving leaves for training: all choices of its calls, judged one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.searched import searched_groups
from tidegate.core.types import Episode, Verdict
from tidegate.cycle.stages import CycleStages
from tidegate.signals import score_episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Choices as episodes of their own, and the verdicts on them. No store holds them: no user had such an episode."""

    episodes: Sequence[Episode]
    verdicts: Sequence[Verdict]


def no_groups() -> Groups:
    """Those of an objective that learns from what was delivered."""
    return Groups(episodes=(), verdicts=())


def judged_groups(stages: CycleStages, window: Sequence[Episode]) -> Groups:
    """Take the searched calls of a window apart and judge every choice, also those that nobody got.

    Args:
        stages: of the cycle.
        window: train episodes.
    """
    episodes = searched_groups(window)
    scoring = score_episodes(
        episodes,
        stages.verifiers,
        (),
        stages.clock,
        open_ttl_s=stages.settings.server.episode_ttl_s,
        max_calls=stages.settings.cycle.max_calls,
    )
    return Groups(episodes=episodes, verdicts=scoring.verdicts)
