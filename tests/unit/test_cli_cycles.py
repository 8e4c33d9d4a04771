"""What people see of a cycle while it runs: steps and notes, not every figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from tidegate.app.learning import _notes_for
from tidegate.cli.main import app

EVENTS = [
    {"step": "train", "what": "started", "detail": {}},
    {"step": "train", "what": "progress", "detail": {"step": 1, "loss": 2.5}},
    {"step": "train", "what": "progress", "detail": {"note": "no checkpoint after step 2 (disk full)"}},
    {"step": "train", "what": "finished", "detail": {"seconds": 3.0}},
]


async def told(settings: Any, *, candidate: Any, observe: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    del settings, candidate
    for event in EVENTS:
        observe(event)
    return {"cycle": "c", "outcome": "done", "reasons": []}


def test_notes_are_shown_and_figures_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.app.learning.run_one_cycle", told)
    shown = CliRunner().invoke(app, ["cycle", "run"])
    assert shown.exit_code == 0
    lines = [line.split(maxsplit=1)[1] for line in shown.output.splitlines() if line.startswith("train")]
    assert lines == ["started", "no checkpoint after step 2 (disk full)", "finished after 3.0 s"]


def test_training_on_demonstrations_tells_notes_only() -> None:
    said: list[str] = []
    tell = _notes_for(said.append)
    for event in EVENTS:
        tell(event["detail"])
    assert said == ["no checkpoint after step 2 (disk full)"]
