"""kill -9 while the champion is asked again: the next run asks anew and ends as an undisturbed run ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from loop_world import LoopWorld
from tidegate.curation import read_batch, read_rollouts

ENDS_AFTER_CURATION = ("min_fresh = 4\n", "min_fresh = 400\n")
ROLLOUTS = "[rollouts]\nsamples = 3\nmax_tasks = 6\ntemperature = 1.5\n"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded traffic before any cycle."""
    root = tmp_path_factory.mktemp("explore") / "pristine"
    world = LoopWorld.with_traffic(root)
    asyncio.run(world.first_release())
    return root


@pytest.fixture(scope="module")
def undisturbed(pristine: Path) -> dict[str, Any]:
    world = _copy(pristine, "undisturbed")
    return _essence(world, world.cycle())


def _copy(pristine: Path, name: str) -> LoopWorld:
    root = pristine.parent / name
    shutil.copytree(pristine / "data", root / "data")
    world = LoopWorld(root, pristine / "model")
    world.config.write_text(world.config.read_text().replace(*ENDS_AFTER_CURATION) + ROLLOUTS)
    return world


def _essence(world: LoopWorld, result: dict[str, Any]) -> dict[str, Any]:
    """All but log-probabilities, whose last digits depend on which answers the engine computed together."""
    explored = result["steps"]["explore"]
    rollouts = read_rollouts(world.data.rollouts / explored["path"])
    tokens = {
        episode.id: [(call.prompt_token_ids, call.choices[0].token_ids) for call in episode.interactions]
        for episode in rollouts.episodes
    }
    batch = read_batch(world.data.batches / result["steps"]["curate"]["path"])
    return {
        "outcome": result["outcome"],
        "counts": explored["counts"],
        "tokens": tokens,
        "items": batch.manifest["items"],
        "trained": [(example.id, example.token_ids, example.loss_mask) for example in batch.examples],
    }


def test_rollouts_are_part_of_the_cycle(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["outcome"] == "abstained"
    assert undisturbed["counts"]["tasks"] == {"asked": 6, "task_cap": 6}
    assert undisturbed["counts"]["answers"]["answered"] == 18
    assert sum(item["id"].startswith("rollout-") for item in undisturbed["items"]) == 18


@pytest.mark.parametrize("moment", ["started", "progress", "finished"])
def test_a_cycle_killed_while_it_explores_is_resumed_and_ends_the_same(
    pristine: Path, undisturbed: dict[str, Any], moment: str
) -> None:
    world = _copy(pristine, moment)
    assert world.cycle_killed_in("explore", moment) == -signal.SIGKILL
    assert _essence(world, world.cycle()) == undisturbed
    assert len(list(world.data.rollouts.iterdir())) == 1
    assert world.tidegate("audit", "verify").returncode == 0
