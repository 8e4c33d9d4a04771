"""Replica sets over scripted engines, whose every failure a test can choose, and over servers of vLLM's dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from tidegate.core.errors import AdapterError, TidegateError
from tidegate.core.types import AdapterRef, GenerationEvent, GenerationRequest, Messages
from tidegate.engines.remote import Upstream, VllmEngine
from tidegate.engines.replicas import Limits, ReplicaSet
from tidegate.ports import EngineHealth, ProbeResult
from upstream_server import UpstreamServer, running_upstream

PROMPTS: tuple[Messages, ...] = (({"role": "user", "content": "What is 2 + 2?"},),)
SOON = Limits(
    failures=3,
    first_event_timeout_s=60.0,
    swap_timeout_s=60.0,
    check_interval_s=0.01,
    check_timeout_s=60.0,
    retry_s=0.01,
    longest_retry_s=0.02,
)
"""Looks come quickly; nothing is late unless a test says so."""


@dataclass
class Replica(FakeEngine):
    """A member. ``hangs`` holds the verbs that wait for ``released``; ``fails`` what they raise instead.

    ``restart()`` forgets all adapters, as a server does that is started anew. ``difference`` is what a probe finds.
    """

    hangs: set[str] = field(default_factory=set)
    fails: dict[str, TidegateError] = field(default_factory=dict)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    difference: float = 1.0
    sha256: str | None = None
    done: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def restart(self) -> None:
        self.adapters.clear()

    async def load(self, adapter: AdapterRef) -> None:
        await self._does("load", adapter.name)
        await super().load(adapter)
        self.done.append(f"load {adapter.name}")

    async def unload(self, name: str) -> None:
        await self._does("unload", name)
        await super().unload(name)
        self.done.append(f"unload {name}")

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        await self._does("list_adapters", "")
        return await super().list_adapters()

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        await self._does("probe", name)
        self._require(name)
        self._require(against)
        sha256 = self.sha256 or self.adapters[name].sha256
        return ProbeResult(name=name, sha256=sha256, max_logit_difference=self.difference)

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        await self._does("sequence_logprobs", str(adapter))
        return await super().sequence_logprobs(adapter, token_ids, first=first)

    async def health(self) -> EngineHealth:
        await self._does("health", "")
        return await super().health()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        await self._does("generate", str(request.adapter))
        self._require(request.adapter)
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event

    def _require(self, name: str | None) -> None:
        if name is not None and name not in self.adapters:
            raise AdapterError(f"adapter {name!r} is not loaded")

    async def _does(self, verb: str, what: str) -> None:
        self.asked.append(f"{verb} {what}".strip())
        if verb in self.hangs:
            await self.released.wait()
        if verb in self.fails:
            raise self.fails[verb]


def asked(adapter: str | None = None) -> GenerationRequest:
    """A short call."""
    messages = ({"role": "user", "content": "hello"},)
    return GenerationRequest(request_id="r", messages=messages, adapter=adapter)


def ref(name: str, sha256: str = "a" * 64) -> AdapterRef:
    """An adapter that only scripted replicas load."""
    return AdapterRef(name=name, path=Path("/nowhere") / name, sha256=sha256)


@asynccontextmanager
async def scripted(
    count: int = 2, limits: Limits = SOON, **fields: Any
) -> AsyncGenerator[tuple[ReplicaSet, list[Replica]]]:
    """A set of scripted members r0, r1, ... for the length of a block."""
    replicas = [Replica(replica=f"r{number}", **fields) for number in range(count)]
    try:
        async with ReplicaSet(replicas, probe_prompts=PROMPTS, limits=limits) as engine:
            yield engine, replicas
    finally:
        for replica in replicas:
            replica.released.set()
            replica.go.set()


@asynccontextmanager
async def vllm_replicas(
    count: int, *, base_sha256: str, limits: Limits = SOON, **server: Any
) -> AsyncGenerator[tuple[ReplicaSet, list[UpstreamServer]]]:
    """A set over so many servers in this process."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(running_upstream(**server)) for _ in range(count)]
        engine = await stack.enter_async_context(
            replicas_at([one.url for one in servers], base_sha256=base_sha256, limits=limits)
        )
        yield engine, servers


@asynccontextmanager
async def replicas_at(urls: Sequence[str], *, base_sha256: str, limits: Limits = SOON) -> AsyncGenerator[ReplicaSet]:
    """A set over the vLLM servers at these addresses."""
    async with AsyncExitStack() as stack:
        engines: list[VllmEngine] = []
        for url in urls:
            upstream = Upstream(url)
            stack.push_async_callback(upstream.close)
            place = url.partition("://")[2]
            engines.append(VllmEngine(upstream, model="tiny", base_sha256=base_sha256, replica=place))
        yield await stack.enter_async_context(ReplicaSet(engines, probe_prompts=PROMPTS, limits=limits))
