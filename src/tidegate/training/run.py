"""One training run from job to adapter directory, inside the worker process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tidegate.artifacts import WEIGHTS_FILE, file_hash
from tidegate.core.errors import TrainingError
from tidegate.training.adapter_files import largest_b, write_adapter
from tidegate.training.agreement import agreement_record, dtype_of
from tidegate.training.backends import backend_of
from tidegate.training.examples import read_examples, render_example, teaches_control_tokens
from tidegate.training.fitting import Fitted, PreparedRun
from tidegate.training.job import TrainingJob, TrainingReport
from tidegate.training.model import LoraModel, base_fingerprint, load_model
from tidegate.training.packing import TrainingSequence
from tidegate.training.record import Emit
from tidegate.training.schedule import units_a_step

_OF_OBJECTIVES = (
    "objective",
    "baseline",
    "reward_scale",
    "aggregate",
    "max_completion",
    "clip_low",
    "clip_high",
    "kl_coefficient",
    "importance_cap",
    "preference_beta",
)
"""Settings that an update reports as they took effect; None, or absent, where its objective knows no such thing."""


def train(job: TrainingJob, staging: Path, *, emit: Emit, clock: Callable[[], float]) -> TrainingReport:
    """Train and write the adapter into ``staging``, which must not exist; publishing it is the launcher's.

    Raises:
        TrainingError: nothing came out that may be proposed; what lies in ``staging`` is of no use then.
    """
    started = clock()
    backend = backend_of(job.training)
    backend.require_installed()
    backend.require_batch(job)
    examples = read_examples(job.examples)
    trained = load_model(job)
    if trained.trainable_parameters == 0:
        raise TrainingError("0 parameters are trainable: no linear layer of this base takes LoRA matrices")
    plain = [example for example in examples if not teaches_control_tokens(trained.tokenizer, example)]
    rendered = [sequence for example in plain for sequence in render_example(trained.tokenizer, example)]
    kept, dropped = select_sequences(rendered, max_length=job.training.max_length)
    dropped["control_tokens"] = len(examples) - len(plain)
    if not kept:
        raise TrainingError(
            f"no example to train on: {len(examples)} examples gave {len(rendered)} sequences, of which "
            f"{dropped['too_long']} are longer than {job.training.max_length} tokens and {dropped['untrained']} train "
            "no token"
        )
    _require_vocabulary(trained, kept)
    before = base_fingerprint(trained)
    run = PreparedRun(job=job, trained=trained, examples=examples, sequences=kept, scratch=staging.parent)
    fitted = backend.fit(run, emit=emit, clock=clock)
    result, units = fitted.result, fitted.units
    dropped |= fitted.left_out
    effective = _effective(job, trained, fitted)
    guards = _guards(job, trained, fitted, effective, base_unchanged=base_fingerprint(trained) == before)
    agreement = agreement_record(trained, fitted.forward, job.training)
    sha256 = write_adapter(staging, trained, job, effective=effective, losses=result.losses, agreement=agreement)
    # By the weights: the hash also covers what they compute here, which another dtype rounds otherwise.
    if job.initial_adapter is not None and file_hash(staging / WEIGHTS_FILE) == file_hash(
        job.initial_adapter / WEIGHTS_FILE
    ):
        raise TrainingError(
            f"after {len(result.losses)} steps the adapter is still {job.parent_sha256 or sha256}: training changed "
            "nothing; raise training.learning_rate or training.epochs"
        )
    return TrainingReport(
        adapter_sha256=sha256,
        adapter_path=str(job.output_root / sha256),
        steps=len(result.losses),
        examples=len(examples),
        sequences=sum(map(len, units)),
        dropped=dropped,
        tokens=result.tokens,
        tokens_computed=result.tokens_computed,
        tokens_trained=result.tokens_trained,
        losses=result.losses,
        grad_norms=result.grad_norms,
        series=result.series,
        memory_bound=None if fitted.bound is None else fitted.bound.total,
        resumed_at=result.resumed_at,
        seconds=clock() - started,
        trainable_parameters=trained.trainable_parameters,
        configured=job.training.model_dump(mode="json"),
        effective=effective,
        guards=guards,
    )


def select_sequences(
    sequences: Sequence[TrainingSequence], *, max_length: int
) -> tuple[list[TrainingSequence], dict[str, int]]:
    """Sequences that can be trained, and how many are too long or train nothing; none is ever cut."""
    trained = [sequence for sequence in sequences if sequence.input_length > 0]
    kept = [sequence for sequence in trained if len(sequence.token_ids) <= max_length]
    return kept, {"too_long": len(trained) - len(kept), "untrained": len(sequences) - len(trained)}


def _require_vocabulary(trained: LoraModel, sequences: Sequence[TrainingSequence]) -> None:
    size = int(trained.base.get_input_embeddings().num_embeddings)
    worst = max(sequences, key=lambda sequence: max(sequence.token_ids))
    if max(worst.token_ids) >= size:
        raise TrainingError(
            f"example {worst.example_id!r} holds token {max(worst.token_ids)}, this base knows 0 to {size - 1}; "
            "the batch was recorded from another model"
        )


def _effective(job: TrainingJob, trained: LoraModel, fitted: Fitted) -> dict[str, Any]:
    """The hyperparameters as they took effect, measured on the model, the optimizer and the loop."""
    result, units = fitted.result, fitted.units
    layers = [module for module in trained.model.modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")]
    ranks = {int(tensor.shape[0]) for name, tensor in trained.tensors.items() if ".lora_A." in name}
    scales = {float(layer.scaling["default"]) for layer in layers}
    rank = ranks.pop() if len(ranks) == 1 else -1
    return {
        "rank": rank,
        "alpha": scales.pop() * rank if len(scales) == 1 else -1,
        "learning_rate": max(result.rates),
        "mean_learning_rate": sum(result.rates) / len(result.rates),
        "epochs": result.units_seen / len(units),
        "steps": len(result.losses),
        "batch_size": result.units_a_step * sum(map(len, units)) / len(units),
        "weight_decay": result.weight_decay,
        "clipped_steps": sum(norm > job.training.max_grad_norm for norm in result.grad_norms),
        "sequences": sum(map(len, units)),
        "dtype": dtype_of(trained),
        "threads": torch.get_num_threads(),
        **fitted.effective,
    }


def _guards(
    job: TrainingJob,
    trained: LoraModel,
    fitted: Fitted,
    effective: dict[str, Any],
    *,
    base_unchanged: bool,
) -> dict[str, Any]:
    """Check what must hold after the loop.

    Raises:
        TrainingError: something does not.
    """
    settings, units = job.training, fitted.units
    together = units_a_step(units, settings.batch_size)
    for name, configured in (
        ("rank", settings.rank),
        ("alpha", settings.alpha),
        ("learning_rate", settings.learning_rate),
        ("epochs", settings.epochs),
        ("steps", settings.epochs * math.ceil(len(units) / together)),
        ("weight_decay", settings.weight_decay),
    ):
        if not math.isclose(effective[name], configured, rel_tol=1e-6):
            raise TrainingError(f"training.{name} = {configured!r} was asked for, {effective[name]!r} took effect")
    asked = {name: getattr(settings, name) for name in _OF_OBJECTIVES if effective.get(name) is not None}
    asked |= {"backend": settings.backend, "dtype": settings.dtype, "threads": job.compute_threads}
    for name, configured in asked.items():
        if configured is not None and effective[name] != configured:
            raise TrainingError(f"training with {name} {configured!r} was asked for, {effective[name]!r} took effect")
    largest = largest_b(trained)
    if not (math.isfinite(largest) and largest > 0):
        raise TrainingError(
            f"the largest entry of all B matrices is {largest!r}: the adapter would compute nothing; "
            "raise training.learning_rate or training.epochs"
        )
    if not base_unchanged:
        raise TrainingError("the frozen base weights changed during training; the adapter would not fit the base")
    return {
        "trainable_parameters": trained.trainable_parameters,
        "finite_steps": len(fitted.result.losses),
        "largest_b": largest,
        "base_unchanged": True,
        "effective_as_configured": True,
    }
