"""One run on a tiny model: what it writes, and each guard that stops it."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash, adapter_manifest
from tidegate.core.agreement import AGREEMENT_TEXTS, MANIFEST_KEY, MAX_SCORED, ScoredSequence, record_in
from tidegate.core.errors import AdapterError, TrainingError
from tidegate.core.types import AdapterRef
from tidegate.engines.embedded.adapters import merged_model, read_adapter
from tidegate.training.averaging import average_adapters
from tidegate.training.degrade import degrade_adapter
from tidegate.training.job import TrainingJob, TrainingReport
from tidegate.training.model import base_fingerprint, load_model
from tidegate.training.run import train
from tidegate.training.scoring import ScoringJob, score_here
from training_fixtures import BASE_SHA256, agent_example, byte_tokenizer, tiny_job, token_example

PROMPT = torch.tensor([[1, 80, 90, 100, 2, 70]])


class Clock:
    """Each look is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def run(job: TrainingJob, staging: Path, events: list[Any] | None = None) -> TrainingReport:
    torch.set_num_threads(1)
    seen: list[Any] = [] if events is None else events
    return train(job, staging, emit=seen.append, clock=Clock())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingJob, Path, TrainingReport]:
    """A finished run: job, adapter directory, report."""
    folder = tmp_path_factory.mktemp("first")
    job = tiny_job(folder, epochs=4)
    return job, folder / "adapter", run(job, folder / "adapter")


def test_it_learns_and_counts(first: tuple[TrainingJob, Path, TrainingReport]) -> None:
    _, _, report = first
    assert report.steps == len(report.losses) == len(report.grad_norms) == 8
    assert report.loss_last < 0.75 * report.loss_first
    assert (report.examples, report.sequences) == (6, 6)
    assert report.dropped == {"too_long": 0, "untrained": 0, "control_tokens": 0}
    assert report.tokens_trained < report.tokens_computed < report.tokens
    assert report.trainable_parameters == 4 * sum(
        2 * (32 + 32) + 2 * (32 + 16) + 2 * (32 + 48) + (48 + 32) for _ in range(2)
    )
    assert report.effective["packed"] is True
    assert TrainingReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_each_step_is_reported(tmp_path: Path) -> None:
    events: list[Any] = []
    report = run(tiny_job(tmp_path), tmp_path / "adapter", events)
    plan, *events = events
    assert (plan["plan"]["sequences"], plan["plan"]["tokens"]) == (6, report.tokens)
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert [event["loss"] for event in events] == list(report.losses)
    assert {event["steps"] for event in events} == {4}
    assert [event["eta_s"] for event in events] == [3.0, 2.0, 1.0, 0.0]
    assert all(event["tokens_per_s"] > 0 for event in events)


def test_configured_and_effective_agree(first: tuple[TrainingJob, Path, TrainingReport]) -> None:
    _, _, report = first
    for name in ("rank", "alpha", "learning_rate", "epochs", "batch_size", "weight_decay"):
        assert report.effective[name] == report.configured[name]
    assert report.effective["mean_learning_rate"] < report.configured["learning_rate"]


def test_peft_and_the_engine_compute_what_was_trained(first: tuple[TrainingJob, Path, TrainingReport]) -> None:
    job, directory, report = first
    base = AutoModelForCausalLM.from_pretrained(str(job.base_model), dtype=torch.float32).eval()
    with torch.no_grad():
        before = base(PROMPT).logits
        ref = AdapterRef(name="x", path=directory, sha256=report.adapter_sha256)
        merged = merged_model(base, read_adapter(ref, base_sha256=BASE_SHA256, model=base))(PROMPT).logits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loaded = PeftModel.from_pretrained(base, str(directory)).eval()
        through_peft = loaded(PROMPT).logits
    assert torch.allclose(through_peft, merged, atol=1e-4)
    assert float((through_peft - before).abs().max()) > 0.01


def test_the_directory_names_content_not_places(first: tuple[TrainingJob, Path, TrainingReport]) -> None:
    job, directory, report = first
    config = json.loads((directory / CONFIG_FILE).read_text())
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    assert adapter_hash(directory) == report.adapter_sha256
    assert config["base_model_name_or_path"] == BASE_SHA256
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert (manifest["base_sha256"], manifest["manifest_hash"]) == (BASE_SHA256, "m" * 64)
    assert manifest["loss_curve"] == list(report.losses)
    assert manifest["hyperparameters"] == job.training.model_dump(mode="json")
    assert manifest["effective"]["threads"] == 1
    assert set(manifest["versions"]) == {"tidegate", "torch", "transformers", "peft"}
    for name in (CONFIG_FILE, MANIFEST_FILE):
        assert str(job.base_model.parent) not in (directory / name).read_text()


