"""Logits of packed sequences under a model: only where a token is trained.

Packing is proven on the model before it is used: the first sequences are computed together and one by one,
and when the results differ the run goes on one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader knows

from tidegate.training.attention import PackedAttention, attends_to_everything, install
from tidegate.training.packing import Pack, TrainingSequence, micro_batches, pack

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of logits relative to their size; rounding stays far below, a wrong mask lies far above."""

_PROVEN_ON = 3
"""Sequences that the proof computes: enough for a tree with a branch below a branch."""


class Forward:
    """Computes logits; ``attention`` None computes each sequence by itself."""

    def __init__(self, model: Any, attention: PackedAttention | None) -> None:
        self._model = model
        self._attention = attention

    @property
    def packed(self) -> bool:
        """Whether sequences share one row."""
        return self._attention is not None

    def parts(self, sequences: Sequence[TrainingSequence], *, max_nodes: int) -> list[Pack]:
        """Cut a batch into rows that are computed one after another."""
        if self._attention is None:
            return [pack([sequence]) for sequence in sequences]
        return [pack(part) for part in micro_batches(sequences, max_nodes=max_nodes)]

    def logits(self, row: Pack) -> torch.Tensor:
        """Logits (K, V) at the predicting nodes of a row."""
        if self._attention is not None:
            self._attention.layout(row)
        output = self._model(
            input_ids=torch.tensor([row.token_ids]),
            position_ids=torch.tensor([row.positions]),
            logits_to_keep=torch.tensor(row.predicted_at),
            use_cache=False,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def logprobs(self, row: Pack, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (K,) of the row's targets, in float32."""
        return -F.cross_entropy(logits.float(), torch.tensor(row.targets), reduction="none")


def prepare_forward(base: Any, model: Any, sequences: Sequence[TrainingSequence]) -> Forward:
    """The fastest way to compute logits that is right for this model.

    Args:
        base: the transformers model that ``model`` wraps.
        model: what computes, adapter included.
        sequences: what will be trained; the shortest serve the proof.
    """
    plain = Forward(model, None)
    if not attends_to_everything(base.config.get_text_config(decoder=True)):
        return plain
    sample = sorted(sequences, key=lambda sequence: (sequence.input_length, sequence.token_ids))[:_PROVEN_ON]
    former = base.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    with torch.no_grad():
        expected = _by_prediction(plain, [pack([sequence]) for sequence in sample])
        try:
            packed = Forward(model, install(base))
            computed = _by_prediction(packed, [pack(sample)])
        except (NotImplementedError, ValueError, TypeError, RuntimeError):
            computed = {}
        else:
            tolerance = _TOLERANCE.get(base.dtype, _TOLERANCE[torch.bfloat16])
            if _agree(expected, computed, tolerance):
                return packed
    base.set_attn_implementation(former)
    return plain


def _by_prediction(forward: Forward, rows: Sequence[Pack]) -> dict[tuple[tuple[int, ...], int], torch.Tensor]:
    """Logits by the tokens that lead to them and the target."""
    found: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}
    for row in rows:
        logits = forward.logits(row)
        for node, target, scores in zip(row.predicted_at, row.targets, logits, strict=True):
            found[_history(row, node), target] = scores.float()
    return found


def _history(row: Pack, node: int) -> tuple[int, ...]:
    segment = next(segment for segment in row.segments if segment.start <= node < segment.stop)
    above = [token for index in segment.ancestors for token in _tokens(row, index)]
    return (*above, *row.token_ids[segment.start : node + 1])


def _tokens(row: Pack, index: int) -> tuple[int, ...]:
    return row.token_ids[row.segments[index].start : row.segments[index].stop]


def _agree(expected: dict[Any, torch.Tensor], computed: dict[Any, torch.Tensor], tolerance: float) -> bool:
    if expected.keys() != computed.keys():
        return False
    return all(
        float((expected[key] - computed[key]).abs().max()) <= tolerance * max(1.0, float(expected[key].abs().max()))
        for key in expected
    )
