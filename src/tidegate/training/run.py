"""One training run from job to adapter directory, inside the worker process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidegate.core.errors import TrainingError
from tidegate.training.adapter_files import largest_b, write_adapter
from tidegate.training.examples import read_examples, render_example
from tidegate.training.forward import prepare_forward
from tidegate.training.job import TrainingJob, TrainingReport
from tidegate.training.loop import Emit, LoopResult, run_loop
from tidegate.training.model import LoraModel, base_fingerprint, load_model
from tidegate.training.packing import TrainingSequence


def train(job: TrainingJob, staging: Path, *, emit: Emit, clock: Callable[[], float]) -> TrainingReport:
    """Train and write the adapter into ``staging``, which must not exist; publishing it is the launcher's.

    Raises:
        TrainingError: nothing came out that may be proposed; what lies in ``staging`` is of no use then.
    """
    started = clock()
    examples = read_examples(job.examples)
    trained = load_model(job)
    if trained.trainable_parameters == 0:
        raise TrainingError("0 parameters are trainable: no linear layer of this base takes LoRA matrices")
    rendered = [sequence for example in examples for sequence in render_example(trained.tokenizer, example)]
    kept, too_long, untrained = select_sequences(rendered, max_length=job.max_length)
    if not kept:
        raise TrainingError(
            f"no example to train on: {len(examples)} examples gave {len(rendered)} sequences, of which {too_long} "
            f"are longer than {job.max_length} tokens and {untrained} train no token"
        )
    _require_vocabulary(trained, kept)
    before = base_fingerprint(trained)
    forward = prepare_forward(trained.base, trained.model, kept)
    result = run_loop(job, forward, list(trained.tensors.values()), kept, emit=emit, clock=clock)
    effective = _effective(job, trained, result, sequences=len(kept), packed=forward.packed)
    guards = _guards(job, trained, result, effective, base_unchanged=base_fingerprint(trained) == before)
    sha256 = write_adapter(staging, trained, job, effective=effective, losses=result.losses)
    if sha256 == job.parent_sha256:
        raise TrainingError(
            f"after {len(result.losses)} steps the adapter is still {sha256}: training changed nothing; "
            "raise training.learning_rate or training.epochs"
        )
    return TrainingReport(
        adapter_sha256=sha256,
        adapter_path=str(job.output_root / sha256),
        steps=len(result.losses),
        examples=len(examples),
        sequences=len(kept),
        dropped_too_long=too_long,
        dropped_untrained=untrained,
        tokens=result.tokens,
        tokens_computed=result.tokens_computed,
        tokens_trained=result.tokens_trained,
        losses=result.losses,
        grad_norms=result.grad_norms,
        seconds=clock() - started,
        trainable_parameters=trained.trainable_parameters,
        configured=job.training.model_dump(mode="json"),
        effective=effective,
        guards=guards,
    )


def select_sequences(
    sequences: Sequence[TrainingSequence], *, max_length: int
) -> tuple[list[TrainingSequence], int, int]:
    """Sequences that can be trained, and how many are too long or train nothing; none is ever cut."""
    trained = [sequence for sequence in sequences if sequence.input_length > 0]
    kept = [sequence for sequence in trained if len(sequence.token_ids) <= max_length]
    return kept, len(trained) - len(kept), len(sequences) - len(trained)


def _require_vocabulary(trained: LoraModel, sequences: Sequence[TrainingSequence]) -> None:
    size = int(trained.base.get_input_embeddings().num_embeddings)
    worst = max(sequences, key=lambda sequence: max(sequence.token_ids))
    if max(worst.token_ids) >= size:
        raise TrainingError(
            f"example {worst.example_id!r} holds token {max(worst.token_ids)}, this base knows 0 to {size - 1}; "
            "the batch was recorded from another model"
        )


def _effective(
    job: TrainingJob, trained: LoraModel, result: LoopResult, *, sequences: int, packed: bool
) -> dict[str, Any]:
    """The hyperparameters as they took effect, measured on the model, the optimizer and the loop."""
    layers = [module for module in trained.model.modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")]
    ranks = {int(tensor.shape[0]) for name, tensor in trained.tensors.items() if ".lora_A." in name}
    scales = {float(layer.scaling["default"]) for layer in layers}
    rank = ranks.pop() if len(ranks) == 1 else -1
    return {
        "rank": rank,
        "alpha": scales.pop() * rank if len(scales) == 1 else -1,
        "learning_rate": max(result.rates),
        "mean_learning_rate": sum(result.rates) / len(result.rates),
        "epochs": result.sequences_seen / sequences,
        "steps": len(result.losses),
        "batch_size": result.largest_batch,
        "weight_decay": result.weight_decay,
        "clipped_steps": sum(norm > job.training.max_grad_norm for norm in result.grad_norms),
        "sequences": sequences,
        "dtype": job.dtype,
        "threads": job.compute_threads,
        "packed": packed,
    }


def _guards(
    job: TrainingJob, trained: LoraModel, result: LoopResult, effective: dict[str, Any], *, base_unchanged: bool
) -> dict[str, Any]:
    """Check what must hold after the loop.

    Raises:
        TrainingError: something does not.
    """
    settings = job.training
    for name, configured in (
        ("rank", settings.rank),
        ("alpha", settings.alpha),
        ("learning_rate", settings.learning_rate),
        ("epochs", settings.epochs),
        ("steps", settings.epochs * math.ceil(effective["sequences"] / settings.batch_size)),
        ("weight_decay", settings.weight_decay),
    ):
        if not math.isclose(effective[name], configured, rel_tol=1e-6):
            raise TrainingError(f"training.{name} = {configured!r} was asked for, {effective[name]!r} took effect")
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
        "finite_steps": len(result.losses),
        "largest_b": largest,
        "base_unchanged": True,
        "effective_as_configured": True,
    }
