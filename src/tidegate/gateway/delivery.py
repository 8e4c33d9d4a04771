"""How an answer travels: one JSON body when all is done, or server-sent events while it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tidegate.core.generation import GenerationFold
from tidegate.core.types import ChoiceEnd, GenerationEvent, PromptTokens, TokenCounts, TokenDelta
from tidegate.gateway.problems import Problem
from tidegate.gateway.rendering import AnswerShape, ChunkMaker, LogprobFold, Usage, body

_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold chunks back
}


class Taker(Protocol):
    """Hears what the engine says."""

    async def take(self, event: GenerationEvent) -> None:
        """The engine said something; whoever streams sends it on."""
        ...


class Delivery(Taker, Protocol):
    """Brings one answer to one client."""

    async def finish(self, fold: GenerationFold, used: Usage | None) -> None:
        """The record is durable: everything may leave now.

        Args:
            fold: the choices that the client gets.
            used: counts of the tokens of the whole call.
        """
        ...

    async def fail(self, problem: Problem) -> None:
        """There will be no answer; say so in whatever form is still possible."""
        ...


class BodyDelivery:
    """Keeps everything back until the end."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, shape: AnswerShape, headers: Mapping[str, str]
    ) -> None:
        self._asgi = (scope, receive, send)
        self._shape = shape
        self._headers = headers
        self._logprobs = LogprobFold()

    async def take(self, event: GenerationEvent) -> None:
        if self._shape.logprobs and isinstance(event, TokenDelta):
            self._logprobs.add(event)

    async def finish(self, fold: GenerationFold, used: Usage | None) -> None:
        await JSONResponse(body(self._shape, fold, self._logprobs, used), headers=dict(self._headers))(*self._asgi)

    async def fail(self, problem: Problem) -> None:
        await problem.response(self._headers)(*self._asgi)


class EventDelivery:
    """Sends content as it comes; finish reasons, usage and ``[DONE]`` wait until the record is durable.

    The response's head waits for the engine's first event, so that a full queue is still a plain 429.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        shape: AnswerShape,
        headers: Mapping[str, str],
        n: int,
    ) -> None:
        self._asgi = (scope, receive, send)
        self._send = send
        self._chunks = ChunkMaker(shape, n=n)
        self._headers = headers
        self._started = False

    async def take(self, event: GenerationEvent) -> None:
        match event:
            case PromptTokens():
                for chunk in self._chunks.opening(event):
                    await self._event(chunk)
            case TokenDelta():
                for chunk in self._chunks.delta(event):
                    await self._event(chunk)
            case TokenCounts() | ChoiceEnd():
                pass

    async def finish(self, fold: GenerationFold, used: Usage | None) -> None:
        for chunk in self._chunks.closing(fold, used):
            await self._event(chunk)
        await self._write(b"data: [DONE]\n\n", more=False)

    async def fail(self, problem: Problem) -> None:
        if not self._started:
            await problem.response(self._headers)(*self._asgi)
            return
        await self._event(problem.body())
        await self._write(b"", more=False)

    async def _start(self) -> None:
        head = [(name.encode(), value.encode()) for name, value in {**_STREAM_HEADERS, **self._headers}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": head})
        self._started = True

    async def _event(self, value: dict[str, Any]) -> None:
        if not self._started:
            await self._start()
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        await self._write(f"data: {text}\n\n".encode(errors="replace"), more=True)

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
