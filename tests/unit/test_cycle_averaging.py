"""Which share of the way from the champion to the challenger a cycle proposes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_fixtures import write_adapter, write_tiny_model
from rollout_world import UNTIL, CharacterEngine, RolloutWorld, asked, sum_task
from tidegate.artifacts import MANIFEST_FILE, read_json
from tidegate.core.types import Episode, GenerationRequest, Split
from tidegate.cycle.averaging import averaged
from tidegate.training import degrade_adapter

SHARES = (0.25, 0.5)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Directory of adapters, champion, challenger."""
    folder = tmp_path_factory.mktemp("ends") / "adapters"
    champion = write_adapter(folder / "made", write_tiny_model(folder.parent / "model"))
    (folder / "made").rename(folder / champion.sha256)
    return folder, champion.sha256, degrade_adapter(folder / champion.sha256, folder, seed=1, scale=1.0).name


def dev_episodes(count: int) -> list[Episode]:
    calls = [replace(asked(sum_task(n), user=f"dev-{n}"), split=Split.DEV) for n in range(count)]
    return [Episode(id=c.episode_id, user_key=c.user_key, split=Split.DEV, interactions=(c,)) for c in calls]


async def choose(
    ends: tuple[Path, str, str], tmp_path: Path, solves: dict[float, int], *, dev: int = 4
) -> tuple[float, str, dict[str, Any]]:
    """The chosen share, adapter and output when the adapter at each share solves so many tasks."""
    folder, champion, challenger = ends

    def share_of(sha256: str) -> float:
        about = read_json(folder / sha256 / MANIFEST_FILE, "manifest").get("averaged")
        return 1.0 if sha256 == challenger else float(about["share"])

    world = RolloutWorld(tmp_path)

    def say(request: GenerationRequest) -> str:
        number = int(request.messages[-1]["content"].split()[1])
        (adapter,) = (known for known in engine.adapters.values() if known.name == request.adapter)
        return str(number + 1) if number < solves[share_of(adapter.sha256)] else "no idea"

    engine = world.engine = CharacterEngine(say=say)
    stages = replace(world.stages(), adapters_dir=folder)
    config = {"seed": 3, "until": UNTIL, "training": {"averaging": list(SHARES)}}
    told: list[Any] = []
    sha256, output = await averaged(
        stages, config, champion=champion, challenger=challenger, dev=dev_episodes(dev), report=told.append
    )
    assert engine.adapters == {}
    assert len(told) == (len(SHARES) + 1 if dev else 0)
    return share_of(sha256), sha256, dict(output)


@pytest.mark.parametrize(
    ("solves", "best"),
    [
        ({0.25: 1, 0.5: 3, 1.0: 2}, 0.5),
        ({0.25: 1, 0.5: 2, 1.0: 4}, 1.0),
        ({0.25: 3, 0.5: 3, 1.0: 3}, 0.25),
        ({0.25: 0, 0.5: 0, 1.0: 0}, 0.25),
    ],
)
async def test_what_solves_most_is_proposed_and_of_equals_the_nearest_to_the_champion(
    ends: tuple[Path, str, str], tmp_path: Path, solves: dict[float, int], best: float
) -> None:
    share, _, output = await choose(ends, tmp_path, solves)
    assert share == best
    assert output["dev_solved"] == {f"{at:g}": count for at, count in solves.items()}
    assert (output["share"], output["dev_tasks"]) == (best, 4)


async def test_without_dev_tasks_the_challenger_itself_is_proposed(ends: tuple[Path, str, str], tmp_path: Path) -> None:
    share, sha256, output = await choose(ends, tmp_path, {0.25: 9, 0.5: 9, 1.0: 0}, dev=0)
    assert (share, sha256) == (1.0, ends[2])
    assert output["why"] == "no dev tasks to choose on"
