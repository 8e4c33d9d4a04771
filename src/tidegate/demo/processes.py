"""Starting and ending the real commands that the demonstration is made of. Ends only what it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tidegate.app.layout import DataDirectory, ServerAddress
from tidegate.core.errors import CommandError, ConflictError

_READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command's exit code, the JSON objects that it printed, and those of the last list that it printed."""

    exit_code: int
    lines: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    errors: str

    @property
    def last(self) -> dict[str, Any]:
        """The last JSON object; empty when there is none."""
        return self.lines[-1] if self.lines else {}


async def run_command(
    arguments: Sequence[str],
    *,
    config: Path,
    accepted: Sequence[int] = (0,),
    on_line: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Finished:
    """Run ``tidegate ARGUMENTS`` and read the JSON lines of its standard output as they come.

    Raises:
        CommandError: the exit code is not among ``accepted``; the message ends with what it said.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", "--config", str(config), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    assert process.stdout is not None  # noqa: S101 - both are pipes as asked above
    assert process.stderr is not None  # noqa: S101
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    reading_errors = asyncio.create_task(process.stderr.read())
    try:
        async for raw in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(raw)
                if isinstance(value, dict):
                    lines.append(value)
                    on_line(value)
                elif isinstance(value, list):
                    rows = value
        exit_code = await process.wait()
        errors = (await reading_errors).decode(errors="replace")
    except BaseException:
        reading_errors.cancel()
        await _end(process)
        raise
    if exit_code not in accepted:
        tail = "\n".join(errors.strip().splitlines()[-12:])
        raise CommandError(f"'tidegate {' '.join(arguments)}' ended with exit code {exit_code}: {tail}")
    return Finished(exit_code=exit_code, lines=lines, rows=rows, errors=errors)


@asynccontextmanager
async def running_server(config: Path, data: DataDirectory, log: Path) -> AsyncGenerator[ServerAddress]:
    """Start ``tidegate serve``, wait until it is ready, and end it afterwards.

    Raises:
        CommandError: it ended or did not become ready; the message holds the end of its log.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidegate", "--config", str(config), "serve", stdout=output, stderr=output
        )
    try:
        yield await _ready(process, data, log)
    finally:
        await _end(process)


async def _ready(process: asyncio.subprocess.Process, data: DataDirectory, log: Path) -> ServerAddress:
    deadline = asyncio.get_running_loop().time() + _READY_TIMEOUT_S
    async with aiohttp.ClientSession() as client:
        while process.returncode is None and asyncio.get_running_loop().time() < deadline:
            address = None
            with contextlib.suppress(ConflictError):  # it is starting
                address = data.server()
            if address is not None and address.pid == process.pid:
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(f"{address.url}/readyz") as response:
                        if response.status == 200:
                            return address
            await asyncio.sleep(0.1)
    ended = "is not ready" if process.returncode is None else f"ended with exit code {process.returncode}"
    raise CommandError(f"'tidegate serve' {ended}: {_tail_of(log)}")


def _tail_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
