"""What the step that collects keeps of the monitors, and the step that trains of its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from store_samples import interaction, release
from tidegate.config import Settings
from tidegate.core.hashing import canonical_json
from tidegate.core.types import Choice, Interaction, JsonObject, Sampling, Split, Task
from tidegate.cycle import monitoring
from tidegate.cycle.machine import Step
from tidegate.cycle.monitoring import training_output
from tidegate.cycle.stages import CycleStages
from tidegate.cycle.steps import cycle_steps
from tidegate.signals import builtin_verifiers
from tidegate.stores.memory import MemoryAuditLog, MemoryReleaseStore, MemoryTrajectoryStore
from tidegate.training import TrainingReport

CONFIG = {"proposed": None, "after": 1000.0, "until": 2000.0, "seed": 0}
TASK = Task(id="t", messages=({"role": "user", "content": "2+2?"},), verifier="numeric_answer", reference=4, kind="sum")


def asked(name: str, at: float, release_id: str, text: str = "4", split: Split = Split.TRAIN) -> Interaction:
    choice = Choice(index=0, token_ids=(5, 6), logprobs=(-0.5, -0.5), text=text)
    return interaction(
        f"i-{name}", episode=f"e-{name}", at=at, user_key=f"u-{name}", split=split, release_id=release_id,
        task=replace(TASK, messages=({"role": "user", "content": f"{name}: 2+2?"},)),
        messages=({"role": "user", "content": f"{name}: 2+2?"},),
        choices=(choice,), sampling=Sampling(),
    )  # fmt: skip


def stages_of(
    traffic: Sequence[Interaction], tmp_path: Path, *, aliases: JsonObject | None = None, policy: Path | None = None
) -> CycleStages:
    store = MemoryTrajectoryStore()
    store.append_interactions(traffic)
    releases = MemoryReleaseStore(MemoryAuditLog())
    for one in (release(0), release(1), release(2), release(3, adapter_sha256=f"{1:064x}")):
        releases.add_release(one)
    if aliases:
        releases.move_aliases(dict(aliases), reason="test", time=1.0)
    nothing: Any = None
    return CycleStages(
        settings=Settings(policy=policy),
        trajectories=store,
        manifests=store,
        sealed_episodes=lambda: pytest.fail("monitors never read sealed traffic"),
        releases=releases,
        verifiers=builtin_verifiers(),
        grading=nothing,
        open_engine=nothing,
        open_gate=nothing,
        publish=nothing,
        canary=None,
        quarantined=tuple,
        save_certificate=nothing,
        base_model=tmp_path,
        base_sha256="b" * 64,
        adapters_dir=tmp_path,
        batches_dir=tmp_path,
        rollouts_dir=tmp_path,
        clock=lambda: 2001.0,
    )


async def collected(stages: CycleStages) -> dict[str, Any]:
    result = await cycle_steps(stages)[Step.COLLECT](CONFIG, {}, lambda detail: None)
    canonical_json(result.output)
    assert result.output["episodes"] >= 0
    return dict(result.output["monitors"])


ALIASES = {"champion": "smol-r3", "anchor": "smol-r0"}


async def test_the_windows_releases_stand_beside_the_anchors_latest_episodes(tmp_path: Path) -> None:
    old = [asked(f"old{n}", 10.0 + n, "smol-r0", "4" if n % 2 else "5") for n in range(6)]
    other = [asked(f"other{n}", 20.0 + n, "smol-r2") for n in range(3)]  # before the window, and not the anchor's
    new = [asked(f"new{n}", 1001.0 + n, "smol-r1" if n < 2 else "smol-r3", split=Split.DEV) for n in range(5)]
    later = asked("later", 2500.0, "smol-r0")
    monitors = await collected(stages_of([*old, *other, *new, later], tmp_path, aliases=ALIASES))
    # Nobody judged the old ones: they lie before the window, and their verdicts were the business of earlier cycles.
    assert (monitors["champion"], monitors["anchor"], monitors["limits"]) == ("smol-r1", "smol-r0", "policy")
    assert (monitors["episodes"], monitors["excluded"], monitors["failed"]) == (11, {}, [])
    assert list(monitors["releases"]) == ["smol-r0", "smol-r1"]
    champion, anchor = monitors["releases"]["smol-r1"], monitors["releases"]["smol-r0"]
    assert (champion["all"]["episodes"], champion["all"]["passed"], champion["all"]["entropy"]) == (5, 5, 0.5)
    assert (anchor["all"]["episodes"], anchor["all"]["judged"]) == (6, 0)
    assert champion["kinds"] == {"sum": champion["all"]}
    assert list(monitors["against_anchor"]) == ["smol-r1"]
    tokens = next(row for row in monitors["against_anchor"]["smol-r1"] if row["measure"] == "tokens")
    assert (tokens["count"], tokens["needed"], tokens["narrower"]) == (5, 64, None)


async def test_as_many_episodes_are_read_as_the_bounds_allow_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "WINDOW_EPISODES", 4)
    monkeypatch.setattr(monitoring, "ANCHOR_EPISODES", 3)
    old = [asked(f"old{n}", 10.0 + n, "smol-r0", "4 " * (n + 1)) for n in range(9)]
    new = [asked(f"new{n}", 1001.0 + n, "smol-r1" if n < 3 else "smol-r2") for n in range(6)]
    monitors = await collected(stages_of([*old, *new], tmp_path, aliases=ALIASES))
    counts = {name: measured["all"]["episodes"] for name, measured in monitors["releases"].items()}
    assert counts == {"smol-r0": 3, "smol-r1": 1, "smol-r2": 3}


async def test_a_champion_that_is_the_anchor_is_compared_with_nothing(tmp_path: Path) -> None:
    monitors = await collected(stages_of([asked("a", 1500.0, "smol-r0")], tmp_path))
    assert (monitors["champion"], monitors["anchor"]) == ("smol-r0", "smol-r0")
    assert (list(monitors["releases"]), monitors["against_anchor"]) == (["smol-r0"], {})


async def test_what_fails_is_named_and_the_step_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = stages_of([asked("a", 1500.0, "smol-r1"), asked("b", 1501.0, "smol-r0")], tmp_path, aliases=ALIASES)

    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(monitoring, "compare", broken)
    monitors = await collected(stages)
    assert monitors["failed"] == ["release 'smol-r1' against the anchor: ZeroDivisionError: division by zero"]
    assert (list(monitors["releases"]), monitors["against_anchor"]) == (["smol-r0", "smol-r1"], {})
    monkeypatch.setattr(monitoring, "measure", broken)
    assert len((await collected(stages))["failed"]) == 3
    monkeypatch.setattr(monitoring, "recorded_answers", broken)
    assert await collected(stages) == {"failed": ["monitors: ZeroDivisionError: division by zero"]}


async def test_without_a_collapse_stage_the_shipped_limits_hold_and_without_a_policy_nothing_is_measured(
    tmp_path: Path,
) -> None:
    from loop_world import POLICY

    policy = tmp_path / "gate.toml"
    policy.write_text(POLICY)
    traffic = [asked("a", 1500.0, "smol-r1")]
    assert (await collected(stages_of(traffic, tmp_path, policy=policy)))["limits"] == "shipped"
    monitors = await collected(stages_of(traffic, tmp_path, policy=tmp_path / "missing.toml"))
    assert list(monitors) == ["failed"]
    assert "missing.toml" in monitors["failed"][0]


async def test_a_cycle_for_a_given_adapter_collects_and_measures_nothing(tmp_path: Path) -> None:
    step = cycle_steps(stages_of([], tmp_path))[Step.COLLECT]
    result = await step({**CONFIG, "proposed": "a" * 64}, {}, lambda detail: None)
    assert result.output == {"proposed": "a" * 64}


def test_a_training_report_is_kept_whole_and_fit_for_the_store() -> None:
    report = TrainingReport(
        adapter_sha256="a" * 64, adapter_path="adapters/a", steps=2, examples=3, sequences=3, dropped={"too_long": 1},
        series={"kl": (None, 0.5)}, memory_bound=None, resumed_at=0, tokens=9,
        tokens_computed=9, tokens_trained=4, losses=(2.0, 1.0),
        grad_norms=(0.5, float("inf")), seconds=1.0, trainable_parameters=8, configured={"rank": 4},
        effective={"rank": 4, "kl": float("nan")}, guards={"finite_steps": 2, "base_unchanged": True},
    )  # fmt: skip
    output = training_output(report)
    canonical_json(output)
    assert set(report.to_json()) | set(report.summary()) == set(output)
    assert (output["losses"], output["grad_norms"], output["effective"]) == (
        [2.0, 1.0],
        [0.5, None],
        {"rank": 4, "kl": None},
    )
    assert (output["loss_last"], output["guards"]["base_unchanged"]) == (1.0, True)
