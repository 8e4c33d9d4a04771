"""A cycle replays from what earlier cycles trained on, whatever became of their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gate_engine import make_grading
from store_samples import interaction, release
from tidegate.config import Settings
from tidegate.core.types import Choice, Outcome, Split, Task, Verdict
from tidegate.curation import Batch, read_batch
from tidegate.cycle.machine import Step, StepResult
from tidegate.cycle.stages import CycleStages
from tidegate.cycle.steps import cycle_steps, new_config
from tidegate.stores.memory import MemoryAuditLog, MemoryCycleStore, MemoryReleaseStore, MemoryTrajectoryStore

TASK = Task(id="t", messages=({"role": "user", "content": "2+2?"},), verifier="numeric", reference=4)


class World:
    """Stores that are never lost, and windows of traffic that come one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = MemoryTrajectoryStore()
        self.cycles = MemoryCycleStore()
        self.releases = MemoryReleaseStore(MemoryAuditLog())
        self.releases.add_release(release())
        self.quarantined: list[str] = []
        self.now = 0.0
        self.settings = Settings(curation={"min_fresh": 1, "replay_share": 0.5})  # type: ignore[arg-type]

    def stages(self) -> CycleStages:
        def never(*arguments: object) -> Any:
            raise AssertionError(arguments)

        return CycleStages(
            settings=self.settings,
            trajectories=self.store,
            manifests=self.store,
            sealed_episodes=list,
            releases=self.releases,
            verifiers={},
            grading=make_grading(),
            open_engine=never,
            open_gate=never,
            publish=never,
            canary=None,
            quarantined=lambda: self.quarantined,
            save_certificate=never,
            base_model=self.root,
            base_sha256="b" * 64,
            adapters_dir=self.root,
            batches_dir=self.root / "batches",
            rollouts_dir=self.root / "rollouts",
            clock=lambda: self.now,
        )

    def answer(self, names: Sequence[str], *, score: float = 1.0) -> None:
        """An episode of a user each, a second apart."""
        for name in names:
            self.now += 1.0
            tokens = tuple(ord(letter) for letter in name)
            choice = Choice(index=0, token_ids=tokens, logprobs=(-0.5,) * len(tokens), text=name)
            made = interaction(f"i-{name}", episode=name, user_key=name, at=self.now, task=TASK, choices=(choice,))
            self.store.append_interactions([replace(made, split=Split.TRAIN)])
            fields = {"version": "1", "score": score, "detail": "", "seconds": 0.0, "created_at": self.now}
            self.store.append_verdicts(
                [
                    Verdict(
                        episode_id=name,
                        verifier="numeric",
                        outcome=Outcome.FAIL if score < 1 else Outcome.PASS,
                        **fields,
                    )
                ]  # type: ignore[arg-type]
            )

    async def curated(
        self, names: Sequence[str], *, ends: str = "done", last: str = "train"
    ) -> tuple[Batch, StepResult]:
        """A window of traffic, and a cycle that curates it and publishes, or ends otherwise after step ``last``."""
        self.answer(names)
        stages = self.stages()
        config = new_config(stages, self.cycles, proposed=None)
        number = str(config["number"])
        self.cycles.open_cycle(number, config=config, time=self.now)
        result = await cycle_steps(stages)[Step.CURATE](config, {}, lambda detail: None)
        outputs = {"collect": {"until": config["until"]}, "curate": result.output}
        outputs.setdefault(last, {})
        for step, output in outputs.items():
            self.cycles.finish_step(number, step, {"output": output}, time=self.now)
        self.cycles.close_cycle(number, ends, time=self.now)
        return read_batch(self.root / "batches" / str(result.output["path"])), result


def trained(batch: Batch) -> dict[str, set[str]]:
    return {
        source: {example.id for example in batch.examples if example.source == source}
        for source in Counter(example.source for example in batch.examples)
    }


async def test_what_was_replayed_and_what_was_fresh_both_come_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    batch, result = await world.curated(["ab", "cd"])
    assert trained(batch) == {"episode": {"ab", "cd"}}
    assert result.output["earlier"] == {}
    batch, result = await world.curated(["ef"])
    assert trained(batch)["episode"] == {"ef"}
    assert trained(batch)["replay"] < {"ab", "cd"}
    assert result.output["earlier"] == {"read": 1}
    assert result.output["by_source"] == {"episode": 1, "replay": 1}
    assert result.output["with_logprobs"] == 2
    batch, result = await world.curated(["kl", "mn", "op", "qr", "st"])
    assert trained(batch)["replay"] == {"ab", "cd", "ef"}
    assert result.output["earlier"] == {"read": 2}


