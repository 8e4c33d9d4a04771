"""A run that was cut off goes on to the very same bytes, from a checkpoint that is its own and whole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config.training import TrainingSettings
from tidegate.core.errors import TrainingError
from tidegate.core.types import JsonObject
from tidegate.training.checkpoint import FILE
from tidegate.training.checkpoint_folder import FOLDER, job_fingerprint, remove_checkpoints
from tidegate.training.examples import render_example
from tidegate.training.job import TrainingJob, TrainingReport
from tidegate.training.memory import MemoryBound, memory_bound, require_memory, widest_row
from tidegate.training.model import load_model
from tidegate.training.packing import TrainingSequence, micro_batches, pack
from tidegate.training.preference_update import _foreign_answers, _prompt
from tidegate.training.run import train
from training_fixtures import agent_example, tiny_job, token_example

NOW = 1e9

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"kl_coefficient": 0.1},
    "grpo": {"objective": "grpo", "kl_coefficient": 0.1},
    "dpo": {"objective": "dpo"},
}


def job_of(folder: Path, **changes: Any) -> TrainingJob:
    examples = [
        replace(
            token_example([5 + prompt, 6, 7 + number, 8 + number, 9], trained=3, name=f"p{prompt}n{number}"),
            reward=float(number % 2),
            group=f"g{prompt}",
        )
        for prompt in range(3)
        for number in range(4)
    ]
    settings = {"batch_size": 4, "epochs": 2, "learning_rate": 1e-3, "checkpoint_steps": 2}
    return tiny_job(folder, examples=examples, **{**settings, **changes})


def run(job: TrainingJob, staging: Path, *, ends_after: int | None = None) -> tuple[TrainingReport, list[JsonObject]]:
    torch.set_num_threads(1)
    events: list[JsonObject] = []

    def emit(event: JsonObject) -> None:
        events.append(event)
        if "step" in event and event["step"] == ends_after:
            raise KeyboardInterrupt

    return train(job, staging, emit=emit, clock=iter(range(10_000)).__next__), events


def checkpoint(job: TrainingJob) -> Path:
    return job.output_root / FOLDER / job_fingerprint(job) / FILE


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_run_that_was_cut_off_goes_on_to_the_same_bytes(tmp_path: Path, objective: str) -> None:
    job = job_of(tmp_path, **OBJECTIVES[objective])
    whole, _ = run(job, tmp_path / "whole")
    remove_checkpoints(job, now=NOW)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "cut", ends_after=3)
    assert checkpoint(job).exists()
    resumed, events = run(job, tmp_path / "resumed")
    assert (whole.resumed_at, resumed.resumed_at) == (0, 2)
    assert next(event["step"] for event in events if "step" in event) == 3
    assert resumed.adapter_sha256 == whole.adapter_sha256
    assert (resumed.losses, resumed.series, resumed.tokens) == (whole.losses, whole.series, whole.tokens)
    assert checkpoint(job).exists()  # until the adapter is published


def test_a_published_run_takes_its_own_state_along_and_what_was_given_up_long_ago(tmp_path: Path) -> None:
    own, other, old = job_of(tmp_path), job_of(tmp_path, epochs=3), job_of(tmp_path, epochs=4)
    for job, age_days in ((own, 0), (other, 29), (old, 31)):
        checkpoint(job).parent.mkdir(parents=True)
        checkpoint(job).write_bytes(b"state")
        os.utime(checkpoint(job).parent, (NOW - 86400.0 * age_days, NOW - 86400.0 * age_days))
    remove_checkpoints(own, now=NOW)
    assert [checkpoint(job).exists() for job in (own, other, old)] == [False, True, False]
    remove_checkpoints(other, now=NOW)
    assert not (own.output_root / FOLDER).exists()
    own.examples.unlink()
    remove_checkpoints(own, now=NOW)  # nothing there to remove, and nothing to name it by


def test_a_checkpoint_that_cannot_be_written_is_noted_and_training_goes_on(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    whole, _ = run(job, tmp_path / "whole")
    remove_checkpoints(job, now=NOW)
    job.output_root.mkdir(exist_ok=True)
    (job.output_root / FOLDER).write_text("a file where a folder should be")
    again, events = run(job, tmp_path / "again")
    notes = [event["note"] for event in events if "note" in event]
    assert [note.partition(" (")[0] for note in notes] == ["no checkpoint after step 2", "no checkpoint after step 4"]
    assert again.adapter_sha256 == whole.adapter_sha256


def test_a_damaged_checkpoint_is_named_and_not_used(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    whole, _ = run(job, tmp_path / "whole")
    remove_checkpoints(job, now=NOW)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "cut", ends_after=3)
    data = checkpoint(job).read_bytes()
    checkpoint(job).write_bytes(data[: len(data) // 2])
    again, events = run(job, tmp_path / "again")
    assert next(event["note"] for event in events if "note" in event).startswith("the checkpoint cannot be read")
    assert (again.resumed_at, again.adapter_sha256) == (0, whole.adapter_sha256)


def test_the_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    first, second = job_of(tmp_path), job_of(tmp_path, learning_rate=2e-3)
    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path / "cut", ends_after=3)
    assert checkpoint(first) != checkpoint(second)
    checkpoint(second).parent.mkdir(parents=True)
    checkpoint(first).rename(checkpoint(second))
    report, events = run(second, tmp_path / "second")
    assert report.resumed_at == 0
    assert any("belongs to another run" in event.get("note", "") for event in events)


def test_what_decides_the_run_decides_its_name(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job_fingerprint(job) == job_fingerprint(replace(job, output_root=tmp_path / "elsewhere"))
    others = [replace(job, seed=1), replace(job, threads=2), replace(job, base_sha256="c" * 64)]
    others.append(replace(job, training=job.training.model_copy(update={"epochs": 9})))
    names = {job_fingerprint(other) for other in (job, *others)}
    assert len(names) == 5
    job.examples.write_text(job.examples.read_text(encoding="utf-8").replace("p0n0", "p0n9"), encoding="utf-8")
    assert job_fingerprint(job) not in names


def test_no_checkpoint_is_written_when_none_is_asked_for(tmp_path: Path) -> None:
    job = job_of(tmp_path, checkpoint_steps=0)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "cut", ends_after=5)
    assert not (job.output_root / FOLDER).exists()


def test_layers_that_are_computed_again_give_the_same_step(tmp_path: Path) -> None:
    plain, _ = run(job_of(tmp_path, epochs=1), tmp_path / "plain")
    again, _ = run(job_of(tmp_path, epochs=1, gradient_checkpointing=True), tmp_path / "again")
    assert again.losses == pytest.approx(plain.losses, rel=1e-5)
    assert again.grad_norms == pytest.approx(plain.grad_norms, rel=1e-4)


def test_layers_are_computed_again_only_when_asked(tmp_path: Path) -> None:
    calls: list[int] = []
    for checkpointing in (False, True):
        trained = load_model(job_of(tmp_path, gradient_checkpointing=checkpointing))
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        trained.base.model.layers[0].self_attn.register_forward_pre_hook(count)
        trained.model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert calls == [1, 2]


def test_memory_is_stated_before_the_first_step_and_refused_when_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, events = run(job_of(tmp_path), tmp_path / "adapter")
    assert events[0]["plan"]["memory_bound_bytes"] == report.memory_bound
    assert (report.memory_bound or 0) > 400 << 20
    monkeypatch.setattr("tidegate.training.own_step.available_memory_bytes", lambda: 50 << 20)  # below the whole
    assert run(job_of(tmp_path), tmp_path / "fits")[0].memory_bound == report.memory_bound
    monkeypatch.setattr("tidegate.training.own_step.available_memory_bytes", lambda: 1 << 10)
    monkeypatch.setattr("tidegate.training.own_step.prepare_update", None)  # refused before anything is computed
    says = (
        r"needs up to 0\.00 GiB beside the loaded model \(0\.39 GiB in all\), 0\.00 GiB are free; lower training\.max_t"
    )
    with pytest.raises(TrainingError, match=says):
        run(job_of(tmp_path), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_the_bound_grows_with_what_is_computed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_model(tiny_job(tmp_path))
    sequences = [s for n in range(4) for s in render_example(trained.tokenizer, agent_example(n))]

    def bound(*, packed: bool = True, **settings: Any) -> MemoryBound:
        found = memory_bound(trained, sequences, TrainingSettings(**settings), packed=packed)
        assert found is not None
        return found

    adapter = 4 * trained.trainable_parameters
    base = sum(parameter.numel() * parameter.element_size() for parameter in trained.base.parameters())
    large = bound()
    assert large.total == large.ahead + base + adapter + (400 << 20)
    assert bound(max_tokens_at_once=10).ahead < large.ahead > bound(gradient_checkpointing=True).ahead
    assert bound(packed=False) == bound(max_tokens_at_once=1, batch_size=1)
    vocabulary, (_, predictions) = (
        trained.base.config.vocab_size,
        widest_row(sequences, TrainingSettings(), packed=True),
    )
    held = bound(kl_coefficient=0.1).ahead - large.ahead
    assert held == adapter + 9 * 4 * vocabulary * predictions
    assert bound(objective="grpo", kl_coefficient=0.1) == bound(objective="grpo")
    assert bound(batch_size=1, max_tokens_at_once=1, checkpoint_steps=0, rank=4).ahead > 3 * adapter
    monkeypatch.setattr(type(trained.base.config), "get_text_config", lambda *_, **__: SimpleNamespace(vocab_size=9))
    assert memory_bound(trained, sequences, TrainingSettings(), packed=True) is None
    require_memory(None, 1)
    require_memory(large, None)
    require_memory(large, large.ahead)
    with pytest.raises(TrainingError):
        require_memory(large, large.ahead - 1)


TOKENS = st.integers(0, 3)


@st.composite
def training_sequences(draw: st.DrawFn) -> TrainingSequence:
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=6))
    answer = draw(st.lists(st.tuples(TOKENS, st.integers(0, 1)), max_size=5))
    mask = [*[0] * len(prompt), 1, *(trained for _, trained in answer)]
    tokens = [*prompt, draw(TOKENS), *(token for token, _ in answer)]
    return TrainingSequence(example_id="e", token_ids=tuple(tokens), loss_mask=tuple(mask), weight=1.0)


@given(st.lists(training_sequences(), min_size=1, max_size=8), st.integers(1, 20), st.integers(1, 4), st.data())
def test_no_row_of_any_step_is_wider_than_the_bound(
    sequences: list[TrainingSequence], at_once: int, batch_size: int, data: st.DataObject
) -> None:
    for objective, most in (("sft", batch_size), ("grpo", len(sequences)), ("kto", len(sequences))):
        settings = TrainingSettings.model_validate(
            {"objective": objective, "max_tokens_at_once": at_once, "batch_size": batch_size}
        )
        nodes, predictions = widest_row(sequences, settings, packed=True)
        step = data.draw(st.permutations(sequences))[:most]
        parts = [pack(part) for part in micro_batches(step, max_nodes=at_once)]
        assert max(len(row.token_ids) for row in parts) <= nodes
        assert max(len(row.targets) for row in parts) <= predictions
        if objective == "kto" and len({_prompt(sequence) for sequence in sequences}) > 1:
            foreign = list(_foreign_answers(sequences, max_length=settings.max_length).values())
            rows = [pack(part) for part in micro_batches(foreign, max_nodes=at_once)]
            assert max(len(row.token_ids) for row in rows) <= nodes
            assert max(len(row.targets) for row in rows) <= predictions
        alone = widest_row(sequences, settings, packed=False)
        singles = [pack([sequence]) for sequence in step]
        assert max(len(row.token_ids) for row in singles) <= alone[0]
        assert max(len(row.targets) for row in singles) <= alone[1]


def test_a_checkpoint_with_a_flipped_bit_is_not_used(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    whole, _ = run(job, tmp_path / "whole")
    remove_checkpoints(job, now=NOW)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "cut", ends_after=3)
    data = bytearray(checkpoint(job).read_bytes())
    data[-5] ^= 1
    checkpoint(job).write_bytes(data)
    again, events = run(job, tmp_path / "again")
    assert any("not what was written" in event.get("note", "") for event in events)
    assert (again.resumed_at, again.adapter_sha256) == (0, whole.adapter_sha256)


def test_a_longer_time_limit_goes_on_with_the_same_run(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    changed = job.training.model_copy(update={"timeout_s": 9.0, "checkpoint_steps": 1, "averaging": (0.5,), "seed": 9})
    assert job_fingerprint(replace(job, training=changed)) == job_fingerprint(job)
