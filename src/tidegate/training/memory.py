"""How much memory a run may take, before it takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidegate.core.errors import TrainingError
from tidegate.training.model import LoraModel
from tidegate.training.packing import Pack

_FLOAT = 4
_LOGITS_COPIES = 4  # scores, their float copy, log-probabilities, gradient
_HIDDEN_COPIES = 14  # a layer's inputs and outputs of width hidden_size that the backward pass needs
_INNER_COPIES = 8  # the same of width intermediate_size
_ADAPTER_COPIES = 4  # weights, gradients, two moments
_REST = 400 << 20  # interpreter, libraries and buffers


def memory_bound(trained: LoraModel, rows: Sequence[Pack], *, checkpointing: bool) -> int | None:
    """Most bytes that the process needs for these rows; None where the configuration names no sizes.

    The largest row decides: its activations, which grow with its tokens, and its logits, which grow with what is
    predicted. With ``checkpointing`` only one layer's activations live at a time, and each layer's input.
    """
    config: Any = trained.base.config.get_text_config(decoder=True)
    sizes = [getattr(config, name, None) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")]
    if not all(isinstance(size, int) for size in sizes):
        return None
    hidden, inner, layers = (int(size) for size in sizes if size is not None)
    width = _HIDDEN_COPIES * hidden + _INNER_COPIES * inner
    node = (width + hidden * layers if checkpointing else width * layers) * _FLOAT
    logits = int(config.vocab_size) * _FLOAT * _LOGITS_COPIES
    largest = max(len(row.token_ids) * node + len(row.targets) * logits for row in rows)
    base = sum(parameter.numel() * parameter.element_size() for parameter in trained.base.parameters())
    return base + trained.trainable_parameters * _FLOAT * _ADAPTER_COPIES + largest + _REST


def require_memory(bound: int | None, available: int | None) -> None:
    """Refuse a run that would not fit into what is ``available``, both in bytes.

    Raises:
        TrainingError: the bound is above what there is.
    """
    if bound is not None and available is not None and bound > available:
        raise TrainingError(
            f"training needs up to {bound / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free; lower "
            "training.max_tokens_at_once or training.max_length, or set training.gradient_checkpointing = true"
        )
