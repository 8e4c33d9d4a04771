"""Task files and simulated users, as the commands use them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tidegate.app.layout import DataDirectory
from tidegate.artifacts import write_atomically
from tidegate.config import Settings
from tidegate.core.errors import CommandError, ConfigError
from tidegate.core.hashing import canonical_json
from tidegate.core.types import JsonObject, Messages, Sampling, Task
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.signals.tasks.convert import bfcl_demonstrations, convert
from tidegate.signals.tasks.file import read_tasks, write_tasks
from tidegate.signals.tasks.generate import demonstrations, generate_tasks
from tidegate.simulate import ArrivalOptions, EpisodeResult, PlayOptions, simulate

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What ``tidegate simulate`` was asked for."""

    tasks_file: Path | None
    kinds: Sequence[str]
    count: int | None
    seed: int
    base_url: str | None
    model: str
    api_key: str
    concurrency: int
    users: int | None
    temperature: float
    max_tokens: int
    stream_share: float


async def simulate_users(
    settings: Settings, options: SimulationOptions, *, on_episode: Callable[[EpisodeResult, int], None]
) -> JsonObject:
    """Play users against a server; returns the report as JSON values.

    Raises:
        CommandError: no server was named and none runs on the data directory.
        TaskFileError: the task file is not usable.
    """
    tasks = simulation_tasks(options)
    if not tasks:
        raise ConfigError("there is nothing to play; name kinds with --kinds or a task file with --tasks")
    report = await simulate(
        tasks,
        base_url=options.base_url or running_server_url(settings),
        arrivals=ArrivalOptions(
            session=f"sim-{uuid.uuid4().hex[:8]}", users=options.users, concurrency=options.concurrency
        ),
        environments=builtin_environments(),
        verifiers=builtin_verifiers(),
        play=PlayOptions(
            model=options.model,
            sampling=Sampling(temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed),
            stream_share=options.stream_share,
            seed=options.seed,
        ),
        api_key=options.api_key,
        timeout_s=settings.server.request_timeout_s,
        on_episode=lambda episode: on_episode(episode, len(tasks)),
    )
    return report.to_json()


def simulation_tasks(options: SimulationOptions) -> list[Task]:
    """Tasks of the file, repeated when more episodes are wanted, or generated ones shared among the kinds."""
    if options.tasks_file is None:
        count = options.count or DEFAULT_EPISODES
        share = -(-count // max(len(options.kinds), 1))
        generated = [generate_tasks(kind, share, options.seed) for kind in options.kinds]
        return [task for group in zip(*generated, strict=True) for task in group][:count]
    tasks = read_tasks(options.tasks_file, verifiers=builtin_verifiers(), environments=builtin_environments())
    count = options.count or len(tasks)
    return [tasks[index % len(tasks)] for index in range(count)]


def running_server_url(settings: Settings) -> str:
    """Where the server of the data directory listens."""
    address = DataDirectory.of(settings).server()
    if address is None:
        raise CommandError(
            f"no server runs on data directory {str(settings.data_dir)!r}; start 'tidegate serve' or name a server "
            "with --base-url"
        )
    return f"{address.url}/v1"