def test_a_challenger_starts_from_the_champion(first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path) -> None:
    _, champion, report = first
    job = tiny_job(
        tmp_path, epochs=1, learning_rate=1e-3, initial_adapter=champion, parent_sha256=report.adapter_sha256
    )
    again = run(job, tmp_path / "adapter")
    assert again.loss_first < 0.8 * report.loss_first
    assert again.adapter_sha256 != report.adapter_sha256
    start, end = load_file(champion / WEIGHTS_FILE), load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    moved = max(float((start[name] - end[name]).abs().max()) for name in start)
    assert 0 < moved < 5 * 1e-3
    manifest = json.loads((tmp_path / "adapter" / MANIFEST_FILE).read_text())
    assert manifest["parent_sha256"] == report.adapter_sha256


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 8}, "'r': 4.*'r': 8.*restart"),
        ({"alpha": 4}, "'lora_alpha': 8.*restart"),
        ({"base_sha256": "c" * 64}, "belongs to base b"),
        ({"parent_sha256": "d" * 64}, "the job names d"),
    ],
)
def test_an_initial_adapter_must_fit(
    first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    job = tiny_job(tmp_path, initial_adapter=first[1], **changes)
    with pytest.raises(TrainingError, match=says):
        run(job, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_an_initial_adapter_of_another_scale_is_refused(
    first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path
) -> None:
    """The same rank and alpha; the engine would serve it at alpha / sqrt(rank), training compute alpha / rank."""
    champion = tmp_path / "champion"
    shutil.copytree(first[1], champion)
    config = json.loads((champion / CONFIG_FILE).read_text(encoding="utf-8"))
    (champion / CONFIG_FILE).write_text(json.dumps({**config, "use_rslora": True}), encoding="utf-8")
    with pytest.raises(TrainingError, match="use_rslora"):
        run(tiny_job(tmp_path, initial_adapter=champion), tmp_path / "adapter")
    with pytest.raises(AdapterError, match="rank, scale"):
        average_adapters(first[1], champion, tmp_path / "out", share=0.5)


def test_an_initial_adapter_with_other_tensors_is_refused(
    first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    tensors = load_file(first[1] / WEIGHTS_FILE)
    tensors.pop(min(tensors))
    save_file(tensors, odd / WEIGHTS_FILE)
    for name in (CONFIG_FILE, MANIFEST_FILE):
        (odd / name).write_bytes((first[1] / name).read_bytes())
    with pytest.raises(TrainingError, match="other tensors"):
        run(tiny_job(tmp_path, initial_adapter=odd), tmp_path / "adapter")
    (odd / WEIGHTS_FILE).write_bytes(b"nonsense")
    with pytest.raises(TrainingError, match="unreadable"):
        run(tiny_job(tmp_path, initial_adapter=odd), tmp_path / "adapter")
    with pytest.raises(TrainingError, match="nowhere"):
        run(tiny_job(tmp_path, initial_adapter=tmp_path / "nowhere"), tmp_path / "adapter")


def test_training_that_changes_nothing_is_refused(
    first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path
) -> None:
    _, champion, report = first
    job = tiny_job(tmp_path, learning_rate=1e-30, initial_adapter=champion, parent_sha256=report.adapter_sha256)
    with pytest.raises(TrainingError, match=f"after 4 steps the adapter is still {report.adapter_sha256}"):
        run(job, tmp_path / "adapter")


def test_an_adapter_of_zeros_is_refused(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, learning_rate=1e-60)
    with pytest.raises(TrainingError, match=r"all B matrices is 0\.0"):
        run(job, tmp_path / "adapter")


def test_a_step_that_is_not_finite_aborts(tmp_path: Path) -> None:
    events: list[Any] = []
    with pytest.raises(TrainingError, match=r"step 2 of 4: .* not finite"):
        run(tiny_job(tmp_path, learning_rate=1e30), tmp_path / "adapter", events)
    assert [event.get("step") for event in events] == [None, 1]
    assert not (tmp_path / "adapter").exists()


def test_long_sequences_are_dropped_whole_and_counted(tmp_path: Path) -> None:
    examples = [agent_example(1), token_example(range(3, 253), trained=5), token_example([5, 6], trained=1)]
    report = run(tiny_job(tmp_path, examples=examples, max_length=249), tmp_path / "adapter")
    assert (report.examples, report.sequences, report.dropped["too_long"]) == (3, 2, 1)
    report = run(tiny_job(tmp_path, examples=examples, max_length=250), tmp_path / "other")
    assert (report.examples, report.sequences, report.dropped["too_long"]) == (3, 3, 0)


def test_no_example_is_an_error_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="0 examples gave 0 sequences"):
        run(tiny_job(tmp_path, examples=[]), tmp_path / "adapter")
    long, untrained = token_example(range(3, 90), trained=5), token_example([5], trained=1)
    job = tiny_job(tmp_path, examples=[long, untrained], max_length=20)
    with pytest.raises(TrainingError, match=r"2 examples gave 2 sequences, of which 1 .* 20 tokens and 1 train"):
        run(job, tmp_path / "adapter")


def test_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, examples=[agent_example(1), token_example([5, 4000, 6], trained=1, name="foreign")])
    with pytest.raises(TrainingError, match="'foreign' holds token 4000"):
        run(job, tmp_path / "adapter")


def test_a_base_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, base_model=tmp_path / "missing")
    with pytest.raises(TrainingError, match="missing"):
        run(job, tmp_path / "adapter")


