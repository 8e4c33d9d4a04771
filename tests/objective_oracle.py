"""The objectives once more, written from the papers with loops over plain float64 numbers, to test against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Random rows with every optional input; log-probabilities are single-precision numbers."""

    logprobs: Floats
    old: Floats
    reference: Floats
    mask: NDArray[np.bool_]
    advantages: Floats
    importance: Floats
    entropy: Floats


def random_batch(seed: int, *, spread: float = 0.4, per_token: bool = False) -> Batch:
    """Five rows of up to nine tokens; ``spread`` is the deviation of the log-ratios."""
    stream = np.random.default_rng(seed)
    rows, width = 5, 9
    lengths = stream.integers(1, width + 1, rows)
    mask = np.arange(width)[None, :] < lengths[:, None]
    mask[0, 0] = lengths[0] == 1  # the trained tokens need not begin with the row
    logprobs = -stream.uniform(1.5, 6.0, (rows, width))
    noise = stream.standard_normal((2, rows, width)) * spread
    single = [
        np.minimum(values, 0.0).astype(np.float32) for values in (logprobs, logprobs + noise[0], logprobs + noise[1])
    ]
    return Batch(
        logprobs=single[0].astype(np.float64),
        old=single[1].astype(np.float64),
        reference=single[2].astype(np.float64),
        mask=mask,
        advantages=_single(stream.standard_normal((rows, width) if per_token else rows)),
        importance=_single(stream.uniform(0.0, 3.0, (rows, width))),
        entropy=_single(stream.uniform(0.0, 4.0, (rows, width))),
    )


def _single(values: Floats) -> Floats:
    return values.astype(np.float32).astype(np.float64)


def token_loss(name: str, batch: Batch, place: tuple[int, int], options: dict[str, float], frozen: Floats) -> float:
    """The loss of one token. ``frozen`` stands for log-probabilities where a paper stops the gradient."""
    row, token = place
    low, high = 1 - options.get("eps_low", 0.0), 1 + options.get("eps_high", 0.0)
    advantage = batch.advantages[row] if batch.advantages.ndim == 1 else batch.advantages[row, token]
    log_pi, log_old = batch.logprobs[row, token], batch.old[row, token]
    if name in ("ppo_clip", "grpo"):
        ratio = math.exp(log_pi) / math.exp(log_old)
        return -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if name == "reinforce":
        return -advantage * log_pi
    if name == "cispo":
        ratio = math.exp(frozen[row, token]) / math.exp(log_old)
        return -min(max(ratio, low), high) * advantage * log_pi
    assert name == "gspo"
    ratio = sequence_ratio(batch, row)
    return -min(ratio * advantage, min(max(ratio, low), high) * advantage)


def sequence_ratio(batch: Batch, row: int) -> float:
    """(pi(y) / old(y)) ^ (1 / |y|)."""
    places = [token for token in range(batch.mask.shape[1]) if batch.mask[row, token]]
    likelihood = math.prod(math.exp(batch.logprobs[row, t]) / math.exp(batch.old[row, t]) for t in places)
    return likelihood ** (1 / len(places))


def kl_k3(log_pi: float, log_reference: float) -> float:
    """q/p - log(q/p) - 1."""
    return math.exp(log_reference) / math.exp(log_pi) - (log_reference - log_pi) - 1


def policy_loss(
    name: str, batch: Batch, how: str, options: dict[str, float], *, beta: float = 0.0, frozen: Floats | None = None
) -> float:
    """The whole objective with importance weights and KL penalty."""
    stopped = batch.logprobs if frozen is None else frozen
    losses = np.zeros(batch.mask.shape)
    for place in zip(*np.nonzero(batch.mask), strict=True):
        loss = token_loss(name, batch, place, options, stopped)
        loss += beta * kl_k3(batch.logprobs[place], batch.reference[place])
        losses[place] = batch.importance[place] * loss
    return averaged(losses, batch.mask, how)


MAX_LENGTH = 12


def averaged(losses: Floats, mask: NDArray[np.bool_], how: str) -> float:
    """DAPO, GRPO and Dr. GRPO averages of a whole batch."""
    rows = [[losses[row, t] for t in range(mask.shape[1]) if mask[row, t]] for row in range(len(mask))]
    if how == "token":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if how == "sequence":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(sum(row) for row in rows) / (len(rows) * MAX_LENGTH)


def gradient(function: Callable[[Floats], float], at: Floats, step: float = 1e-6) -> Floats:
    """Central differences."""
    found = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        found[place] = (function(up) - function(down)) / (2 * step)
    return found


def softmax(scores: Any) -> list[float]:
    """Probabilities of one row of scores."""
    largest = max(scores)
    odds = [math.exp(score - largest) for score in scores]
    return [odd / sum(odds) for odd in odds]


def kl_divergence(p: list[float], q: list[float]) -> float:
    """sum p log(p / q)."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def bucketed(p: list[float], ids: list[int]) -> list[float]:
    """Mass of each named token, and of all others together."""
    return [*(p[token] for token in ids), sum(mass for token, mass in enumerate(p) if token not in ids)]


def relative_error(found: Any, expected: Any) -> float:
    """Distance over length."""
    difference = np.linalg.norm(np.asarray(found, dtype=np.float64) - np.asarray(expected))
    return float(difference / np.linalg.norm(np.asarray(expected)))
