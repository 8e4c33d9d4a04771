"""What a demonstration run remembers, and how it is written down: report.json, a PNG and a terminal plot."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tidegate.artifacts import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Episodes that simulated users played one after the other; ``success`` in [0, 1] as verifiers said."""

    number: int
    title: str
    episodes: int
    success: float
    by_kind: dict[str, tuple[int, int]]
    failed_requests: int
    releases: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened after session ``after_session``: an update accepted or refused, a rollback."""

    after_session: int
    what: str
    accepted: bool | None
    detail: str


@dataclass(slots=True, kw_only=True)
class DemoRecord:
    """Everything that the report says."""

    seed: int
    sessions: list[Session] = field(default_factory=list[Session])
    marks: list[Mark] = field(default_factory=list[Mark])
    cycles: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stage_seconds: dict[str, float] = field(default_factory=dict[str, float])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def write(self, path: Path) -> None:
        """Write ``report.json`` in one step."""
        body = {
            "schema": 1,
            "seed": self.seed,
            "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
            "versions": {name: version(name) for name in ("torch", "transformers", "peft", "tidegate")},
            "sessions": [asdict(session) for session in self.sessions],
            "marks": [asdict(mark) for mark in self.marks],
            "cycles": self.cycles,
            "stage_seconds": {name: round(seconds, 2) for name, seconds in self.stage_seconds.items()},
            **self.facts,
        }
        write_atomically(path, (json.dumps(body, indent=2, ensure_ascii=False, default=str) + "\n").encode())


_COLOURS = {True: "#2a7f3f", False: "#b03030", None: "#6060a0"}
_KIND_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d")


def kinds_of(sessions: Sequence[Session]) -> list[str]:
    """All kinds of task, in order of first appearance."""
    seen: dict[str, None] = {}
    for session in sessions:
        seen.update(dict.fromkeys(session.by_kind))
    return list(seen)


def draw_png(record: DemoRecord, path: Path) -> None:
    """Draw the learning curve: success per session with a 95 % Wilson band, per kind, and the marks."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed once

    mpl.use("agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    sessions = record.sessions
    numbers = [session.number for session in sessions]
    figure, axes = plt.subplots(figsize=(10.5, 5.2), dpi=130, layout="constrained")
    bands = [wilson_interval(round(s.success * s.episodes), s.episodes) for s in sessions]
    axes.fill_between(
        numbers, [low for low, _ in bands], [high for _, high in bands], color="#222222", alpha=0.12, lw=0
    )
    for kind, colour in zip(kinds_of(sessions), _KIND_COLOURS, strict=False):
        points = [(s.number, s.by_kind[kind]) for s in sessions if kind in s.by_kind]
        axes.plot(
            [n for n, _ in points], [won / max(total, 1) for _, (won, total) in points],
            color=colour, lw=1.2, ls="--", marker=".", label=kind, alpha=0.9,
        )  # fmt: skip
    axes.plot(
        numbers, [s.success for s in sessions], color="#222222", lw=2.2, marker="o", label="all episodes (95 % band)"
    )
    offsets: dict[int, int] = {}
    for mark in record.marks:
        level = offsets.get(mark.after_session, 0)
        offsets[mark.after_session] = level + 1
        x = mark.after_session + 0.25 + 0.4 * level
        axes.axvline(x, color=_COLOURS[mark.accepted], lw=1.4, ls=":")
        axes.text(
            x - 0.06, 1.03, mark.what, rotation=55, ha="left", va="bottom", fontsize=8, color=_COLOURS[mark.accepted]
        )
    axes.set(xlabel="session", ylabel="success at temperature 1", ylim=(0, 1.02), xlim=(0.7, max(numbers) + 1.0))
    axes.set_xticks(numbers, [f"{s.number}\n{s.title}" for s in sessions], fontsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.suptitle(f"Live success of simulated users (seed {record.seed})", fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def draw_terminal(record: DemoRecord, *, width: int = 76, height: int = 18) -> str:
    """The same curve as text for a terminal."""
    import plotext  # noqa: PLC0415 - needed once, at the end

    sessions = record.sessions
    numbers = [float(session.number) for session in sessions]
    plotext.clear_figure()
    plotext.plotsize(width, height)
    plotext.theme("clear")
    plotext.plot(numbers, [session.success for session in sessions], marker="braille", label="all")
    plotext.scatter(numbers, [session.success for session in sessions], marker="o")
    for mark in record.marks:
        plotext.vline(mark.after_session + 0.5)
    plotext.ylim(0, 1)
    plotext.xticks(numbers, [str(session.number) for session in sessions])
    plotext.title("success by session")
    return str(plotext.uncolorize(plotext.build()))
