"""Decoding speed: 32 answers at once with a LoRA, prompts of about 40 tokens, 40 tokens each.

Served: Tidegate with capture on and, with ``vllm=...``, vLLM with the same adapter, both over HTTP, by the same
client. In process: the embedded engine, transformers' ``generate`` on the merged model, and the bare forward loop (no
sampling, no text, rows that never leave): the limit. Sides alternate; each ``generate`` and loop has a process of its
own, all on all cores. Options: ``dtype=float32|bfloat16`` (bfloat16), ``rows=N`` (32), ``vllm=PYTHON`` or
``vllm=installed``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.adapters import random_adapter
from benchmarks.harness import REPOSITORY, Options, Row, measured
from benchmarks.peers.stream_client import prompt
from benchmarks.serving_stack import serving_stack
from benchmarks.streams import streamed
from benchmarks.vllm_peer import vllm_python, vllm_server
from tidegate.core.generation import collect
from tidegate.core.types import AdapterRef, GenerationRequest, Sampling
from tidegate.engines.embedded import EmbeddedEngine
from tidegate.engines.model_cache import resolve_model

PROMPT, NEW, WARM_UP = 40, 40, 4
_LOOP = REPOSITORY / "benchmarks" / "peers" / "decode_loop.py"


def run(options: Options) -> list[Row]:
    """Alternate the sides and report medians."""
    found = asyncio.run(_all(options))
    rows = [_row("engine", found["engine"], found["raw loop"], "raw forward loop", 0.85)]
    rows.append(_row("engine", found["engine"], found["generate"], "transformers generate, merged", 1.3))
    rows.append(_row("served, recorded", found["served"], found["raw loop"], "raw forward loop", None))
    if found["vllm"]:
        rows.append(_row("served, recorded", found["served"], found["vllm"], "vLLM with the adapter", 2.0))
    return rows


def _row(metric: str, ours: list[float], peer: list[float], name: str, target: float | None) -> Row:
    return measured("decode", metric, "tokens/s", ours, better="higher", peer=peer, peer_name=name, target=target)


async def _all(options: Options) -> dict[str, list[float]]:
    dtype, rows = options.values.get("dtype", "bfloat16"), int(options.values.get("rows", "32"))
    model = resolve_model("smollm2-135m", progress=lambda text: print(text, file=sys.stderr))
    found: defaultdict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = EmbeddedEngine(model, dtype=dtype)
        await stack.enter_async_context(engine)
        served = await stack.enter_async_context(serving_stack(folder / "data", engine))
        adapter = random_adapter(folder / "data" / "adapters", model, engine.base_sha256, seed=1)
        release = await served.publish(adapter)
        python = vllm_python(options.values)
        peer = None
        if python is not None:
            peer = stack.enter_context(vllm_server(python, model, adapter, log=folder / "vllm.log"))
        for number in range(options.runs + 1):  # the first warms up
            sides = {
                "engine": await _engine(engine, release.id, rows, number),
                "served": (
                    await streamed(served.url, "champion", streams=rows, limit=f"x{rows}", tokens=NEW)
                ).tokens_per_s,
                "generate": await asyncio.to_thread(_loop, "generate", dtype, model, adapter, rows),
                "raw loop": await asyncio.to_thread(_loop, "raw", dtype, model, adapter, rows),
            }
            if peer is not None:
                calls = await streamed(peer, adapter.name, streams=rows, limit=f"x{rows}", tokens=NEW)
                sides["vllm"] = calls.tokens_per_s
            print(f"{'warm-up' if number == 0 else number}: {sides}", file=sys.stderr, flush=True)
            if number:
                for name, value in sides.items():
                    found[name].append(value)
    return found


async def _engine(engine: EmbeddedEngine, adapter: str, rows: int, run_number: int) -> float:
    """Tokens a second of so many answers that begin at once."""
    wanted = [
        GenerationRequest(
            request_id=f"{run_number}-{number}",
            messages=({"role": "user", "content": prompt(1000 * (run_number + 1) + number)},),
            sampling=Sampling(temperature=1.0, max_tokens=NEW, seed=random.Random(number).getrandbits(32)),  # noqa: S311
            adapter=adapter,
        )
        for number in range(rows)
    ]
    started = time.perf_counter()
    folds = await asyncio.gather(*(collect(engine.generate(request)) for request in wanted))
    seconds = time.perf_counter() - started
    return sum(len(choice.token_ids) for fold in folds for choice in fold.choices()) / seconds


def _loop(mode: str, dtype: str, model: Path, adapter: AdapterRef, rows: int) -> float:
    command = [
        sys.executable, str(_LOOP), mode, dtype, str(model), str(adapter.path), str(rows), str(PROMPT), str(NEW),
    ]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])
