"""What the users of the demonstration ask."""

from __future__ import annotations

from pathlib import Path

from tidegate.demo.plan import ANIMALS, NEW_KIND, Plan
from tidegate.demo.story import _Story


def test_users_ask_about_animals_that_they_know_and_never_twice(tmp_path: Path) -> None:
    story = _Story(tmp_path, Plan(), 3)
    asked = [task for size in (60, 48, 12, 24) for task in story.tasks(size, drifted=True)]
    assert len({task.id for task in asked}) == 144
    legs = [task for task in asked if task.kind == NEW_KIND]
    assert len(legs) == 90
    last = [task.messages[-1]["content"].rstrip("?").split()[-1] for task in legs]
    assert {next(animal for animal in ANIMALS if word in (animal, f"{animal}s")) for word in last} == set(ANIMALS)
    assert _Story(tmp_path, Plan(), 3).tasks(60, drifted=True) == asked[:60]
