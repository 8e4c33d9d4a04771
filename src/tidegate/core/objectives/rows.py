"""Padded rows of tokens: what is checked before anything is computed, and how per-token losses become one number.

A row is one sequence. ``mask_B_T`` is 1 where a token is trained; what stands elsewhere is never read, so padding may
hold anything. Half precision is computed in float32, float64 stays float64.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

How = Literal["token", "sequence", "dr_grpo"]

_ABOVE_ZERO = 1e-4
"""How far above 0 rounding may put a log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How the per-token losses of a batch are averaged, with the counts of the whole batch.

    The counts are those of the batch, not of the part at hand, so that the losses and gradients of the parts add up
    to those of the whole.

    - ``token``: sum over trained tokens / ``tokens``. Every token weighs the same, long sequences more (Yu et al.
      2025, DAPO).
    - ``sequence``: mean over each sequence's tokens, summed / ``sequences``. Every sequence weighs the same, a token
      of a long one less (Shao et al. 2024, GRPO).
    - ``dr_grpo``: sum over trained tokens / (``sequences`` * ``max_length``). Neither depends on the length (Liu et
      al. 2025, Dr. GRPO).

    ``tokens`` and ``sequences`` >= 1 count what the whole batch trains; ``max_length`` is the longest completion that
    may be generated, a constant of the run, >= 1 for ``dr_grpo`` and unused otherwise.

    Raises:
        ValueError: ``how`` is unknown, or a count is missing or below 1.
    """

    how: How = "token"
    tokens: int
    sequences: int
    max_length: int = 0

    def __post_init__(self) -> None:
        """Refuse what could not normalise a loss."""
        if self.how not in get_args(How):
            raise ValueError(f"unknown aggregation {self.how!r}; choose one of {', '.join(map(repr, get_args(How)))}")
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError(
                f"tokens = {self.tokens!r}, sequences = {self.sequences!r} cannot normalise a loss; "
                "the counts of the whole batch, >= 1, are expected"
            )
        if self.how == "dr_grpo" and self.max_length < 1:
            raise ValueError(
                f"max_length = {self.max_length!r}; 'dr_grpo' divides by the longest completion allowed, >= 1"
            )


def aggregate(losses_B_T: torch.Tensor, mask_B_T: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """Sum up the per-token losses of a batch, or of a part of it.

    Args:
        losses_B_T: one loss a token, shape (B, T).
        mask_B_T: 1 where a token is trained, shape (B, T), bool or 0/1; at least one in each row.
        aggregation: how, with the counts of the whole batch.

    Returns:
        A scalar; over parts of the batch these add up to the value of the whole.

    Raises:
        ValueError: shapes do not fit, a row trains nothing, or the part is larger than the batch is said to be.
    """
    trained_B_T = trained_tokens(mask_B_T, losses_B_T.shape)
    rows, tokens = len(trained_B_T), int(trained_B_T.sum())
    if tokens > aggregation.tokens or rows > aggregation.sequences:
        raise ValueError(
            f"{tokens} trained tokens in {rows} sequences are more than the {aggregation.tokens} in "
            f"{aggregation.sequences} that the whole batch is said to hold; pass the counts of the whole batch"
        )
    kept_B_T = torch.where(trained_B_T, losses_B_T, 0.0)
    if aggregation.how == "token":
        return kept_B_T.sum() / aggregation.tokens
    if aggregation.how == "sequence":
        return (kept_B_T.sum(dim=1) / trained_B_T.sum(dim=1)).sum() / aggregation.sequences
    return kept_B_T.sum() / (aggregation.sequences * aggregation.max_length)


def exact(values: torch.Tensor, name: str) -> torch.Tensor:
    """The values in at least single precision.

    Raises:
        ValueError: they are not of a float type.
    """
    if not values.is_floating_point():
        raise ValueError(f"{name} is of type {values.dtype}; a float type is expected")
    return values if values.dtype == torch.float64 else values.float()


def trained_tokens(mask_B_T: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The mask as bool.

    Raises:
        ValueError: it is not (B, T) of ``shape``, holds other values than 0 and 1, or a row has no 1.
    """
    if mask_B_T.ndim != 2 or tuple(mask_B_T.shape) != tuple(shape) or mask_B_T.numel() == 0:
        raise ValueError(f"shapes {tuple(shape)} and mask {tuple(mask_B_T.shape)} do not fit; (B, T) twice is expected")
    trained_B_T = mask_B_T.bool()
    if not torch.equal(trained_B_T.to(mask_B_T.dtype), mask_B_T):
        raise ValueError("mask_B_T holds other values than 0 and 1; 1 where a token is trained is expected")
    empty = (~trained_B_T.any(dim=1)).nonzero()
    if len(empty):
        raise ValueError(f"row {int(empty[0])} trains no token; leave such sequences out of the batch and count them")
    return trained_B_T


def kept(values: torch.Tensor, trained_B_T: torch.Tensor, name: str) -> torch.Tensor:
    """The values in at least single precision, 0 where nothing is trained (with gradient 0).

    ``values`` is (B, T) or, with any number of values a token, (B, T, ...).

    Raises:
        ValueError: the shape does not fit, or a value of a trained token is not finite.
    """
    if values.shape[:2] != trained_B_T.shape:
        raise ValueError(
            f"shapes {name} {tuple(values.shape)} and mask {tuple(trained_B_T.shape)} do not fit; (B, T) is expected"
        )
    trained = trained_B_T.reshape(*trained_B_T.shape, *[1] * (values.ndim - 2))
    found = torch.where(trained, exact(values, name), 0.0)
    refuse(found, ~torch.isfinite(found), name, "finite numbers are accepted where the mask is 1")
    return found


def kept_logprobs(values: torch.Tensor, trained_B_T: torch.Tensor, name: str) -> torch.Tensor:
    """As :func:`kept`, for natural logarithms of probabilities.

    Raises:
        ValueError: as there, or a value of a trained token is above 0.
    """
    found = kept(values, trained_B_T, name)
    refuse(found, found > _ABOVE_ZERO, name, "log-probabilities, up to 0, are accepted")
    return found


def refuse(values: torch.Tensor, wrong: torch.Tensor, name: str, accepted: str) -> None:
    """Raise ``ValueError`` for the first of the values that is wrong, if one is; both of one shape."""
    places = wrong.nonzero()
    if len(places):
        place = tuple(places[0].tolist())
        raise ValueError(f"{name} is {values[place].item()!r} at {place}; {accepted}")


def refuse_outside(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ``ValueError`` for a setting that is not finite in [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        bound = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f">= {low:g}"
        raise ValueError(f"{name} = {value!r}; a finite number {bound} is accepted")
