"""Forward passes of one set of weights, with slots for running rows and without any cache for checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tidegate.core.errors import ModelError
from tidegate.engines.embedded.slots import SlotCache, visible_columns

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Runner:
    """A causal LM and the attention pattern that its masks must follow.

    Positions whose logits are wanted are always named by index, never by their number: for a number models slice, and
    a product with the strided slice takes torch 2.13 on a CPU up to a hundred times as long as one with a copy.

    Args:
        model: a transformers causal LM in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config(decoder=True)
        self._dtype: torch.dtype = model.dtype
        self._window: int | None = getattr(config, "sliding_window", None)
        self._by_layer_type = bool(getattr(config, "layer_types", None))

    def advance(
        self, slots: SlotCache, first: int, token_ids: torch.Tensor, positions: torch.Tensor, keep: Sequence[int]
    ) -> torch.Tensor:
        """Compute tokens of neighbouring rows and write their keys and values.

        Args:
            slots: with room for every position.
            first: slot of the first row.
            token_ids: (R, S).
            positions: (R, S), consecutive within a row; columns before them hold earlier tokens.
            keep: indices into S whose logits are wanted.

        Returns:
            Logits (R, len(keep), V).
        """
        width = int(positions.max()) + 1
        slots.aim(first, positions, width)
        return self.model(
            input_ids=token_ids,
            attention_mask=self._masks(positions, width),
            position_ids=positions,
            cache=slots,
            use_cache=True,
            logits_to_keep=torch.tensor(list(keep)),
        ).logits

    def plain_logits(self, token_ids: Sequence[int], *, last: int = 0) -> torch.Tensor:
        """Float32 logits (T, V), or (last, V) of the last positions, of one sequence without a cache."""
        ids = torch.tensor([list(token_ids)])
        kept = torch.arange(ids.shape[1])[-last:]
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0].float()

    def _masks(self, positions: torch.Tensor, width: int) -> torch.Tensor | Mapping[str, torch.Tensor]:
        if not self._by_layer_type:
            return visible_columns(positions, width, self._dtype, self._window)
        masks = {_FULL: visible_columns(positions, width, self._dtype)}
        if self._window is not None:
            masks[_SLIDING] = visible_columns(positions, width, self._dtype, self._window)
        return masks


def refuse_unsupported_attention(config: Any) -> None:
    """Refuse architectures whose layers keep another state than one key and value a token.

    Raises:
        ModelError: names the architecture and what it has.
    """
    text_config = config.get_text_config(decoder=True)
    layer_types: Sequence[str] = getattr(text_config, "layer_types", None) or ()
    kinds = set(layer_types) - {_FULL, _SLIDING}
    if getattr(text_config, "attention_chunk_size", None) is not None:
        kinds.add("chunked_attention")
    if getattr(config, "is_encoder_decoder", False):
        kinds.add("encoder-decoder")
    if kinds:
        raise ModelError(
            f"architecture {architecture(config)!r} has layers of kind {sorted(kinds)}; the embedded engine serves "
            "decoders with full or sliding-window attention only; serve this model with an external engine"
        )


def architecture(config: Any) -> str:
    """The name to show for a configuration."""
    names: Sequence[str] = getattr(config, "architectures", None) or ()
    return names[0] if names else str(config.model_type)
