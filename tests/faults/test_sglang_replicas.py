"""SGLang servers as members of a replica set: what one refuses before it samples is another one's to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_fixtures import answer, call, write_adapter, write_tiny_model
from gateway_world import until
from replica_world import PROMPTS, SOON
from tidegate.core.generation import collect
from tidegate.engines.model_cache import base_hash
from tidegate.engines.remote import SglangEngine, Upstream
from tidegate.engines.replicas import Breaker, Limits, ReplicaSet
from upstream_server import Faults, running_upstream
from upstream_sglang import SglangServer

NEVER = replace(SOON, check_interval_s=600.0)
"""Nobody is looked at again unless something happens."""


@asynccontextmanager
async def sglang_replicas(
    base_sha256: str, limits: Limits = NEVER, **server: Any
) -> AsyncGenerator[tuple[ReplicaSet, list[SglangServer]]]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(running_upstream(SglangServer, **server)) for _ in range(2)]
        engines: list[SglangEngine] = []
        for number, one in enumerate(servers):
            upstream = Upstream(one.url)
            stack.push_async_callback(upstream.close)
            engines.append(SglangEngine(upstream, model="tiny", base_sha256=base_sha256, replica=f"s{number}"))
        yield await stack.enter_async_context(ReplicaSet(engines, probe_prompts=PROMPTS, limits=limits)), servers


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("sglang") / "model")


@pytest.mark.parametrize("flags", [{}, {"tool_call_parser": "qwen"}])
async def test_a_call_that_one_server_refuses_is_answered_by_the_other(flags: dict[str, Any]) -> None:
    async with sglang_replicas("b" * 64, **flags) as (engine, servers):
        servers[0].full = True
        for _ in range(2):
            fold = await collect(engine.generate(call(max_tokens=4)))
            assert fold.replica == "s1"
        assert engine.failovers()["unavailable"] >= 1


async def test_a_server_that_was_restarted_is_found_out_by_a_call_that_nobody_notices(
    model_dir: Path, tmp_path: Path
) -> None:
    async with sglang_replicas(base_hash(model_dir)) as (engine, servers):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        await until(lambda: all("/health" in one.paths for one in servers))
        servers[0].adapters.clear()
        servers[0].ever_loaded.clear()
        for _ in range(2):
            await answer(engine, call(adapter="a", max_tokens=4))
        assert engine.failovers()["lost_adapter"] == 1
        await until(lambda: set(engine.breakers().values()) == {Breaker.CLOSED})
        assert list(servers[0].adapters) == ["a"]


async def test_a_server_that_takes_prompts_and_samples_nothing_gets_no_more_calls() -> None:
    """Its tokenizer goes on answering when its scheduler hangs."""
    limits = replace(NEVER, first_event_timeout_s=0.05, failures=1)
    async with sglang_replicas("b" * 64, limits) as (engine, servers):
        servers[0].faults = Faults(hold_after=0)
        try:
            for _ in range(2):
                fold = await collect(engine.generate(call(max_tokens=4)))
                assert fold.replica == "s1"
        finally:
            servers[0].go.set()
