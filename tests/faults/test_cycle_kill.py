"""kill -9 in any step of a cycle: the next run resumes it and ends as an undisturbed run ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import pytest

from loop_world import LoopWorld, essence
from tidegate.gate import KeyPair

STEPS = ("collect", "explore", "curate", "train", "screen", "certify", "publish")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded traffic before any cycle; the model is shared, and the gate's key, from which all seeds follow."""
    root = tmp_path_factory.mktemp("loop") / "pristine"
    world = LoopWorld.with_traffic(root)
    asyncio.run(world.first_release())
    KeyPair.load_or_create(world.data.gate_key)
    return root


@pytest.fixture(scope="module")
def undisturbed(pristine: Path) -> dict[str, object]:
    world = _copy(pristine, "undisturbed")
    result = world.cycle()
    assert result["outcome"] == "done", result
    return essence(result, world.decisions())


def _copy(pristine: Path, name: str) -> LoopWorld:
    root = pristine.parent / name
    shutil.copytree(pristine / "data", root / "data")
    return LoopWorld(root, pristine / "model")


@pytest.mark.parametrize(
    ("step", "moment"), [*((step, "started") for step in STEPS), ("train", "finished"), ("certify", "finished")]
)
def test_a_killed_cycle_is_resumed_and_ends_the_same(
    pristine: Path, undisturbed: dict[str, object], step: str, moment: str
) -> None:
    world = _copy(pristine, f"{step}-{moment}")
    assert world.cycle_killed_in(step, moment) == -signal.SIGKILL
    resumed = world.cycle()
    assert essence(resumed, world.decisions()) == undisturbed
    assert world.tidegate("audit", "verify").returncode == 0


def test_death_in_the_middle_of_training_screening_and_certifying(
    pristine: Path, undisturbed: dict[str, object]
) -> None:
    world = _copy(pristine, "thrice")
    for step in ("train", "screen", "certify"):
        assert world.cycle_killed_in(step, "progress") == -signal.SIGKILL
    assert essence(world.cycle(), world.decisions()) == undisturbed
    assert not list(world.data.adapters.glob(".*"))
