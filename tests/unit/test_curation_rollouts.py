"""Rollouts on disk: what is written is read again, changes are found, and text keeps its form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_world import asked, sum_task, verdict_on
from tidegate.core.errors import ConfigError
from tidegate.core.hashing import canonical_json
from tidegate.core.selection.sequences import Fresh
from tidegate.core.types import Episode, Example, FinishReason, Sampling
from tidegate.curation import Judged, Rollouts, make_rollouts, no_rollouts, read_rollouts, write_rollouts
from tidegate.signals.environments import Calculator


def some() -> Rollouts:
    task = sum_task(
        1, tools=Calculator.tools, environment="calculator", reference={"answer": 2},
        messages=({"role": "user", "content": "grüß dich \ud83d", "b": 1, "a": [1.5, None]},),
    )  # fmt: skip
    call = asked(task, sampling=Sampling(temperature=0.7, stop=("\n", "END"), seed=2**31 - 1))
    called = replace(
        call.choices[0],
        tool_calls=({"id": "c", "type": "function", "function": {"name": "calculator", "arguments": "{}"}},),
        finish_reason=FinishReason.TOOL_CALLS, invalid_tool_call=True,
    )  # fmt: skip
    calls = (replace(call, choices=(called,)), replace(call, id="i-2"))
    episode = Episode(id=call.episode_id, user_key="u", split=call.split, interactions=calls)
    example = Example(
        id="r", weight=1.0, source="rationalized", kind="sums", token_ids=(1, 2), loss_mask=(0, 1), reward=1.0,
        sampled_at=5.0,
    )  # fmt: skip
    judged = Judged(episode=episode, verdict=verdict_on(call, passed=True))
    found = Fresh(example=example, user_key="u", prompt=task.messages, answer="grüß dich \ud83d")
    return make_rollouts([judged], [found], account={"seed": 1, "counts": {"a": 1}})


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    rollouts = some()
    path = write_rollouts(rollouts, tmp_path)
    assert path.name == rollouts.hash
    assert read_rollouts(path) == rollouts
    assert (rollouts.episodes, rollouts.verdicts) == ((rollouts.judged[0].episode,), (rollouts.judged[0].verdict,))
    assert rollouts.manifest["counts"] == {"a": 1}
    first = json.loads((path / "episodes.jsonl").read_text().splitlines()[0])
    assert list(first["episode"]["interactions"][0]["messages"][0]) == [
        "role",
        "content",
        "b",
        "a",
    ]  # as templates see it


def test_writing_again_changes_nothing(tmp_path: Path) -> None:
    path = write_rollouts(some(), tmp_path)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    assert write_rollouts(some(), tmp_path) == path
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_cycle_without_rollouts_has_none() -> None:
    assert (no_rollouts().episodes, no_rollouts().verdicts, no_rollouts().rationalized) == ((), (), ())


@pytest.mark.parametrize("name", ["episodes.jsonl", "rationalized.jsonl"])
def test_a_file_that_was_changed_or_lost_is_refused(tmp_path: Path, name: str) -> None:
    path = write_rollouts(some(), tmp_path)
    (path / name).write_bytes((path / name).read_bytes() + b"\n")
    with pytest.raises(ConfigError, match=f"{name}' were changed.*tidegate cycle abandon"):
        read_rollouts(path)
    (path / name).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rollouts(path)


def test_a_manifest_that_was_changed_or_is_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = write_rollouts(some(), tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(canonical_json({**manifest, "seed": 2}))
    with pytest.raises(ConfigError, match="were changed: their manifest"):
        read_rollouts(path)
    (path / "manifest.json").write_text(canonical_json({**manifest, "schema": "tidegate.rollouts/9"}))
    with pytest.raises(ConfigError, match=r"'tidegate\.rollouts/9'; 'tidegate\.rollouts/1' is read here"):
        read_rollouts(path)
    (path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        read_rollouts(path)
