"""How much memory a run may take, before it takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.config.training import TrainingSettings
from tidegate.core.errors import TrainingError
from tidegate.training.model import LoraModel
from tidegate.training.packing import TrainingSequence

_FLOAT = 4
_LOGITS_COPIES = 5  # scores, their float copy, log-probabilities, gradients
_DIVERGENCE_COPIES = 9  # scores of the start, and what the exact divergence computes in double precision
_HIDDEN_COPIES = 14  # a layer's inputs and outputs of width hidden_size that the backward pass needs
_INNER_COPIES = 8  # the same of width intermediate_size
_STATE_COPIES = 3  # of the adapter: gradients, two moments
_WRITTEN_COPIES = 6  # of the adapter while a checkpoint is written: weights and two moments, twice
_REST = 400 << 20  # interpreter, libraries and buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """Most bytes of a run: ``total`` of the whole process, ``ahead`` of what it takes once the model is loaded."""

    total: int
    ahead: int


def memory_bound(
    trained: LoraModel, sequences: Sequence[TrainingSequence], settings: TrainingSettings, *, packed: bool
) -> MemoryBound | None:
    """Most bytes that training on any batches of these sequences takes.

    The widest row decides: its activations, which grow with its tokens, and its logits, which grow with what is
    predicted. With ``gradient_checkpointing`` only one layer's activations live at a time, and each layer's input.

    Args:
        trained: the model as it is loaded.
        sequences: of the run, at least one.
        settings: decide how much of them is computed at once, and which copies are kept.
        packed: whether sequences share a row.

    Returns:
        The bound, None where the model's configuration names no sizes.
    """
    diverges = settings.objective == "sft" and settings.kl_coefficient > 0
    nodes, predictions = widest_row(sequences, settings, packed=packed)
    return bound_of_row(
        trained,
        settings,
        nodes=nodes,
        predictions=predictions,
        logits_copies=_LOGITS_COPIES + _DIVERGENCE_COPIES * diverges,
        starts=int(diverges),
    )


def bound_of_row(
    trained: LoraModel,
    settings: TrainingSettings,
    *,
    nodes: int,
    predictions: int,
    logits_copies: int,
    starts: int,
) -> MemoryBound | None:
    """Most bytes of a run whose widest row has ``nodes`` tokens and logits for ``predictions`` of them.

    Args:
        trained: the model as it is loaded.
        settings: of the run.
        nodes: tokens that are computed at once.
        predictions: of these, those whose logits exist.
        logits_copies: how often the logits exist at once, counted in float32.
        starts: copies of the adapter's weights that are kept to compare with.

    Returns:
        The bound, None where the model's configuration names no sizes.
    """
    config: Any = trained.base.config.get_text_config(decoder=True)
    sizes = [getattr(config, name, None) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    hidden, inner, layers = (int(size) for size in sizes if size is not None)
    width = _HIDDEN_COPIES * hidden + _INNER_COPIES * inner
    node = (width + hidden * layers if settings.gradient_checkpointing else width * layers) * _FLOAT
    adapter = trained.trainable_parameters * _FLOAT
    passing = nodes * node + predictions * int(config.vocab_size) * _FLOAT * logits_copies
    if settings.checkpoint_steps:
        passing = max(passing, _WRITTEN_COPIES * adapter)
    ahead = (_STATE_COPIES + starts) * adapter + passing
    base = sum(parameter.numel() * parameter.element_size() for parameter in trained.base.parameters())
    return MemoryBound(total=base + adapter + ahead + _REST, ahead=ahead)


def widest_row(sequences: Sequence[TrainingSequence], settings: TrainingSettings, *, packed: bool) -> tuple[int, int]:
    """Most nodes and most predictions of any row, whichever sequences a step draws.

    Each prediction leads to a node of the row or is the last of its sequence. ``sft`` computes a step's sequences
    together; other objectives also go over all of them at once, and ``kto`` over prompts with the answers to others.
    """
    longest = max(sequence.input_length for sequence in sequences)
    if settings.objective == "kto":
        prompt = max(sequence.loss_mask.index(1) for sequence in sequences)
        answer = max(len(sequence.token_ids) - sequence.loss_mask.index(1) for sequence in sequences)
        longest = max(longest, min(settings.max_length, prompt + answer))
    together, nodes = 1, longest
    if packed:
        together = min(len(sequences), settings.batch_size if settings.objective == "sft" else len(sequences))
        nodes = max(longest, min(settings.max_tokens_at_once, sum(sequence.input_length for sequence in sequences)))
    trained = sorted((sequence.trained for sequence in sequences), reverse=True)
    return nodes, min(sum(trained[:together]), nodes + together)


def require_memory(bound: MemoryBound | None, available: int | None) -> None:
    """Refuse a run that would not fit into what is ``available`` in bytes beside the loaded model.

    Raises:
        TrainingError: what the run has still to take is above what there is.
    """
    if bound is not None and available is not None and bound.ahead > available:
        raise TrainingError(
            f"training needs up to {bound.ahead / 2**30:.2f} GiB beside the loaded model "
            f"({bound.total / 2**30:.2f} GiB in all), {available / 2**30:.2f} GiB are free; "
            "lower training.max_tokens_at_once or training.max_length, or set training.gradient_checkpointing = true"
        )
