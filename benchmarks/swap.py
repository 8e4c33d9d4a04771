"""Swaps and rollbacks under load: 16 streams while the champion changes, against the same load without changes.

Two releases take turns: an earlier one is promoted, then rolled back, over and over, with all that a swap does (load
or find, probe, commit, move the pointer, unload). Counted are failed calls and calls that the weights of another
release answered: the recorded log-probabilities of each checked call are compared with those that both releases give
for its tokens. Over the embedded engine and, with ``vllm=PYTHON`` or ``vllm=installed``, over vLLM. Options:
``swaps=N`` (50) each way, ``checked=N`` (200) calls, ``dtype`` (bfloat16), ``engine=embedded|vllm|both`` (both where
there is a vLLM).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.adapters import random_adapter
from benchmarks.harness import Options, Row, as_table, measured
from benchmarks.serving_stack import ServingStack, serving_stack
from benchmarks.streams import Streamed, percentile, streamed
from benchmarks.vllm_peer import BASE, vllm_python, vllm_server
from tidegate.core.types import AdapterRef, Interaction, Release, Split
from tidegate.engines.embedded import EmbeddedEngine
from tidegate.engines.model_cache import base_hash, resolve_model
from tidegate.engines.remote import Upstream, VllmEngine
from tidegate.ports import Engine

STREAMS, NEW = 16, 40
REST_S = 0.2
_UNSWAPPED_S = "30"


def run(options: Options) -> list[Row]:
    """Each engine once: a run holds a hundred changes."""
    model = resolve_model("smollm2-135m", progress=_say)
    python = vllm_python(options.values)
    wanted = options.values.get("engine", "both")
    rows: list[Row] = []
    for kind in ("embedded", "vllm"):
        if wanted in (kind, "both") and not (kind == "vllm" and python is None):
            try:
                rows += asyncio.run(_measure(kind, model, python, options))
            except Exception:
                print(as_table(rows), file=sys.stderr)  # what the engine before it took minutes to show
                raise
    return rows


@asynccontextmanager
async def _engine(
    kind: str, model: Path, python: Path | None, *, adapter: AdapterRef, log: Path, dtype: str
) -> AsyncGenerator[Engine]:
    if kind == "embedded" or python is None:
        async with EmbeddedEngine(model, dtype=dtype) as engine:
            yield engine
        return
    with vllm_server(python, model, adapter, log=log) as url:
        upstream = Upstream(url)
        try:
            yield VllmEngine(upstream, model=BASE, base_sha256=base_hash(model), replica="vllm")
        finally:
            await upstream.close()


async def _measure(kind: str, model: Path, python: Path | None, options: Options) -> list[Row]:
    swaps = int(options.values.get("swaps", "50"))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        adapters = [random_adapter(folder / "data" / "adapters", model, base_hash(model), seed=s) for s in (1, 2, 3)]
        dtype = options.values.get("dtype", "bfloat16")
        engine = await stack.enter_async_context(
            _engine(kind, model, python, adapter=adapters[2], log=folder / "vllm.log", dtype=dtype)
        )
        served = await stack.enter_async_context(serving_stack(folder / "data", engine))
        first = await served.publish(adapters[0])
        second = await served.publish(adapters[1])
        warm = await streamed(served.url, "champion", streams=STREAMS, limit=f"x{STREAMS}", tokens=NEW)
        _say(f"{kind}: warm, {warm.tokens_per_s:.0f} tokens/s")
        calm = await streamed(served.url, "champion", streams=STREAMS, limit=_UNSWAPPED_S, tokens=NEW)
        changes = _Changes(served, first)
        load = asyncio.create_task(_until_done(served, changes))
        await changes.make(swaps)
        stormy = await load
        wrong, checked = await _answered_by_others(
            served, (first, second), stormy, most=int(options.values.get("checked", "200"))
        )
    failed = calm.failed + [reason for part in stormy for reason in part.failed]
    for reason in failed[:3]:
        _say(f"failed: {reason}")
    calls = len(calm.calls) + sum(len(part.calls) for part in stormy)
    gaps = [gap for part in stormy for gap in part.gaps_s()]

    def row(metric: str, unit: str, value: float, target: float | None = None) -> Row:
        return measured("swap", f"{kind}: {metric}", unit, [value], better="lower", target=target)

    # none where every release was still loaded and proven, as in a run of few changes
    moved = (
        [
            row("pointer move after load and proof, median", "ms", 1000 * statistics.median(changes.pointer_s), 50.0),
            row("pointer move after load and proof, most", "ms", 1000 * max(changes.pointer_s), 50.0),
        ]
        if changes.pointer_s
        else []
    )
    return [
        row("calls", "calls", calls),
        row("failed calls", "calls", len(failed), 0.0),
        row(f"answered by other weights, of {checked} checked", "calls", wrong, 0.0),
        row("between tokens p99 without swaps", "ms", 1000 * percentile(calm.gaps_s(), 99)),
        row("between tokens p99 with swaps", "ms", 1000 * percentile(gaps, 99)),
        row("p99 with over without", "ratio", percentile(gaps, 99) / percentile(calm.gaps_s(), 99), 2.0),
        *moved,
        row("rollback until new requests see it, median", "ms", 1000 * statistics.median(changes.rollback_s)),
        row("rollback until new requests see it, most", "ms", 1000 * max(changes.rollback_s), 1000.0),
        row("promotion until new requests see it, median", "ms", 1000 * statistics.median(changes.promote_s)),
    ]


class _Changes:
    """Promotions and rollbacks in turn, each timed to the moment at which new requests see it."""

    def __init__(self, served: ServingStack, earlier: Release) -> None:
        self.pointer_s: list[float] = []
        self.rollback_s: list[float] = []
        self.promote_s: list[float] = []
        self.done = False
        self._served = served
        self._earlier = earlier
        self._proven = self._moved = 0.0
        router: Any = served.router
        engine: Any = served.engine
        move, probe = router.point_champion_at, engine.probe

        def moved(release_id: str) -> None:
            move(release_id)
            self._moved = time.perf_counter()

        async def proven(*arguments: Any, **named: Any) -> Any:
            result = await probe(*arguments, **named)
            self._proven = time.perf_counter()
            return result

        router.point_champion_at, engine.probe = moved, proven

    async def make(self, count: int) -> None:
        publisher = self._served.publisher
        try:
            for number in range(count):
                await asyncio.sleep(REST_S)
                await self._timed(publisher.promote(self._earlier.id), self.promote_s)
                await asyncio.sleep(REST_S)
                await self._timed(publisher.rollback(None, "benchmark"), self.rollback_s)
                if number % 10 == 0:
                    _say(f"swap {number}: {self.promote_s[-1]:.3f} s, back {self.rollback_s[-1]:.3f} s")
        finally:
            self.done = True

    async def _timed(self, change: Any, times: list[float]) -> None:
        started = time.perf_counter()
        await change
        times.append(self._moved - started)
        if self._proven > started:  # what is loaded and proven already is not probed again
            self.pointer_s.append(self._moved - self._proven)


async def _until_done(served: ServingStack, changes: _Changes) -> list[Streamed]:
    parts: list[Streamed] = []
    while not changes.done:
        parts.append(await streamed(served.url, "champion", streams=STREAMS, limit="10", tokens=NEW))
    return parts


async def _answered_by_others(
    served: ServingStack, releases: tuple[Release, Release], parts: Sequence[Streamed], *, most: int
) -> tuple[int, int]:
    """How many of the recorded calls fit the other release's weights better than those of the release they name."""
    content = {release.id: release.adapter_sha256 for release in served.stores.releases.list_releases()}
    named = {str(release.adapter_sha256): release.id for release in releases}
    for release in releases:  # one of them may have been unloaded
        path = served.adapters / str(release.adapter_sha256)
        await served.engine.load(AdapterRef(name=release.id, path=path, sha256=str(release.adapter_sha256)))
    begun = {call["release"] for part in parts for call in part.good}
    records = [
        interaction
        for episode in served.stores.trajectories.list_episodes(splits=[Split.TRAIN], releases=begun)
        for interaction in episode.interactions
        if interaction.choices[0].token_ids
    ]
    step = max(1, len(records) // most)
    wrong = 0
    chosen = records[::step][:most]
    for record in chosen:
        own = str(content[record.release_id])
        other = next(sha256 for sha256 in named if sha256 != own)
        gaps = [await _gap(served.engine, named[sha256], record) for sha256 in (own, other)]
        wrong += gaps[0] >= gaps[1]
    return wrong, len(chosen)


async def _gap(engine: Engine, adapter: str, record: Interaction) -> float:
    """Mean distance of the recorded log-probabilities from those that an adapter gives for the same tokens, in nats."""
    choice = record.choices[0]
    ids = (*record.prompt_token_ids, *choice.token_ids)
    found = await engine.sequence_logprobs(adapter, ids, first=len(record.prompt_token_ids))
    return statistics.fmean(abs(a - b) for a, b in zip(found, choice.logprobs, strict=True))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
