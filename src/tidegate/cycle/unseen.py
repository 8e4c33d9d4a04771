"""Which sealed tasks were also asked in the open, where an answer to them may have been learnt by heart.

It is the sealed side that gives way: curation could only drop the other copy if it were told what is sealed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidegate.core.selection.near_duplicates import PromptIndex
from tidegate.core.types import Episode, Split, Task
from tidegate.ports import TrajectoryStore

SAME = "also asked by train or dev users"
NEARLY = "nearly asked by train or dev users"


class AskedInTheOpen:
    """What train and dev users asked so far.

    Args:
        trajectories: of the open splits.
    """

    def __init__(self, trajectories: TrajectoryStore) -> None:
        episodes = trajectories.list_episodes(splits=(Split.TRAIN, Split.DEV))
        tasks = {episode.task.id: episode.task for episode in episodes if episode.task is not None}
        self._ids = frozenset(tasks)
        self._prompts = PromptIndex(task.messages for task in tasks.values())

    def how(self, task: Task) -> str | None:
        """``SAME`` or ``NEARLY`` where such a user asked the task or almost the same words, None where none did."""
        if task.id in self._ids:
            return SAME
        return NEARLY if self._prompts.has_near(task.messages) else None

    def holds(self, task: Task) -> bool:
        """Whether such a user asked the task or almost the same words."""
        return self.how(task) is not None


def unseen(asked: AskedInTheOpen, replayable: Sequence[Episode]) -> tuple[list[tuple[str, Task]], dict[str, int]]:
    """(user key, task) of the sealed episodes whose task nobody asked in the open, and how many tasks somebody did."""
    tasks: list[tuple[str, Task]] = []
    excluded: Counter[str] = Counter({SAME: 0, NEARLY: 0})
    for episode in replayable:
        if episode.task is None:
            continue
        how = asked.how(episode.task)
        if how is None:
            tasks.append((episode.user_key, episode.task))
        else:
            excluded[how] += 1
    return tasks, dict(excluded)
