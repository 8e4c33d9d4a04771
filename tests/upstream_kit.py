"""Remote engines over servers of ours, for the length of a block."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tidegate.engines.remote import OpenAIEngine, SglangEngine, Upstream, VllmEngine
from upstream_server import UpstreamServer, running_upstream
from upstream_sglang import SglangServer

BASE = "b" * 64


@asynccontextmanager
async def vllm_engine(
    *, base_sha256: str = BASE, raw_logprobs: bool = True, limits: dict[str, Any] | None = None, **server: Any
) -> AsyncGenerator[tuple[VllmEngine, UpstreamServer]]:
    """An engine of vLLM's dialect, and its server."""
    async with running_upstream(raw_logprobs=raw_logprobs, **server) as running:
        upstream = Upstream(running.url, **(limits or {}))
        engine = VllmEngine(
            upstream, model=running.model, base_sha256=base_sha256, replica="vllm-0", raw_logprobs=raw_logprobs
        )
        try:
            yield engine, running
        finally:
            await upstream.close()


@asynccontextmanager
async def sglang_engine(
    *, base_sha256: str = BASE, raw_logprobs: bool = False, limits: dict[str, Any] | None = None, **server: Any
) -> AsyncGenerator[tuple[SglangEngine, SglangServer]]:
    """An engine of SGLang's dialect, and its server."""
    async with running_upstream(SglangServer, raw_logprobs=raw_logprobs, **server) as running:
        upstream = Upstream(running.url, **(limits or {}))
        engine = SglangEngine(
            upstream, model=running.model, base_sha256=base_sha256, replica="sglang-0", raw_logprobs=raw_logprobs
        )
        try:
            yield engine, running
        finally:
            await upstream.close()


@asynccontextmanager
async def openai_engine(
    *, limits: dict[str, Any] | None = None, **server: Any
) -> AsyncGenerator[tuple[OpenAIEngine, UpstreamServer]]:
    """An engine over a plain server, and that server."""
    async with running_upstream(**{"vllm": False, **server}) as running:
        upstream = Upstream(running.url, **(limits or {}))
        try:
            yield OpenAIEngine(upstream, model=running.model, replica="openai-0"), running
        finally:
            await upstream.close()
