"""A byte-level language model without weights: the next token depends on the last three and on an adapter's bytes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

START, END = 256, 257
VOCABULARY = 258
_CONTEXT = 3
_PRINTABLE = np.array([32 <= token < 127 for token in range(VOCABULARY)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One sampled token, its log-probability as the server states it, and the best others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_text(token: int) -> str:
    return {START: "<|start|>", END: "<|end|>"}.get(token, chr(token))


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
    """The chat template."""
    tokens: list[int] = []
    listing = "".join(tool["function"]["name"] for tool in tools)
    for message in [*messages, None]:
        role = "assistant" if message is None else message["role"]
        tokens += [START, *f"{role}\n{listing}".encode()]
        if message is not None:
            content = message.get("content") or ""
            tokens += [*(content if isinstance(content, str) else str(content)).encode(), END]
        listing = ""
    return tokens


def log_probabilities(context: Sequence[int], weights: bytes | None, temperature: float = 1.0) -> npt.NDArray[Any]:
    """(V,) of the token after ``context``."""
    key = bytes(str(list(context[-_CONTEXT:])), "ascii")
    logits = np.where(_PRINTABLE, 4.0, 0.0) + _noise(key) * 2.0
    logits[END] = 3.0 + _noise(key)[END]
    if weights is not None:
        logits = logits + _noise(key + weights) * 1.5
    logits = logits / temperature
    return logits - np.logaddexp.reduce(logits)


def draw(
    context: Sequence[int], weights: bytes | None, *, temperature: float, stream: random.Random, raw: bool, top: int
) -> Drawn:
    """The next token; log-probabilities of temperature 1 when ``raw``."""
    sampled_from = log_probabilities(context, weights, temperature or 1.0)
    if temperature == 0.0:
        token = int(sampled_from.argmax())
    else:
        token = int(min(np.searchsorted(np.exp(sampled_from).cumsum(), stream.random()), VOCABULARY - 1))
    stated = log_probabilities(context, weights) if raw else sampled_from
    return stated_of(token, stated, top)


def stated_of(token: int, logprobs: npt.NDArray[Any], top: int) -> Drawn:
    best = np.argsort(-logprobs, kind="stable")[:top]
    return Drawn(
        token=token, logprob=float(logprobs[token]), top=tuple((int(one), float(logprobs[one])) for one in best)
    )


def _noise(key: bytes) -> npt.NDArray[Any]:
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.default_rng(seed).normal(size=VOCABULARY)
