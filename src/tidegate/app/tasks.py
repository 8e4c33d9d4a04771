"""Task files and simulated users, as the commands use them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tidegate.artifacts import write_atomically
from tidegate.core.errors import ConfigError
from tidegate.core.hashing import canonical_json
from tidegate.core.types import Messages, Task
from tidegate.signals.tasks.convert import bfcl_demonstrations, convert
from tidegate.signals.tasks.file import write_tasks
from tidegate.signals.tasks.generate import demonstrations, generate_tasks

DEFAULT_EPISODES = 96


def generate_file(output: Path, kinds: Sequence[str], *, count: int, seed: int, solved: bool) -> int:
    """Write generated tasks, or demonstrations of them; returns how many."""
    if not solved:
        return write_tasks(output, [task for kind in kinds for task in generate_tasks(kind, count, seed)])
    return write_demonstrations(output, [shown for kind in kinds for shown in demonstrations(kind, count, seed)])


def write_demonstrations(output: Path, shown: Sequence[tuple[Task, Messages]]) -> int:
    """Write solved transcripts as ``{messages, tools, kind}`` lines."""
    lines = [
        canonical_json({"messages": [*task.messages, *answer], "tools": list(task.tools), "kind": task.kind})
        for task, answer in shown
    ]
    write_atomically(output, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


def convert_file(dataset: str, paths: Sequence[Path], output: Path, *, demonstrations: int) -> list[str]:
    """Convert a published data set; with ``demonstrations`` the first tasks become solved transcripts instead."""
    tasks = list(convert(dataset, paths))
    said: list[str] = []
    if demonstrations:
        if dataset != "bfcl":
            raise ConfigError(f"data set {dataset!r} holds no solutions to demonstrate; only 'bfcl' does")
        shown = bfcl_demonstrations(islice(tasks, demonstrations))
        beside = output.with_suffix(".demonstrations.jsonl")
        said.append(f"wrote {write_demonstrations(beside, shown)} demonstrations to {beside}")
        tasks = tasks[demonstrations:]
    said.insert(0, f"wrote {write_tasks(output, tasks)} tasks to {output}")
    return said
