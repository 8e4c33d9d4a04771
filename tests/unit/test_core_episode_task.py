"""The task of an episode is what its main line was asked."""

from __future__ import annotations

from dataclasses import replace

from store_samples import interaction
from tidegate.core.types import Episode, Task

MAIN = Task(id="task-main", messages=({"role": "user", "content": "2+2"},), verifier="numeric", reference=4)
SIDE = replace(MAIN, id="task-side")


def test_a_task_on_a_side_line_is_not_the_episodes() -> None:
    calls = (
        replace(interaction("helper"), main_line=False, task=SIDE),
        replace(interaction("first"), task=MAIN),
    )
    episode = Episode(id="e", user_key=calls[0].user_key, split=calls[0].split, interactions=calls)
    assert episode.task == MAIN
    assert replace(episode, interactions=calls[:1]).task is None
