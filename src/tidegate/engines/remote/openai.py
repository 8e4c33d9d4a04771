"""The engine port over any server with OpenAI's API: one model, no adapters. What it answers is recorded."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

from tidegate.config.engine import RECORDER_ONLY
from tidegate.core.errors import AdapterError, EngineError
from tidegate.core.generation import require_scorable
from tidegate.core.hashing import content_hash
from tidegate.core.types import AdapterRef, GenerationEvent, GenerationRequest, Messages
from tidegate.engines.remote.answers import AnswerReader
from tidegate.engines.remote.bodies import openai_body
from tidegate.engines.remote.upstream import RefusedError, Upstream
from tidegate.ports.engine import EngineHealth, ProbeResult

_log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
_UNKNOWN_FIELD = frozenset({400, 422})


def unknown_base(model: str) -> str:
    """What stands for the hash of weights that nobody here can read: 64 hex digits of the model's name.

    No adapter belongs to it. The address is left out, so that a server may move.
    """
    return content_hash({"upstream": "openai", "model": model})


class OpenAIEngine:
    """Passes calls on; implements :class:`tidegate.ports.engine.Engine`.

    Token ids and log-probabilities are asked for until the server refuses them. Calls with tools and calls without are
    told apart, because some servers refuse log-probabilities beside tools only. Once a server has given tokens to one
    kind of calls, a refusal is the single call's: that call goes again without, the next one asks again.

    Args:
        upstream: the server; closed by whoever made it.
        model: name of the model there.
        replica: name recorded with each interaction.
    """

    def __init__(self, upstream: Upstream, *, model: str, replica: str) -> None:
        self._upstream = upstream
        self._model = model
        self._replica = replica
        self._base_sha256 = unknown_base(model)
        self._gives_tokens: dict[bool, bool] = {}
        self._told: set[bool] = set()
        self._running = 0

    @property
    def replica(self) -> str:
        """Name of this replica."""
        return self._replica

    @property
    def base_sha256(self) -> str:
        """See :func:`unknown_base`."""
        return self._base_sha256

    async def load(self, adapter: AdapterRef) -> None:
        """Raises AdapterError: there is nowhere to load to."""
        raise AdapterError(f"adapter {adapter.name!r}: {RECORDER_ONLY}")

    async def unload(self, name: str) -> None:
        """A no-op: every name is unknown."""
        del name

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        """None."""
        return ()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """Stream one call; closing the iterator ends the request to the server.

        Raises:
            AdapterError: ``request.adapter`` is no adapter of this engine; it has none.
            RequestError: the server refuses the request.
            EngineBusyError: it has too much to do; with its Retry-After.
            EngineTimeoutError: it is silent too long.
            EngineUnavailableError: it cannot be reached or does not serve now.
            EngineError: it fails, or what it sends is no whole answer.
        """
        if request.adapter is not None:
            raise AdapterError(f"adapter {request.adapter!r} is not loaded: {RECORDER_ONLY}")
        with self._upstream.speakable_errors():
            self._running += 1
            try:
                reader = AnswerReader(request, distribution_known=False)
                async with aclosing(self._chunks(request)) as chunks:
                    async for chunk in chunks:
                        for event in reader.read(chunk):
                            yield event
                for event in reader.finish():
                    yield event
            except RefusedError as refused:
                raise refused.as_error() from refused
            finally:
                self._running -= 1

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        """Raises AdapterError: there is no adapter to compare."""
        del against, prompts
        raise AdapterError(f"adapter {name!r} is not loaded: {RECORDER_ONLY}")

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        """Raises AdapterError for an adapter, RequestError for a bad range, else EngineError: OpenAI's API has none."""
        if adapter is not None:
            raise AdapterError(f"adapter {adapter!r} is not loaded: {RECORDER_ONLY}")
        require_scorable(first, len(token_ids))
        raise EngineError(
            "this upstream states no log-probabilities of given tokens; use engine.kind 'vllm' or 'sglang'"
        )

    async def health(self) -> EngineHealth:
        """Whether the server can be reached and takes our key. Any other answer counts: not all list their models."""
        try:
            await self._upstream.call("GET", "/v1/models", None, timeout_s=HEALTH_TIMEOUT_S)
        except RefusedError as refused:
            if refused.status in (401, 403) or refused.status >= 500:
                return self._unready(str(refused.as_error()))
        except EngineError as error:
            return self._unready(str(error))
        return EngineHealth(ready=True, detail="serving", queued=0, running=self._running)

    def _unready(self, detail: str) -> EngineHealth:
        return EngineHealth(ready=False, detail=detail, queued=0, running=self._running)

    async def _chunks(self, request: GenerationRequest) -> AsyncGenerator[dict[str, Any]]:
        """The stream; a server that refuses to be asked for tokens is asked again without, once."""
        with_tools = bool(request.tools)
        tries = (True, False) if self._gives_tokens.get(with_tools, True) else (False,)
        refused_with_tokens: RefusedError | None = None
        for with_tokens in tries:
            body = openai_body(request, self._model, with_tokens=with_tokens)
            try:
                async with aclosing(self._upstream.stream("/v1/chat/completions", body)) as chunks:
                    async for chunk in chunks:
                        if not chunk.get("error"):
                            self._learn(with_tools=with_tools, gives_tokens=with_tokens)
                        yield dict(chunk)
            except RefusedError as refused:
                if not with_tokens or len(tries) == 1 or refused.status not in _UNKNOWN_FIELD:
                    raise
                refused_with_tokens = refused
            else:
                return
        _unreachable(refused_with_tokens)

    def _learn(self, *, with_tools: bool, gives_tokens: bool) -> None:
        """What comes from the server first stands; a call that it refuses both ways never comes here."""
        self._gives_tokens.setdefault(with_tools, gives_tokens)
        if not gives_tokens and with_tools not in self._told:
            self._told.add(with_tools)
            _log.warning(
                "%s refuses return_token_ids and logprobs for %s %s tools: such answers are recorded without tokens "
                "and do not train",
                self._upstream.url,
                "a call" if self._gives_tokens[with_tools] else "calls",
                "with" if with_tools else "without",
            )


def _unreachable(refused: RefusedError | None) -> NoReturn:
    raise AssertionError("the last try raises or returns") from refused