def test_weights_of_examples_count(tmp_path: Path) -> None:
    def loss(weight: float) -> float:
        examples = [agent_example(1, weight=weight), agent_example(2)]
        return run(tiny_job(tmp_path, examples=examples, epochs=1), tmp_path / f"w{weight}").loss_first

    heavy, even, light = loss(1e6), loss(1.0), loss(1e-6)
    alone = run(tiny_job(tmp_path, examples=[agent_example(1)], epochs=1), tmp_path / "alone").loss_first
    assert heavy == pytest.approx(alone, rel=1e-4)
    assert math.isclose(even, (heavy + light) / 2, rel_tol=1e-3)
    assert heavy != pytest.approx(light, rel=1e-3)


def test_the_fingerprint_of_the_base_sees_a_change(tmp_path: Path) -> None:
    trained = load_model(tiny_job(tmp_path))
    before = base_fingerprint(trained)
    with torch.no_grad():
        next(iter(trained.tensors.values())).add_(1.0)
    assert base_fingerprint(trained) == before
    with torch.no_grad():
        trained.base.get_input_embeddings().weight[0, 0] += 1.0
    assert base_fingerprint(trained) != before


def test_a_base_that_changes_under_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = iter(["before", "after"])
    monkeypatch.setattr("tidegate.training.run.base_fingerprint", lambda _: next(fingerprints))
    with pytest.raises(TrainingError, match="base weights changed"):
        run(tiny_job(tmp_path), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_settings_that_did_not_take_effect_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.training.schedule._share", lambda *_: 0.5)
    with pytest.raises(TrainingError, match=r"learning_rate = 0\.01 was asked for, 0\.005 took effect"):
        run(tiny_job(tmp_path), tmp_path / "adapter")


def test_an_objective_that_takes_other_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [
        replace(token_example([5, 6, 7 + number, 9], trained=2, name=f"n{number}"), reward=float(number % 2), group="g")
        for number in range(4)
    ]
    settings = {"objective": "grpo", "clip_high": 0.28}
    assert run(tiny_job(tmp_path, examples=examples, **settings), tmp_path / "whole").effective["clip_high"] == 0.28
    monkeypatch.setattr("tidegate.training.policy_update._clip", lambda _: {"eps_low": 0.2, "eps_high": 0.2})
    with pytest.raises(TrainingError, match=r"clip_high 0\.28 was asked for, 0\.2 took effect"):
        run(tiny_job(tmp_path, examples=examples, **settings), tmp_path / "adapter")


def test_bfloat16_trains_when_asked(tmp_path: Path) -> None:
    report = run(tiny_job(tmp_path, dtype="bfloat16"), tmp_path / "adapter")
    assert report.loss_last < report.loss_first
    assert all(t.dtype == torch.float32 for t in load_file(tmp_path / "adapter" / WEIGHTS_FILE).values())


def test_the_trainer_takes_down_what_its_weights_compute(first: tuple[TrainingJob, Path, TrainingReport]) -> None:
    """For fixed texts of ours, through the packed rows of training, as PEFT computes it one by one."""
    job, directory, _ = first
    record = record_in(adapter_manifest(directory), adapter="a")
    assert record is not None
    assert record.dtype == "float32"
    tokenizer = byte_tokenizer()
    answers = [tokenizer.decode(sequence.token_ids[sequence.first :]) for sequence in record.sequences]
    assert answers == [text.encode()[:MAX_SCORED].decode() for _, text in AGREEMENT_TEXTS]
    base = AutoModelForCausalLM.from_pretrained(str(job.base_model), dtype=torch.float32).eval()
    for sequence in record.sequences:
        assert sequence.base_logprobs == pytest.approx(scored(base, sequence), abs=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = PeftModel.from_pretrained(base, str(directory)).eval()
    for sequence in record.sequences:
        assert sequence.logprobs == pytest.approx(scored(adapted, sequence), abs=1e-4)
        assert sequence.logprobs != pytest.approx(sequence.base_logprobs, abs=1e-2)


def scored(model: Any, sequence: ScoredSequence) -> list[float]:
    with torch.no_grad():
        logprobs = model(torch.tensor([sequence.token_ids])).logits[0, :-1].log_softmax(-1)
    rows = torch.arange(sequence.first - 1, len(sequence.token_ids) - 1)
    return logprobs[rows, torch.tensor(sequence.token_ids[sequence.first :])].tolist()


def test_the_same_run_twice_is_the_same_adapter_with_its_record(
    first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path
) -> None:
    job, directory, report = first
    assert run(job, tmp_path / "again").adapter_sha256 == report.adapter_sha256
    manifest = adapter_manifest(tmp_path / "again")
    assert manifest[MANIFEST_KEY] == adapter_manifest(directory)[MANIFEST_KEY]
    manifest[MANIFEST_KEY]["sequences"][0]["logprobs"][0] -= 1e-6
    (tmp_path / "again" / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    assert adapter_hash(tmp_path / "again") != report.adapter_sha256


def test_weights_that_did_not_change_are_seen_behind_another_record(
    first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path
) -> None:
    """The champion was made before there were records: the hashes differ, the weights do not."""
    champion = tmp_path / "champion"
    shutil.copytree(first[1], champion)
    manifest = {name: value for name, value in adapter_manifest(champion).items() if name != MANIFEST_KEY}
    (champion / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    job = tiny_job(tmp_path, learning_rate=1e-30, initial_adapter=champion, parent_sha256=adapter_hash(champion))
    with pytest.raises(TrainingError, match="training changed nothing"):
        run(job, tmp_path / "adapter")


def test_texts_that_do_not_fit_are_left_out_of_the_record(tmp_path: Path) -> None:
    short = token_example(range(3, 23), trained=5)
    run(
        tiny_job(tmp_path, examples=[short, token_example(range(30, 40), trained=4)], max_length=140), tmp_path / "some"
    )
    record = record_in(adapter_manifest(tmp_path / "some"), adapter="a")
    assert record is not None
    assert 1 <= len(record.sequences) < len(AGREEMENT_TEXTS)
    run(tiny_job(tmp_path, examples=[short], max_length=20), tmp_path / "none")
    assert MANIFEST_KEY not in adapter_manifest(tmp_path / "none")


def test_an_average_is_scored_anew(first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path) -> None:
    job, end, _ = first
    start = degrade_adapter(end, tmp_path, seed=1, scale=1.0)

    def score(adapter: Path, sequences: Any) -> Any:
        return score_here(
            ScoringJob(
                base_model=job.base_model, base_sha256=BASE_SHA256, adapter=adapter, dtype="float32", threads=1,
                temperature=1.0, sequences=tuple(sequences),
            )
        )  # fmt: skip

    made = average_adapters(start, end, tmp_path, share=0.5, score=score)
    assert made.name == adapter_hash(made)
    record, whole = (record_in(adapter_manifest(folder), adapter="a") for folder in (made, end))
    assert record is not None
    assert whole is not None
    assert record.base == whole.base
    base = AutoModelForCausalLM.from_pretrained(str(job.base_model), dtype=torch.float32).eval()
    ref = AdapterRef(name="x", path=made, sha256=made.name)
    merged = merged_model(base, read_adapter(ref, base_sha256=BASE_SHA256, model=base))
    for sequence, other in zip(record.sequences, whole.sequences, strict=True):
        assert sequence.logprobs == pytest.approx(scored(merged, sequence), abs=1e-4)
        assert sequence.logprobs != pytest.approx(other.logprobs, abs=1e-2)
    without = average_adapters(start, end, tmp_path, share=0.5)
    assert without != made  # what the trainer says is part of the content


def test_what_is_computed_from_an_adapter_has_no_record_of_the_trainer(
    first: tuple[TrainingJob, Path, TrainingReport], tmp_path: Path
) -> None:
    other = degrade_adapter(first[1], tmp_path, seed=1, scale=0.1)
    between = average_adapters(first[1], other, tmp_path, share=0.5)
    assert MANIFEST_KEY in adapter_manifest(first[1])
    assert MANIFEST_KEY not in {**adapter_manifest(other), **adapter_manifest(between)}
