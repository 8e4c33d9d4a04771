"""A cycle leaves out what trained a candidate that was rolled back, whichever window it lies in."""

from __future__ import annotations

from pathlib import Path

from gate_engine import make_grading
from store_samples import interaction, release
from tidegate.config import Settings
from tidegate.core.types import Outcome, Split, Task, Verdict
from tidegate.curation import read_batch
from tidegate.cycle.machine import CycleOutcome, Step
from tidegate.cycle.stages import CycleStages
from tidegate.cycle.steps import cycle_steps
from tidegate.stores.memory import MemoryAuditLog, MemoryReleaseStore, MemoryTrajectoryStore

TASK = Task(id="t", messages=({"role": "user", "content": "2+2?"},), verifier="numeric", reference=4)


async def test_a_quarantined_batch_trains_no_more(tmp_path: Path) -> None:
    store = MemoryTrajectoryStore()
    names = ("one", "two", "three")
    store.append_interactions(
        [interaction(f"i-{n}", episode=n, user_key=n, split=Split.TRAIN, task=TASK) for n in names]
    )
    fields = {"verifier": "numeric", "version": "1", "score": 1.0, "detail": "", "seconds": 0.0, "created_at": 1.0}
    store.append_verdicts([Verdict(episode_id=name, outcome=Outcome.PASS, **fields) for name in names])
    releases = MemoryReleaseStore(MemoryAuditLog())
    releases.add_release(release())
    quarantined: list[str] = []
    settings = Settings(curation={"min_fresh": 1, "max_per_prompt": 9})  # type: ignore[arg-type]

    async def curated() -> tuple[str, set[str], CycleOutcome | None]:
        stages = CycleStages(
            settings=settings,
            trajectories=store,
            manifests=store,
            sealed_episodes=list,
            releases=releases,
            verifiers={},
            grading=make_grading(),
            open_engine=lambda: (_ for _ in ()).throw(AssertionError("no rollouts here")),
            open_gate=lambda progress: (_ for _ in ()).throw(AssertionError(progress)),
            publish=lambda candidate, against: (_ for _ in ()).throw(AssertionError((candidate, against))),
            canary=None,
            quarantined=lambda: quarantined,
            save_certificate=lambda certificate: None,
            base_model=tmp_path,
            base_sha256="b" * 64,
            adapters_dir=tmp_path,
            batches_dir=tmp_path / "batches",
            rollouts_dir=tmp_path / "rollouts",
            clock=lambda: 2.0,
        )
        config = {
            "proposed": None, "after": 0.0, "until": 10.0, "seed": 0,
            "curation": settings.curation.model_dump(mode="json"),
            "training": settings.training.model_dump(mode="json"),
        }  # fmt: skip
        result = await cycle_steps(stages)[Step.CURATE](config, {}, lambda detail: None)
        batch = read_batch(tmp_path / "batches" / str(result.output["path"]))
        return batch.hash, {example.id for example in batch.examples}, result.ends

    first, trained, ends = await curated()
    assert (len(trained), ends) == (3, None)
    quarantined.append(first)
    second, trained, ends = await curated()
    assert (trained, ends) == (set(), CycleOutcome.ABSTAINED)
    quarantined[:] = ["0" * 64, second]  # one that is not known here, and one that trained nothing
    assert len((await curated())[1]) == 3
