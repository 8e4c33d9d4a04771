"""A scripted engine behind the real port: deterministic tokens, tools, delays and failures on demand."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from tidegate.core.chat import content_text
from tidegate.core.types import (
    AdapterRef,
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    JsonObject,
    Messages,
    PromptTokens,
    TokenDelta,
)
from tidegate.ports import EngineHealth, ProbeResult

END_TOKEN = 2


def token_id(text: str) -> int:
    return 10 + zlib.crc32(text.encode()) % 10_000


@dataclass
class FakeEngine:
    """Answers ``echo: <last message>`` word by word, or calls the first tool when a user asks with tools.

    ``hold_at`` (a position in the answer's tokens; 0 is before the prompt is taken) makes every call wait for
    ``go`` there; ``holding`` counts the calls that wait now. ``fail_at`` raises ``failure`` there instead.
    ``answers_as`` names the replica that answers.
    """

    replica: str = "fake-0"
    answers_as: str | None = None
    base_sha256: str = "b" * 64
    answer: str | None = None
    calls_per_answer: int = 1
    hold_at: int | None = None
    fail_at: int | None = None
    failure: Exception = field(default_factory=lambda: RuntimeError("the fake engine broke"))
    ready: bool = True
    end_early: bool = False
    go: asyncio.Event = field(default_factory=asyncio.Event)
    holding: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    finished: int = 0
    closed_early: int = 0
    adapters: dict[str, AdapterRef] = field(default_factory=dict)

    async def load(self, adapter: AdapterRef) -> None:
        self.adapters[adapter.name] = adapter

    async def unload(self, name: str) -> None:
        self.adapters.pop(name, None)

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        return tuple(self.adapters.values())

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        return ProbeResult(name=name, sha256=self.adapters[name].sha256, max_logit_difference=1.0)

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        return tuple(-0.125 for _ in token_ids[first:])

    async def health(self) -> EngineHealth:
        detail = "ready" if self.ready else "still loading"
        return EngineHealth(ready=self.ready, detail=detail, queued=0, running=self.holding)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        self.requests.append(request)
        whole = False
        try:
            await self._pause(0)
            prompt = " ".join(content_text(message.get("content")) for message in request.messages)
            tokens = (1, *(token_id(word) for word in prompt.split()))
            yield PromptTokens(token_ids=tokens, replica=self.answers_as)
            async with aclosing(self._choices(request)) as events:
                async for event in events:
                    yield event
            whole = True
        finally:
            self.finished += whole
            self.closed_early += not whole

    async def _choices(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        calls = self._tool_calls(request)
        words = self._words(request)
        cut = words[: request.sampling.max_tokens]
        for position, word in enumerate(cut, start=1):
            await self._pause(position)
            for choice in range(request.sampling.n):
                yield _delta(choice, word, request, visible=not calls)
        for call in calls:
            for choice in range(request.sampling.n):
                yield TokenDelta(choice=choice, token_ids=(), logprobs=(), tool_calls=(_renamed(call, choice),))
        for choice in range(request.sampling.n - self.end_early):
            if len(cut) < len(words):
                yield ChoiceEnd(choice=choice, finish_reason=FinishReason.LENGTH)
                continue
            yield TokenDelta(choice=choice, token_ids=(END_TOKEN,), logprobs=(-0.125,), token_texts=("",))
            yield ChoiceEnd(choice=choice, finish_reason=FinishReason.TOOL_CALLS if calls else FinishReason.STOP)

    def _words(self, request: GenerationRequest) -> list[str]:
        text = self.answer or f"echo: {content_text(request.messages[-1].get('content'))}"
        for stop in request.sampling.stop:
            text = text.partition(stop)[0]
        return [word + " " for word in text.split(" ")[:-1]] + text.split(" ")[-1:]

    def _tool_calls(self, request: GenerationRequest) -> list[JsonObject]:
        if not request.tools or request.messages[-1]["role"] == "tool":
            return []
        name = request.tools[0]["function"]["name"]
        return [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": f'{{"i": {i}}}'}}
            for i in range(self.calls_per_answer)
        ]

    async def _pause(self, position: int) -> None:
        if self.fail_at == position:
            raise self.failure
        if self.hold_at == position:
            self.holding += 1
            try:
                await self.go.wait()
            finally:
                self.holding -= 1


def _delta(choice: int, word: str, request: GenerationRequest, *, visible: bool) -> TokenDelta:
    alternatives = tuple((f"{word}{i}", -0.25 - i) for i in range(request.sampling.top_logprobs))
    return TokenDelta(
        choice=choice,
        token_ids=(token_id(word),),
        logprobs=(-0.25,),
        text=word if visible else "",
        token_texts=(word,),
        top_logprobs=(alternatives,) if alternatives else (),
    )


def _renamed(call: JsonObject, choice: int) -> JsonObject:
    return {**call, "id": f"{call['id']}_{choice}"}
