"""TRL beside the trainer's own step: the same first step on the same batch, the same guards, report and adapter."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tidegate.artifacts import MANIFEST_FILE, adapter_hash
from tidegate.core.errors import TrainingError
from tidegate.core.types import Example
from tidegate.training.checkpoint import FILE
from tidegate.training.checkpoint_folder import checkpoint_folder
from tidegate.training.job import TrainingJob, TrainingReport
from tidegate.training.run import train
from training_fixtures import agent_example, tiny_job, token_example

ANSWERS = ((40, 41, 2), (40, 42, 43, 2), (44, 2), (45, 46, 47, 48, 49, 2))
PAIRS = tuple(
    replace(
        token_example((9, 8, 7, 6 + prompt, *answer), trained=len(answer), name=f"p{prompt}a{number}"),
        reward=float(number % 2 == prompt % 2),
        group=f"g{prompt}",
    )
    for prompt in range(4)
    for number, answer in enumerate(ANSWERS)
)
MASKED = (replace(PAIRS[0], loss_mask=(0, 0, 1, 0, *PAIRS[0].loss_mask[4:])), *PAIRS[1:])
"""The first answer is of two calls, with a tool's token between them that is not trained."""

BATCHES: dict[str, dict[str, Any]] = {
    "sft": {"examples": [agent_example(number) for number in range(7)]},
    "dpo": {"examples": MASKED, "objective": "dpo", "learning_rate": 3e-3, "batch_size": 6},
}
REL = 1e-4
"""Relative tolerance of losses and norms in float32: both add up the same numbers in another order."""


def run(job: TrainingJob, staging: Path, *, ends_after: int | None = None) -> tuple[TrainingReport, list[Any]]:
    torch.set_num_threads(1)
    staging.parent.mkdir(parents=True, exist_ok=True)
    events: list[Any] = []

    def emit(event: Any) -> None:
        events.append(event)
        if event.get("step") == ends_after is not None:
            raise KeyboardInterrupt

    return train(job, staging, emit=emit, clock=iter(range(10_000)).__next__), events


def job_of(folder: Path, objective: str, **changes: Any) -> TrainingJob:
    return tiny_job(folder, **{**BATCHES[objective], "backend": "trl", **changes})


def first_gradient(job: TrainingJob, staging: Path) -> dict[str, torch.Tensor]:
    """The first moments after one step: a tenth of the clipped gradient."""
    with pytest.raises(KeyboardInterrupt):
        run(job, staging, ends_after=1)
    state = load_file(checkpoint_folder(job) / FILE)
    return {name: tensor for name, tensor in state.items() if name.startswith("exp_avg:")}


