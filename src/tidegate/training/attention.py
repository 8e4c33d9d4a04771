"""Attention over a packed token tree, for any transformers model that takes its attention by name.

Each segment's queries see the keys of the segments above it and, causally, its own. The model's other layers
work on single tokens and do not notice the packing; positions are given explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader knows
from transformers import AttentionInterface

from tidegate.training.packing import Pack, Segment

NAME = "tidegate_packed"

# Options of other attention kinds; to ignore one would compute something else.
_REFUSED = ("softcap", "s_aux", "position_bias", "sliding_window")


class PackedAttention:
    """The attention function of one model; ``layout`` is set before each forward pass."""

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] = ()
        self._lengths: list[int] = []
        self._masks: list[torch.Tensor | None] = []

    def layout(self, pack: Pack) -> None:
        """Take the tree of the next forward pass."""
        self._segments = pack.segments
        self._lengths = [segment.stop - segment.start for segment in pack.segments]
        self._masks = [
            self._mask(segment, length) for segment, length in zip(self._segments, self._lengths, strict=True)
        ]

    def _mask(self, segment: Segment, length: int) -> torch.Tensor | None:
        """Which keys (S, P + S) a segment's queries see; None where plain causal attention is meant."""
        above = sum(self._lengths[ancestor] for ancestor in segment.ancestors)
        return torch.ones(length, above + length, dtype=torch.bool).tril(above) if above else None

    def __call__(  # noqa: PLR0917 - the order that transformers calls with
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; query (1, H, N, D), key and value (1, H', N, D), returns (1, N, H, D)."""
        del attention_mask, dropout
        refused = [name for name in _REFUSED if options.get(name) is not None]
        if refused:
            raise NotImplementedError(f"attention options {refused} are not known to the packed attention")
        groups = query.shape[1] // key.shape[1]
        queries = query.split(self._lengths, dim=2)
        keys = key.split(self._lengths, dim=2)
        values = value.split(self._lengths, dim=2)
        outputs = [
            F.scaled_dot_product_attention(
                queries[index],
                _repeated(keys, (*segment.ancestors, index), groups),
                _repeated(values, (*segment.ancestors, index), groups),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
            for index, (segment, mask) in enumerate(zip(self._segments, self._masks, strict=True))
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _repeated(parts: Sequence[torch.Tensor], path: Sequence[int], groups: int) -> torch.Tensor:
    """Join a path's keys (or values) and give each query head its copy."""
    joined = parts[path[0]] if len(path) == 1 else torch.cat([parts[index] for index in path], dim=2)
    return joined if groups == 1 else joined.repeat_interleave(groups, dim=1)


def attends_to_everything(config: Any) -> bool:
    """Whether every layer sees all earlier tokens; windows and recurrences cannot be cut into a tree."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None or getattr(config, "use_sliding_window", True) is False


def install(model: Any) -> PackedAttention:
    """Let ``model`` attend over packed trees.

    Raises:
        ValueError: the model does not take its attention by name.
    """
    attention = PackedAttention()
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    return attention
