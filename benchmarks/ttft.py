"""Time to the first token and between tokens, as 1, 8 and 32 users see it who stream one answer after another.

Tidegate over the embedded engine with capture on and, with ``vllm=PYTHON`` or ``vllm=installed``, vLLM with the same
adapter; the same client and prompts, sides alternating. Options: ``dtype`` (bfloat16), ``seconds=N`` of load a side
and number of users (20).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.adapters import random_adapter
from benchmarks.harness import Options, Row, measured
from benchmarks.serving_stack import serving_stack
from benchmarks.streams import percentile, streamed
from benchmarks.vllm_peer import vllm_python, vllm_server
from tidegate.engines.embedded import EmbeddedEngine
from tidegate.engines.model_cache import resolve_model

USERS = (1, 8, 32)
NEW = 40
_SHARES = {"p50": 50.0, "p99": 99.0}
_Figures = dict[tuple[str, int, str], list[float]]


def run(options: Options) -> list[Row]:
    """Alternate the sides and report medians."""
    found = asyncio.run(_all(options))
    rows: list[Row] = []
    for side, users, metric in found:
        if side == "ours":
            peer = found.get(("vllm", users, metric), [])
            target = 1.0 if users < USERS[-1] else None
            better = "higher" if metric == "tokens/s" else "lower"
            rows.append(
                measured(
                    "ttft", f"{users} users: {metric}", "tokens/s" if better == "higher" else "ms",
                    found[side, users, metric], better=better, peer=peer,
                    peer_name="vLLM with the adapter" if peer else None, target=target if peer else None,
                )
            )  # fmt: skip
    return rows


async def _all(options: Options) -> _Figures:
    seconds = options.values.get("seconds", "20")
    model = resolve_model("smollm2-135m", progress=lambda text: print(text, file=sys.stderr))
    found: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = EmbeddedEngine(model, dtype=options.values.get("dtype", "bfloat16"))
        await stack.enter_async_context(engine)
        served = await stack.enter_async_context(serving_stack(folder / "data", engine))
        adapter = random_adapter(folder / "data" / "adapters", model, engine.base_sha256, seed=1)
        await served.publish(adapter)
        sides = {"ours": (served.url, "champion")}
        python = vllm_python(options.values)
        if python is not None:
            peer = stack.enter_context(vllm_server(python, model, adapter, log=folder / "vllm.log"))
            sides["vllm"] = (peer, adapter.name)
        for url, name in sides.values():  # compilation, caches
            await streamed(url, name, streams=USERS[-1], limit=f"x{USERS[-1]}", tokens=NEW)
        for _ in range(options.runs):
            for users in USERS:
                for side, (url, name) in sides.items():
                    load = await streamed(url, name, streams=users, limit=seconds, tokens=NEW)
                    if load.failed:
                        raise RuntimeError(f"{side}, {users} users: {len(load.failed)} calls failed: {load.failed[:3]}")
                    for label, share in _SHARES.items():
                        first = 1000 * percentile(load.first_tokens_s(), share)
                        found[side, users, f"first token {label}"].append(first)
                        found[side, users, f"between tokens {label}"].append(1000 * percentile(load.gaps_s(), share))
                    found[side, users, "tokens/s"].append(load.tokens_per_s)
                    print(f"{side}, {users} users: {len(load.good)} calls", file=sys.stderr, flush=True)
    return found