async def test_a_batch_that_is_gone_damaged_or_quarantined_is_counted_and_does_not_end_the_cycle(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    batches = [(await world.curated(names))[0] for names in (["ab"], ["cd"], ["ef"], ["gh"])]
    gone, damaged, bad, good = (tmp_path / "batches" / batch.hash for batch in batches)
    gone.rename(tmp_path / "elsewhere")
    (damaged / "examples.jsonl").write_text("{}\n")
    world.quarantined.append(bad.name)
    batch, result = await world.curated(["ij", "kl", "mn", "op", "qr"])
    assert result.output["earlier"] == {"missing": 1, "quarantined": 1, "read": 1, "unreadable": 1}
    replayed = trained(batch)["replay"]
    assert "gh" in replayed
    assert replayed == {example.id for example in read_batch(good).examples} - {"ef"}


async def test_what_never_trained_is_not_replayed(tmp_path: Path) -> None:
    """A cycle that ended at its curation, or failed in training, trained on nothing; a refused one did."""
    world = World(tmp_path)
    published, _ = await world.curated(["ab"])
    curated, _ = await world.curated(["cd"], ends="abstained", last="curate")
    failed, _ = await world.curated(["ef"], ends="failed", last="train_error")
    refused, _ = await world.curated(["gh"], ends="refused")
    assert len({batch.hash for batch in (published, curated, failed, refused)}) == 4
    assert new_config(world.stages(), world.cycles, proposed=None)["batches"] == [published.hash, refused.hash]


async def test_what_a_quarantined_batch_only_replayed_trains_on(tmp_path: Path) -> None:
    """It trained champions that were good before the batch was made."""
    world = World(tmp_path)
    good, _ = await world.curated(["ab", "cd"])
    bad, _ = await world.curated(["ef", "gh", "ij"])
    assert trained(bad)["replay"] == {"ab", "cd"}
    world.quarantined.append(bad.hash)
    batch, result = await world.curated(["kl", "mn", "op", "qr", "st"])
    assert trained(batch)["replay"] == trained(good)["episode"]
    assert result.output["earlier"] == {"quarantined": 1, "read": 1}
    assert "quarantined" not in result.output["counts"]
    world.quarantined.append(good.hash)
    batch, _ = await world.curated(["uv", "wx", "yz", "za", "zb"])
    assert trained(batch)["replay"].isdisjoint({"ab", "cd", "ef", "gh", "ij"})


async def test_an_example_whose_episode_was_erased_is_counted_and_not_replayed(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.curated(["ab", "cd"])
    kept = World(tmp_path)
    kept.cycles = world.cycles
    kept.answer(["cd"])
    kept.now = world.now
    batch, result = await kept.curated(["ef", "gh", "ij"])
    assert trained(batch)["replay"] == {"cd"}
    assert result.output["earlier"] == {"read": 1, "without_episode": 1}


async def test_objectives_that_learn_from_rewards_get_the_failures_too(tmp_path: Path) -> None:
    for objective, rewards in (("sft", {1.0}), ("grpo", {0.0, 1.0}), ("kto", {0.0, 1.0})):
        world = World(tmp_path / objective)
        world.settings = Settings(curation={"min_fresh": 1}, training={"objective": objective})  # type: ignore[arg-type]
        world.answer(["ab", "cd"], score=0.0)
        batch, result = await world.curated(["ef"])
        assert {example.reward for example in batch.examples} == rewards
        assert result.output["fresh"] == 1


async def test_the_same_cycle_curates_the_same_batch_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.curated(["ab", "cd"])
    world.answer(["ef", "gh"])
    config = new_config(world.stages(), world.cycles, proposed=None)
    assert len(config["batches"]) == 1
    hashes: set[str] = set()
    for _ in range(2):
        world.now += 1000.0
        result = await cycle_steps(world.stages())[Step.CURATE](config, {}, lambda detail: None)
        hashes.add(str(result.output["manifest_hash"]))
    assert len(hashes) == 1
    before = {name: value for name, value in config.items() if name != "batches"}  # a cycle opened by an older version
    result = await cycle_steps(world.stages())[Step.CURATE](before, {}, lambda detail: None)
    assert result.output["by_source"] == {"episode": 2}
