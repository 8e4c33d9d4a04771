"""What benchmarks share: the row, the options, the machine and the versions that figures belong to."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parent.parent
VERSIONED = (
    "tidegate", "torch", "transformers", "peft", "fastapi", "uvicorn", "aiohttp", "sqlalchemy", "psycopg", "numpy",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run. ``runs`` >= 1 repetitions, of which medians are reported; ``values`` are the benchmark's own."""

    runs: int = 3
    values: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. ``ours`` and ``peer`` are medians over ``runs``; ``ratio`` > 1 means that ours is better."""

    benchmark: str
    metric: str
    unit: str
    ours: float
    runs: int
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    target: float | None = None


def measured(
    benchmark: str,
    metric: str,
    unit: str,
    ours: Sequence[float],
    *,
    better: Literal["higher", "lower"],
    peer: Sequence[float] = (),
    peer_name: str | None = None,
    target: float | None = None,
) -> Row:
    """A row of medians.

    Args:
        benchmark: name of the benchmark.
        metric: what was measured.
        unit: its unit.
        ours: one value per run, at least one.
        better: whether more or less of it is better; decides the direction of ``ratio``.
        peer: the peer's values, empty without one.
        peer_name: name and version of the peer.
        target: the value that we aim at.

    Raises:
        ValueError: there is no value of ours.
    """
    if not ours:
        raise ValueError(f"benchmark {benchmark!r} has no value for {metric!r}; give one per run")
    our_median = statistics.median(ours)
    peer_median = statistics.median(peer) if peer else None
    ratio = None
    if peer_median is not None:
        above, below = (our_median, peer_median) if better == "higher" else (peer_median, our_median)
        ratio = above / below if below else None
    return Row(
        benchmark=benchmark,
        metric=metric,
        unit=unit,
        ours=our_median,
        runs=len(ours),
        peer=peer_median,
        peer_name=peer_name,
        ratio=ratio,
        target=target,
    )


def machine() -> dict[str, Any]:
    """The machine that the figures belong to: processor, cores, memory, system. No names, no paths."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter for the figures, and the commit when there is one."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = _commit()
    if commit:
        found["commit"] = commit
    return found


def as_json(rows: Sequence[Row]) -> str:
    """What ``--json`` prints."""
    return json.dumps({"machine": machine(), "versions": versions(), "rows": [asdict(row) for row in rows]}, indent=2)


def as_table(rows: Sequence[Row]) -> str:
    """The same for people."""
    head = ("benchmark", "metric", "ours", "unit", "peer", "ratio", "target", "runs")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def peer_environment(name: str, requirements: Sequence[str]) -> Path:
    """The Python of a virtual environment that holds a peer, made on first use outside the tree.

    It lies in ``$XDG_CACHE_HOME/tidegate/peers/NAME`` (``~/.cache`` by default) and is made anew when
    ``requirements`` change.

    Raises:
        RuntimeError: pip cannot install the peer; its own message stands on stderr.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "tidegate" / "peers" / name
    python, stamp = directory / "bin" / "python", directory / "requirements.json"
    wanted = json.dumps(list(requirements))
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(directory, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise RuntimeError(f"peer {name!r} could not be installed from {list(requirements)!r}; see pip's message")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _cells(row: Row) -> tuple[str, ...]:
    peer = "-" if row.peer is None else f"{row.peer:.4g} ({row.peer_name})"
    optional = ["-" if value is None else f"{value:.4g}" for value in (row.ratio, row.target)]
    return (row.benchmark, row.metric, f"{row.ours:.4g}", row.unit, peer, *optional, str(row.runs))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