@pytest.fixture(scope="module", params=list(BATCHES))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of each backend on the same batch."""
    folder = tmp_path_factory.mktemp(request.param)
    done: dict[str, Any] = {"objective": request.param, "folder": folder}
    for backend in ("own", "trl"):
        job = job_of(folder, request.param, backend=backend, epochs=4)
        report, events = run(job, folder / backend / "adapter")
        done[backend] = {"job": job, "report": report, "events": events, "adapter": folder / backend / "adapter"}
    return done


def test_both_backends_make_the_same_steps(finished: dict[str, Any]) -> None:
    own, trl = finished["own"]["report"], finished["trl"]["report"]
    assert trl.loss_first == pytest.approx(own.loss_first, rel=REL)
    assert trl.grad_norms[0] == pytest.approx(own.grad_norms[0], rel=REL)
    assert trl.losses == pytest.approx(own.losses, rel=0.01)  # rounding grows from step to step
    assert trl.loss_last < 0.9 * trl.loss_first
    assert (trl.steps, trl.sequences, trl.tokens, trl.tokens_trained) == (
        own.steps,
        own.sequences,
        own.tokens,
        own.tokens_trained,
    )
    assert trl.effective["mean_learning_rate"] == own.effective["mean_learning_rate"]


def test_the_first_gradients_point_the_same_way(finished: dict[str, Any], tmp_path: Path) -> None:
    found: list[torch.Tensor] = []
    for backend in ("own", "trl"):
        job = job_of(tmp_path, finished["objective"], backend=backend, checkpoint_steps=1, batch_size=64)
        moments = first_gradient(job, tmp_path / backend / "adapter")
        found.append(torch.cat([moments[name].flatten() for name in sorted(moments)]))
    own, trl = found
    assert float(own.norm()) > 0
    assert float(torch.cosine_similarity(own, trl, dim=0)) > 1 - 1e-6
    assert float(trl.norm()) == pytest.approx(float(own.norm()), rel=REL)


def test_reports_have_the_same_fields_and_the_adapter_its_manifest(finished: dict[str, Any]) -> None:
    own, trl = finished["own"]["report"], finished["trl"]["report"]
    assert set(trl.to_json()) == set(own.to_json())
    assert trl.guards["effective_as_configured"] is True
    assert trl.guards["base_unchanged"] is True
    assert trl.trainable_parameters == trl.guards["trainable_parameters"] == own.trainable_parameters
    assert set(own.effective) - set(trl.effective) <= {"kl_coefficient"}
    assert (own.effective["backend"], trl.effective["backend"]) == ("own", "trl")
    assert trl.memory_bound > 400 << 20
    assert set(trl.series) == set(own.series)
    assert TrainingReport.from_json(json.loads(json.dumps(trl.to_json()))) == trl
    directory = finished["trl"]["adapter"]
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    assert adapter_hash(directory) == trl.adapter_sha256
    assert {"trl", "accelerate", "datasets"} <= set(manifest["versions"])
    own_files = {path.name for path in finished["own"]["adapter"].iterdir()}
    assert {path.name for path in directory.iterdir()} == own_files
    assert load_file(directory / "adapter_model.safetensors").keys() == (
        load_file(finished["own"]["adapter"] / "adapter_model.safetensors").keys()
    )


def test_each_step_is_told_and_nothing_is_left_beside_the_adapter(finished: dict[str, Any]) -> None:
    report, (plan, *steps) = finished["trl"]["report"], finished["trl"]["events"]
    assert plan["plan"]["sequences"] == report.sequences
    assert [step["step"] for step in steps] == list(range(1, report.steps + 1))
    assert [step["loss"] for step in steps] == list(report.losses)
    assert steps[0].keys() == finished["own"]["events"][1].keys()
    assert [path.name for path in (finished["folder"] / "trl").iterdir()] == ["adapter"]


def test_the_same_seed_gives_the_same_hash(finished: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(tmp_path, finished["objective"], epochs=4)
    again, _ = run(job, tmp_path / "again" / "adapter")
    assert again.adapter_sha256 == finished["trl"]["report"].adapter_sha256
    other, _ = run(replace(job, seed=1), tmp_path / "other" / "adapter")
    assert other.adapter_sha256 != again.adapter_sha256


@pytest.mark.parametrize("objective", list(BATCHES))
def test_parts_of_a_step_add_up(tmp_path: Path, objective: str) -> None:
    whole, _ = run(job_of(tmp_path, objective, max_tokens_at_once=10_000), tmp_path / "whole" / "adapter")
    cut, _ = run(job_of(tmp_path, objective, max_tokens_at_once=1), tmp_path / "cut" / "adapter")
    assert whole.effective["parts_a_step"] == 1
    assert cut.effective["parts_a_step"] > 1
    assert cut.losses == pytest.approx(whole.losses, rel=1e-3)
    assert cut.grad_norms[0] == pytest.approx(whole.grad_norms[0], rel=REL)
    assert cut.memory_bound < whole.memory_bound


@pytest.mark.parametrize("objective", list(BATCHES))
def test_a_run_that_was_cut_off_goes_on_to_the_same_bytes(tmp_path: Path, objective: str) -> None:
    job = job_of(tmp_path, objective, epochs=3, checkpoint_steps=2)
    whole, _ = run(job, tmp_path / "whole" / "adapter")
    shutil.rmtree(checkpoint_folder(job))
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "cut" / "adapter", ends_after=3)
    assert list((tmp_path / "cut").iterdir()) == []
    resumed, events = run(job, tmp_path / "resumed" / "adapter")
    assert resumed.resumed_at == 2
    assert next(event["step"] for event in events if "step" in event) == 3
    assert resumed.adapter_sha256 == whole.adapter_sha256
    assert (resumed.losses, resumed.series, resumed.tokens) == (whole.losses, whole.series, whole.tokens)


@pytest.mark.parametrize("objective", list(BATCHES))
def test_it_starts_from_the_champion_and_compares_with_it(
    finished: dict[str, Any], tmp_path: Path, objective: str
) -> None:
    champion = finished["own"]["adapter"]
    start = {"initial_adapter": champion, "parent_sha256": adapter_hash(champion), "epochs": 1}
    losses: list[Sequence[float]] = []
    for backend in ("own", "trl"):
        job = job_of(tmp_path, objective, backend=backend, **start)
        report, _ = run(job, tmp_path / backend / "adapter")
        losses.append(report.losses)
        if objective == "dpo":
            assert report.loss_first == pytest.approx(math.log(2), rel=1e-6)
            assert report.series["margin"][0] == pytest.approx(0.0, abs=1e-6)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_an_answer_is_what_the_mask_says(tmp_path: Path) -> None:
    """What tools said between two calls is in no log-probability."""
    norms: dict[str, float] = {}
    for name, backend, examples in (("plain", "trl", PAIRS), ("masked", "trl", MASKED), ("own", "own", MASKED)):
        job = job_of(tmp_path, "dpo", backend=backend, examples=examples, batch_size=64, epochs=1)
        report, _ = run(job, tmp_path / name / "adapter")
        assert report.tokens_trained == sum(sum(example.loss_mask) for example in examples)
        norms[name] = report.grad_norms[0]
    assert norms["masked"] == pytest.approx(norms["own"], rel=REL)
    assert norms["masked"] != pytest.approx(norms["plain"], rel=2 * REL)


def test_nothing_is_drawn_in_training(tmp_path: Path) -> None:
    """TRL trains in training mode; a model with dropout gives the same adapter all the same."""
    job = job_of(tmp_path, "sft")
    plain, _ = run(job, tmp_path / "plain" / "adapter")
    config = json.loads((job.base_model / "config.json").read_text())
    (job.base_model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    dropping, _ = run(job, tmp_path / "dropping" / "adapter")
    assert dropping.adapter_sha256 == plain.adapter_sha256


@pytest.mark.parametrize("objective", list(BATCHES))
def test_layers_may_be_computed_again(tmp_path: Path, objective: str) -> None:
    plain, _ = run(job_of(tmp_path, objective), tmp_path / "plain" / "adapter")
    again, _ = run(job_of(tmp_path, objective, gradient_checkpointing=True), tmp_path / "again" / "adapter")
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize("objective", list(BATCHES))
def test_a_number_that_is_not_finite_ends_the_run(tmp_path: Path, objective: str) -> None:
    job = job_of(tmp_path, objective, learning_rate=1e30)
    with pytest.raises(TrainingError, match=r"^step 2 of \d+ gave loss .*training\.learning_rate"):
        run(job, tmp_path / "work" / "adapter")
    assert list((tmp_path / "work").iterdir()) == []


def test_memory_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.training.trl_step.available_memory_bytes", lambda: 1 << 10)
    with pytest.raises(TrainingError, match=r"training\.max_tokens_at_once"):
        run(job_of(tmp_path, "sft"), tmp_path / "work" / "adapter")


def test_without_a_pair_there_is_nothing_to_train(tmp_path: Path) -> None:
    alike: list[Example] = [replace(example, reward=1.0) for example in PAIRS]
    with pytest.raises(TrainingError, match="no prompt has two different answers of unequal reward"):
        run(job_of(tmp_path, "dpo", examples=alike), tmp_path / "work" / "adapter")


def test_what_changes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"largest entry of all B matrices is 0\.0"):
        run(job_of(tmp_path, "sft", learning_rate=1e-300), tmp_path / "work" / "adapter")
