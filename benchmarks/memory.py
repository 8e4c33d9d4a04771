"""Memory over many releases: 20 published in a row, each with other weights, each answering a few requests.

Resident memory of the whole server process after each; what counts is the growth after the third, when champion and
previous are loaded. Options: ``releases=N`` (20), ``dtype`` (bfloat16).
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.adapters import random_adapter
from benchmarks.harness import Options, Row, measured
from benchmarks.serving_stack import serving_stack
from benchmarks.streams import streamed
from tidegate.engines.embedded import EmbeddedEngine
from tidegate.engines.model_cache import resolve_model

SETTLED = 3
_MIB = 1 << 20


def run(options: Options) -> list[Row]:
    """One run; repetitions of a process that only grows would say nothing more."""
    sizes = asyncio.run(_sizes(options))
    grown = [size - sizes[SETTLED - 1] for size in sizes[SETTLED:]]
    return [
        measured("memory", f"resident after release {SETTLED}", "MiB", [sizes[SETTLED - 1]], better="lower"),
        measured("memory", f"resident after release {len(sizes)}", "MiB", [sizes[-1]], better="lower"),
        measured("memory", f"most above release {SETTLED}", "MiB", [max(grown)], better="lower"),
    ]


async def _sizes(options: Options) -> list[float]:
    wanted = int(options.values.get("releases", "20"))
    if wanted <= SETTLED:
        raise ValueError(f"releases={wanted} are too few; give more than {SETTLED}")
    model = resolve_model("smollm2-135m", progress=lambda text: print(text, file=sys.stderr))
    sizes: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        async with (
            EmbeddedEngine(model, dtype=options.values.get("dtype", "bfloat16")) as engine,
            serving_stack(data, engine) as served,
        ):
            for number in range(wanted):
                adapter = random_adapter(data / "adapters", model, engine.base_sha256, seed=number)
                release = await served.publish(adapter)
                load = await streamed(served.url, "champion", streams=8, limit="x16", tokens=20)
                if load.failed or any(call["release"] != release.id for call in load.good):
                    raise RuntimeError(f"release {release.id!r} did not answer everything: {load.failed[:3]}")
                gc.collect()
                sizes.append(_resident_mib())
                print(f"{release.id}: {sizes[-1]:.0f} MiB", file=sys.stderr, flush=True)
    return sizes


def _resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB
