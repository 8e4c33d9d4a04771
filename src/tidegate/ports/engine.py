"""The engine port: something that turns messages into tokens with a named adapter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.core.types import AdapterRef, GenerationEvent, GenerationRequest, Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Proof of what is loaded: the hash of the bytes that were loaded and how far they move the answers.

    ``max_logit_difference``: 0 where the weights can't be told apart, else the largest difference that is found, in
    the engine's unit: of next-token logits (embedded) or of log-probabilities in nats (a server that gives no logits).
    """

    name: str
    sha256: str
    max_logit_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """State of an engine. ``queued`` and ``running`` count choices, not requests."""

    ready: bool
    detail: str
    queued: int
    running: int


class Engine(Protocol):
    """Serves one base model and any number of adapters under unique, immutable names."""

    @property
    def replica(self) -> str:
        """Name of this replica, recorded with each interaction whose ``PromptTokens`` names no other one."""
        ...

    @property
    def base_sha256(self) -> str:
        """Content hash of the base model's weights."""
        ...

    async def load(self, adapter: AdapterRef) -> None:
        """Load an adapter after checking its hash, base, rank and tensors.

        Loading the same name with the same hash again is a no-op where it is held still.

        Raises:
            AdapterError: the files do not match ``adapter.sha256`` or do not fit the base model, or the
                name is taken by other content.
        """
        ...

    async def unload(self, name: str) -> None:
        """Forget an adapter once no running request uses it. Unknown names are a no-op.

        Raises:
            EngineError: the engine failed; it may still hold the adapter.
        """
        ...

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        """The adapters that can be named in a request now.

        Raises:
            EngineError: the engine could not be asked.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Stream one call: ``PromptTokens`` first, then deltas, one ``ChoiceEnd`` a choice.

        Closing the iterator cancels the generation.

        Raises:
            AdapterError: ``request.adapter`` is not loaded.
            RequestError: the prompt is longer than the context, or the engine can't do what is asked.
            EngineBusyError: the queue is full.
            EngineUnavailableError, EngineTimeoutError: the engine is away, or silent too long.
            EngineError: the engine failed.
        """
        ...

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        """Compare what ``name`` and ``against`` (None: the base) make of ``prompts``, at least one.

        Raises:
            AdapterError: one of them is not loaded.
            RequestError: there is no prompt, or one is longer than the context.
            EngineError: the engine failed.
        """
        ...

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        """Log-probability, at temperature 1, of each token from index ``first`` on given all before it (T - first).

        Raises:
            AdapterError: ``adapter`` is not loaded.
            RequestError: ``first`` is not in [1, T), or the sequence is longer than the context.
        """
        ...

    async def health(self) -> EngineHealth:
        """Whether requests would be served now."""
        ...
