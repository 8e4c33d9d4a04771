"""Supervised servers over :mod:`vllm_process`: how they are started, and what is left of them."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine_fixtures import write_adapter
from loop_world import LoopWorld
from tidegate.app.stores import open_stores
from tidegate.core.types import Candidate, CandidateState
from tidegate.engines.model_cache import base_hash
from tidegate.engines.remote import Upstream
from tidegate.engines.supervised import Patience, ServerPlan, SupervisedServer, supervised

PROCESS = Path(__file__).with_name("vllm_process.py")
MODEL = "tiny"
QUICK = Patience(start_timeout_s=60.0, max_restarts=3, first_wait_s=0.01, longest_wait_s=0.02, grace_s=5.0)


@dataclass
class StandIn:
    """A folder that tells the process how to behave, and remembers its processes."""

    folder: Path
    said: list[str] = field(default_factory=list)
    ahead_s: float = 0.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def switch(self, name: str, *, on: bool, text: str = "") -> None:
        path = self.folder / name
        path.write_text(text) if on else path.unlink()

    def pids(self) -> list[int]:
        """Every process that was ever started, in order."""
        file = self.folder / "pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if is_alive(pid)]

    def alive_as(self, name: str) -> int:
        """The process of that server: servers that start together are noted in any order."""
        socket = f"/{name}.sock\0".encode()
        (pid,) = [pid for pid in self.alive() if socket in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid

    def plan(self, name: str = "one") -> ServerPlan:
        return ServerPlan(
            name=name,
            command=lambda path: [sys.executable, str(PROCESS), "--uds", str(path), "--served-model-name", MODEL],
            environment={**os.environ, "STAND_IN_FOLDER": str(self.folder)},
            model=MODEL,
        )

    @asynccontextmanager
    async def running(self, *, patience: Patience = QUICK, name: str = "one") -> AsyncGenerator[SupervisedServer]:
        opened = supervised(
            self.plan(name),
            folder=self.folder / "engines",
            patience=patience,
            say=self.said.append,
            clock=lambda: time.monotonic() + self.ahead_s,
        )
        async with opened as server:
            yield server

    def interpreter(self) -> Path:
        """A Python whose vllm is :mod:`vllm_process`."""
        path = self.folder / "bin" / "python"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            textwrap.dedent(
                f"""\
                #!/bin/sh
                export STAND_IN_FOLDER='{self.folder}'
                if [ "$1" = -m ] && [ "$2" = vllm.entrypoints.openai.api_server ]; then
                    shift 2
                    exec '{sys.executable}' '{PROCESS}' "$@"
                fi
                [ "$1 $2" = "-I -c" ]
                """
            )
        )
        path.chmod(0o755)
        return path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def propose(world: LoopWorld, folder: Path) -> str:
    """A candidate of random weights; returns its id."""
    ref = write_adapter(folder / "adapter", world.model, seed=3)
    ref.path.rename(world.data.adapters / ref.sha256)
    candidate = Candidate(
        id=f"cand-{ref.sha256[:8]}",
        adapter_sha256=ref.sha256,
        base_sha256=base_hash(world.model),
        manifest_hash=None,
        parent_sha256=None,
        state=CandidateState.PROPOSED,
        created_at=0.0,
        origin="test",
    )
    with open_stores(world.data) as stores:
        stores.releases.add_candidate(candidate)
    return candidate.id


@asynccontextmanager
async def client(server: SupervisedServer) -> AsyncGenerator[Upstream]:
    upstream = Upstream(f"http://{server.name}", socket=server.socket)
    try:
        yield upstream
    finally:
        await upstream.close()
