"""A real vLLM, supervised on an event loop of its own, for tests marked ``vllm``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_fixtures import RANK, write_tiny_model
from tidegate.app.supervision import vllm_python
from tidegate.config import Settings
from tidegate.config.engine import EngineSettings
from tidegate.engines.model_cache import base_hash
from tidegate.engines.remote import Upstream, VllmEngine
from tidegate.engines.remote.models import listed_models
from tidegate.engines.supervised import Patience, VllmOptions, supervised, visible_gpus, vllm_plans

MODEL = "tiny"
START_S = 600.0
QUIET = ("--no-enable-prefix-caching",)
"""Tests use a few adapter names again and again, which vLLM's prefix cache takes for the same weights."""


@dataclass(frozen=True)
class RealVllm:
    socket: Path
    model_dir: Path

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[VllmEngine]:
        """An engine over a server without adapters; what it has loaded is unloaded afterwards."""
        upstream = Upstream("http://vllm-0", socket=self.socket)
        engine = VllmEngine(upstream, model=MODEL, base_sha256=base_hash(self.model_dir), replica="vllm-0")
        try:
            yield engine
        finally:
            for name, listed in (await listed_models(upstream)).items():
                if listed.parent is not None:
                    await upstream.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
            await upstream.close()


def write_servable_model(folder: Path) -> Path:
    """The tiny model with heads of 32, the smallest that vLLM's attention for processors takes."""
    return write_tiny_model(folder, hidden_size=128, intermediate_size=128)


@contextmanager
def running_vllm(folder: Path, *, max_context: int) -> Generator[RealVllm]:
    """A server with the tiny model in float32; started before the block begins."""
    model_dir = write_servable_model(folder / "model")
    python, _ = vllm_python(Settings(engine=EngineSettings(kind="vllm")))
    options = VllmOptions(
        python=python,
        model_dir=model_dir,
        served_name=MODEL,
        max_rank=RANK,
        resident=4,
        max_context=max_context,
        max_running=8,
        dtype="float32",
        raw_logprobs=True,
        arguments=QUIET,
    )
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    (plan,) = vllm_plans(options, prefix="vllm", replicas=1, gpus=visible_gpus(environment), environment=environment)
    found: list[Path] = []
    failed: list[BaseException] = []
    known = threading.Event()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        patience = Patience(start_timeout_s=START_S)
        async with supervised(plan, folder=folder, patience=patience, say=print) as server:
            found.append(server.socket)
            known.set()
            await stop.wait()

    def run() -> None:
        with contextlib.closing(loop):
            try:
                loop.run_until_complete(main())
            except BaseException as error:
                failed.append(error)
                known.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        known.wait()
        if failed:
            raise failed[0]
        yield RealVllm(socket=found[0], model_dir=model_dir)
    finally:
        if not failed:
            loop.call_soon_threadsafe(stop.set)
        thread.join()
