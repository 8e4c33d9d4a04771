"""Replicas under load: adapters are swapped while one server is killed and another one wedged.

Users ask without a pause, each call with the adapter that is served when it begins; swaps follow one another as a
publisher makes them (load, prove, move the pointer, unload), with the limits that ship. First all three servers are
well; then one is killed and the next swap begins at once; then another one is stopped (it accepts and never answers),
and a swap begins; then the dead one is started again and the stopped one goes on, and everything swaps once more.
"Beyond those in flight" counts failed calls that were not running on the dead server when it was killed. Greedy answers
of the same weights to the same prompt must be equal.

The servers are the tests' own, in processes, with a model that costs little: the figures are about the set, not about
decoding. Options: ``users=12``, ``swaps=5`` a phase, ``tokens=16``, ``pace_ms=5`` a token. With ``urls=URL,URL,...``,
``model=NAME`` and ``adapters=DIR,DIR,...`` (two or more, over one base) running vLLM servers are swapped instead;
nothing is killed then.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, Options, Row, measured
from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_base, adapter_hash
from tidegate.core.errors import EngineError
from tidegate.core.generation import GenerationFold
from tidegate.core.types import AdapterRef, GenerationRequest, Sampling
from tidegate.engines.remote import Upstream, VllmEngine
from tidegate.engines.replicas import Breaker, ReplicaSet
from tidegate.release import PROBE_PROMPTS

BASE = "b" * 64
PROMPTS = 7
DEADLINE_S = 120.0
Found = defaultdict[tuple[str, str], list[float]]


def run(options: Options) -> list[Row]:
    """Repeat the story and report medians."""
    values = options.values
    found: Found = defaultdict(list)
    for _ in range(options.runs):
        if "urls" in values:
            asyncio.run(_with_running_servers(values, found))
        else:
            asyncio.run(_with_own_servers(values, found))
    targets = {"failed calls beyond those in flight": 0.0, "answers that differ": 0.0}
    return [
        measured("replicas", metric, unit, figures, better="lower", target=targets.get(metric))
        for (metric, unit), figures in found.items()
    ]


@dataclass
class Load:
    """Users, and what became of their calls."""

    engine: ReplicaSet
    served: AdapterRef
    tokens: int
    answered: int = 0
    differ: int = 0
    failed: list[str] = field(default_factory=list[str])
    over: bool = False
    _said: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])

    async def user(self, number: int) -> None:
        """Ask until it is over."""
        asked = number
        while not self.over:
            asked += 1
            prompt, adapter, fold = asked % PROMPTS, self.served.name, GenerationFold()
            request = GenerationRequest(
                request_id=f"{number}-{asked}",
                messages=({"role": "user", "content": f"What is {prompt} + {prompt}?"},),
                sampling=Sampling(temperature=0.0, max_tokens=self.tokens),
                adapter=adapter,
            )
            try:
                async for event in self.engine.generate(request):
                    fold.add(event)
            except EngineError as error:
                self.failed.append(str(error))
                continue
            self.answered += 1
            text = fold.choices()[0].text
            self.differ += self._said.setdefault((adapter, prompt), text) != text

    async def swap(self, ref: AdapterRef) -> float:
        """Seconds that a swap takes."""
        started = time.perf_counter()
        await self.engine.load(ref)
        proof = await self.engine.probe(ref.name, against=self.served.name, prompts=PROBE_PROMPTS)
        if proof.sha256 != ref.sha256 or not proof.max_logit_difference > 0.0:
            raise RuntimeError(f"{ref.name!r} is not proven: {proof}")
        before, self.served = self.served, ref
        await self.engine.unload(before.name)
        return time.perf_counter() - started


async def _with_own_servers(values: dict[str, str], found: Found) -> None:
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from upstream_process import UpstreamProcess  # noqa: PLC0415

    swaps, pace_s = int(values.get("swaps", "5")), float(values.get("pace_ms", "5")) / 1000.0
    with ExitStack() as stack:
        servers: list[Any] = [stack.enter_context(UpstreamProcess(pace_s=pace_s)) for _ in range(3)]
        killed, wedged, _ = servers
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        refs = cycle(_adapters(folder, 4 * swaps + 1))
        async with (
            _set_at([one.url for one in servers], "tiny", BASE) as engine,
            _users(engine, next(refs), values) as load,
        ):
            await _swaps(load, refs, swaps, found, "swap, three of three")

            running = engine.running()[killed.url.partition("://")[2]]
            killed.kill()
            first = await load.swap(next(refs))
            found["swap after one was killed", "s"].append(first)
            await _swaps(load, refs, swaps - 1, found, "swap, two of three")
            in_flight, failed = float(running), float(len(load.failed))

            wedged.stop()
            found["swap after one was wedged", "s"].append(await load.swap(next(refs)))
            await _swaps(load, refs, swaps - 1, found, "swap, one of three")

            killed.start()
            found["killed one in service again, from its start", "s"].append(await _until_serving(engine, 2))
            wedged.go_on()
            found["wedged one in service again, from when it goes on", "s"].append(await _until_serving(engine, 3))
            await _swaps(load, refs, swaps, found, "swap, three of three")
        beyond = max(failed - in_flight, 0.0) + len(load.failed) - failed
        found["calls in flight on the dead one", "calls"].append(in_flight)
        found["failed calls", "calls"].append(float(len(load.failed)))
        found["failed calls beyond those in flight", "calls"].append(beyond)
        found["answers that differ", "answers"].append(float(load.differ))
        found["answered calls", "calls"].append(float(load.answered))


async def _with_running_servers(values: dict[str, str], found: Found) -> None:
    paths = [Path(path) for path in values["adapters"].split(",")]
    refs = [AdapterRef(name=f"bench-{adapter_hash(path)[:8]}", path=path, sha256=adapter_hash(path)) for path in paths]
    if len(refs) < 2:
        raise ValueError(f"option adapters names {len(refs)} directory; name two or more")
    names = cycle(refs)
    urls, base = values["urls"].split(","), str(adapter_base(paths[0]))
    async with _set_at(urls, values["model"], base) as engine, _users(engine, next(names), values) as load:
        await _swaps(load, names, int(values.get("swaps", "5")), found, f"swap, {len(urls)} of {len(urls)}")
    found["failed calls beyond those in flight", "calls"].append(float(len(load.failed)))
    found["answered calls", "calls"].append(float(load.answered))


@asynccontextmanager
async def _set_at(urls: Sequence[str], model: str, base_sha256: str) -> AsyncGenerator[ReplicaSet]:
    async with AsyncExitStack() as stack:
        engines: list[VllmEngine] = []
        for url in urls:
            upstream = Upstream(url)
            stack.push_async_callback(upstream.close)
            place = url.partition("://")[2]
            engines.append(VllmEngine(upstream, model=model, base_sha256=base_sha256, replica=place))
        yield await stack.enter_async_context(ReplicaSet(engines, probe_prompts=PROBE_PROMPTS))


@asynccontextmanager
async def _users(engine: ReplicaSet, first: AdapterRef, values: dict[str, str]) -> AsyncGenerator[Load]:
    """A load for the length of a block; its last calls are waited for."""
    await engine.load(first)
    load = Load(engine, first, tokens=int(values.get("tokens", "16")))
    users = [asyncio.create_task(load.user(number)) for number in range(int(values.get("users", "12")))]
    try:
        yield load
        load.over = True
        await asyncio.gather(*users)
    finally:
        for user in users:
            user.cancel()
        await asyncio.wait(users)


async def _swaps(load: Load, refs: Any, number: int, found: Found, metric: str) -> None:
    for _ in range(number):
        wanted = load.answered + 20
        while load.answered < wanted:  # noqa: ASYNC110 - users only count
            await asyncio.sleep(0.005)
        found[metric, "s"].append(await load.swap(next(refs)))
    told = f"{load.answered} answered, {len(load.failed)} failed"
    print(f"{metric}: {found[metric, 's'][-1]:.3f} s; {told}", file=sys.stderr)


async def _until_serving(engine: ReplicaSet, number: int) -> float:
    started = time.perf_counter()
    while sum(state is Breaker.CLOSED for state in engine.breakers().values()) < number:
        if time.perf_counter() - started > DEADLINE_S:
            raise RuntimeError(f"{number} replicas are not in service: {(await engine.health()).detail}")
        await asyncio.sleep(0.005)
    return time.perf_counter() - started


def _adapters(folder: Path, number: int) -> list[AdapterRef]:
    """Adapters that differ; the servers only read their bytes."""
    draw, refs = random.Random(0), list[AdapterRef]()  # noqa: S311 - contents of a benchmark
    for position in range(number):
        path = folder / f"adapter-{position}"
        path.mkdir()
        (path / WEIGHTS_FILE).write_bytes(draw.randbytes(1 << 16))
        (path / CONFIG_FILE).write_text("{}", encoding="utf-8")
        (path / MANIFEST_FILE).write_text(json.dumps({"base_sha256": BASE}), encoding="utf-8")
        refs.append(AdapterRef(name=f"bench-r{position}", path=path, sha256=adapter_hash(path)))
    return refs
