"""Which share of the way from the champion to the challenger a cycle proposes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_fixtures import write_adapter, write_tiny_model
from rollout_world import UNTIL, CharacterEngine, RolloutWorld, asked, sum_task
from tidegate.artifacts import MANIFEST_FILE, read_json
from tidegate.core.errors import EngineError
from tidegate.core.types import Episode, GenerationRequest, Split
from tidegate.cycle import steps
from tidegate.cycle.choosing_share import choose_share
from tidegate.cycle.machine import Step
from tidegate.training import TrainingJob, TrainingReport, degrade_adapter

SHARES = (0.25, 0.5)
REPORT = TrainingReport(
    adapter_sha256="", adapter_path="", steps=1, examples=1, sequences=1, dropped={}, tokens=1, tokens_computed=1,
    tokens_trained=1, losses=(1.0,), grad_norms=(1.0,), series={}, memory_bound=None, resumed_at=0, seconds=1.0,
    trainable_parameters=1, configured={}, effective={}, guards={},
)  # fmt: skip


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
    ends: tuple[Path, str, str],
    tmp_path: Path,
    solves: dict[float, int],
    *,
    dev: int = 4,
    broken: dict[float, set[int]] | None = None,
) -> tuple[float, str, dict[str, Any]]:
    """The chosen share, adapter and output when the adapter at each share solves the first so many tasks.

    ``broken``: tasks at which the engine fails for a share, however often they are asked.
    """
    folder, champion, challenger = ends

    def share_of(sha256: str) -> float:
        about = read_json(folder / sha256 / MANIFEST_FILE, "manifest").get("averaged")
        return 1.0 if sha256 == challenger else float(about["share"])

    world = RolloutWorld(tmp_path)

    def say(request: GenerationRequest) -> str:
        number = int(request.messages[-1]["content"].split()[1])
        (adapter,) = (known for known in engine.adapters.values() if known.name == request.adapter)
        share = share_of(adapter.sha256)
        if number in (broken or {}).get(share, ()):
            raise EngineError("the engine broke")
        return str(number + 1) if number < solves[share] else "no idea"

    engine = world.engine = CharacterEngine(say=say)
    stages = replace(world.stages(), adapters_dir=folder)
    config = {"seed": 3, "until": UNTIL, "training": {"averaging": list(SHARES)}}
    told: list[Any] = []
    chosen = await choose_share(
        stages, config, champion=champion, challenger=challenger, dev=dev_episodes(dev), report=told.append
    )
    sha256, output = chosen.adapter_sha256, chosen.measured
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
    assert (output["share"], output["dev_tasks"], output["dev_counted"], output["faults"]) == (best, 4, 4, {})


async def test_a_task_that_broke_for_one_candidate_counts_for_none(ends: tuple[Path, str, str], tmp_path: Path) -> None:
    """The challenger solves most; were its faults failures, the average at 0.5 would be proposed."""
    solves = {0.25: 2, 0.5: 5, 1.0: 6}
    share, _, output = await choose(ends, tmp_path, solves, dev=10, broken={1.0: {0, 1}})
    assert (share, output["share"]) == (1.0, 1.0)
    assert output["dev_solved"] == {"0.25": 0, "0.5": 3, "1": 4}
    assert (output["dev_tasks"], output["dev_counted"], output["faults"]) == (10, 8, {"1": 2})
    assert "why" not in output


async def test_above_a_fifth_of_faults_the_challenger_itself_is_proposed(
    ends: tuple[Path, str, str], tmp_path: Path
) -> None:
    broken = {0.25: {7}, 0.5: {8}, 1.0: {8, 9}}
    share, sha256, output = await choose(ends, tmp_path, {0.25: 5, 0.5: 1, 1.0: 0}, dev=10, broken=broken)
    assert (share, sha256, output["share"]) == (1.0, ends[2], 1.0)
    assert (output["dev_counted"], output["faults"]) == (7, {"0.25": 1, "0.5": 1, "1": 2})
    assert output["why"].startswith("faults cut answers to 3 of 10 dev tasks short, more than 20%")


async def test_without_dev_tasks_the_challenger_itself_is_proposed(ends: tuple[Path, str, str], tmp_path: Path) -> None:
    share, sha256, output = await choose(ends, tmp_path, {0.25: 9, 0.5: 9, 1.0: 0}, dev=0)
    assert (share, sha256) == (1.0, ends[2])
    assert output["why"] == "no dev tasks to choose on"


async def test_without_a_champion_the_challenger_is_proposed_and_the_output_says_why(
    ends: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "run_training", lambda job, **options: replace(REPORT, adapter_sha256=ends[2]))
    world = RolloutWorld(tmp_path)
    training = {**world.config["training"], "averaging": [0.5]}
    curated = {Step.CURATE: {"path": "batch", "manifest_hash": "m" * 64}}
    stages = replace(world.stages(), adapters_dir=ends[0])
    result = await steps.train(stages, {**world.config, "training": training}, curated, lambda detail: None)
    assert (result.output["adapter_sha256"], world.opened) == (ends[2], 0)
    assert result.output["averaging"] == {"share": 1.0, "why": "training did not start from a champion"}


@pytest.mark.parametrize("averaging", [[0.5], []])
async def test_the_step_names_the_proposed_adapter_and_beside_it_what_the_trainer_made(
    ends: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaging: list[float]
) -> None:
    folder, champion, challenger = ends
    jobs: list[TrainingJob] = []

    def run(job: TrainingJob, **options: Any) -> TrainingReport:
        del options
        jobs.append(job)
        return replace(REPORT, adapter_sha256=challenger, adapter_path=str(folder / challenger))

    monkeypatch.setattr(steps, "run_training", run)
    world = RolloutWorld(tmp_path)
    world.record(replace(asked(sum_task(1)), split=Split.DEV))
    stages = replace(world.stages(), adapters_dir=folder)
    training = {**world.config["training"], "averaging": averaging}
    config = {**world.config, "champion_sha256": champion, "training": training}
    curated = {"path": "batch", "manifest_hash": "m" * 64}
    output = (await steps.train(stages, config, {Step.CURATE: curated}, lambda detail: None)).output
    proposed = str(output["adapter_sha256"])
    assert (proposed == challenger, "averaging" in output) == (not averaging, bool(averaging))
    assert (output["adapter_path"], output["trained_sha256"]) == (str(folder / proposed), challenger)
    assert (jobs[0].initial_adapter, jobs[0].parent_sha256) == (folder / champion, champion)
    (candidate,) = stages.releases.list_candidates()
    assert (candidate.id, candidate.adapter_sha256) == (output["candidate"], proposed)
    assert (candidate.parent_sha256, candidate.manifest_hash, candidate.origin) == (champion, "m" * 64, "cycle")
