"""Next tokens for a batch of rows, each with its own decoding settings and its own random stream.

One uniform number a token and row, turned into a token by the inverse distribution function: what a row draws
depends on its seed and its logits, never on who shares the batch.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tidegate.core.types import Sampling
from tidegate.engines.embedded.constraints import Constraint

# Below this temperature everything but the best token has probability 0 in float32; dividing by less overflows.
_LOWEST_TEMPERATURE = 1e-6


@dataclass(slots=True, kw_only=True)
class RowSampler:
    """Settings and random stream of one choice; ``counts`` are the tokens sampled so far, for penalties.

    ``constraint``: what the answer is held to, None for free text.
    """

    sampling: Sampling
    stream: random.Random
    constraint: Constraint | None = None
    counts: Counter[int] = field(default_factory=Counter[int])

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change later logits."""
        return bool(self.sampling.presence_penalty or self.sampling.frequency_penalty)

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p cut the distribution that is sampled from."""
        return self.sampling.temperature > 0 and (self.sampling.top_p < 1.0 or self.sampling.top_k > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A token with its log-probability; ``top`` holds (token, log-probability) pairs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choice_stream(seed: int, choice: int) -> random.Random:
    """The random stream of choice ``choice`` of a request with ``seed``; the same on every machine."""
    digest = hashlib.sha256(f"tidegate-choice:{seed}:{choice}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))  # noqa: S311 - sampling, not security


def sample(logits: torch.Tensor, rows: Sequence[RowSampler]) -> list[Sampled]:
    """Draw one token a row.

    Log-probabilities are those of the softmax of the (penalised, constrained) logits over the temperature, before top-k
    and top-p; at temperature 0 of the logits themselves. A row whose logits are not finite, or whose constraint allows
    nothing, gets a NaN.

    Args:
        logits: (R, V), any float type; computed on in float32.
        rows: R samplers; their streams advance and their counts grow.
    """
    scores = logits.float()
    if any(row.penalised for row in rows):
        scores = _penalised(scores, rows)
    if any(row.constraint is not None for row in rows):
        scores = _constrained(scores, rows)
    temperatures = [max(row.sampling.temperature, _LOWEST_TEMPERATURE) if _is_random(row) else 1.0 for row in rows]
    scores = scores - scores.amax(dim=-1, keepdim=True)
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures)[:, None]
    logprobs = torch.log_softmax(scores, dim=-1)
    tokens = logprobs.argmax(dim=-1)
    drawing = [index for index, row in enumerate(rows) if _is_random(row)]
    if drawing:
        chosen = logprobs if len(drawing) == len(rows) else logprobs[drawing]
        tokens[drawing] = _drawn(chosen, [rows[index] for index in drawing])
    picked = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    result: list[Sampled] = []
    for index, (row, token_id, logprob) in enumerate(zip(rows, tokens.tolist(), picked, strict=True)):
        top: tuple[tuple[int, float], ...] = ()
        if row.sampling.top_logprobs:
            best = logprobs[index].topk(min(row.sampling.top_logprobs, logprobs.shape[1]))
            found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            top = tuple((token, value) for token, value in found if value > -math.inf)  # fewer may be allowed
        row.counts[token_id] += 1
        if row.constraint is not None and math.isfinite(logprob):
            row.constraint.accept(token_id)
        result.append(Sampled(token_id=token_id, logprob=logprob, top=top))
    return result


def _is_random(row: RowSampler) -> bool:
    return row.sampling.temperature > 0


def _penalised(scores: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    scores = scores.clone()
    for index, row in enumerate(rows):
        if row.penalised and row.counts:
            ids = torch.tensor(list(row.counts.keys()))
            counts = torch.tensor(list(row.counts.values()), dtype=scores.dtype)
            scores[index, ids] -= row.sampling.presence_penalty + row.sampling.frequency_penalty * counts
    return scores


def _constrained(scores: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    scores = scores.clone()
    for index, row in enumerate(rows):
        if row.constraint is not None:
            scores[index].masked_fill_(~row.constraint.allowed(), -math.inf)
    return scores


def _drawn(logprobs: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """Inverse transform sampling of each row: (R,) token ids."""
    probabilities = logprobs.exp()
    for index, row in enumerate(rows):
        if row.filtered:
            probabilities[index] = _filtered(probabilities[index], row.sampling)
    # float64: in float32 the running sum over a large vocabulary loses the rare tokens at its end
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.tensor([row.stream.random() for row in rows], dtype=torch.float64)
    targets = (uniform * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return tokens.clamp_(max=logprobs.shape[1] - 1)


def _filtered(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero outside the ``top_k`` best tokens and outside the smallest set that reaches ``top_p``."""
    ordered, indices = probabilities.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        total = ordered[keep].sum()
        before = (ordered * keep).cumsum(dim=-1) - ordered
        keep &= before < sampling.top_p * total
    keep[0] = True
    return torch.zeros_like(probabilities).scatter_(0, indices[keep], ordered[keep])
