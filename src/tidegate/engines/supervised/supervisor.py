"""One server process of ours: started, awaited, watched, started again, and ended with everything below it.

The process belongs to a keeper (:mod:`tidegate.engines.supervised.keeper`), which ends it when this process is gone.
Its output goes to a log file. It listens on a Unix socket that stays the same over restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tidegate.core.errors import ConfigError, EngineError, EngineTimeoutError, TidegateError
from tidegate.engines.remote.models import listed_models
from tidegate.engines.remote.upstream import RefusedError, Upstream
from tidegate.engines.supervised import keeper
from tidegate.engines.supervised.logs import ServerLog
from tidegate.engines.supervised.sockets import socket_path

_LOOK_S = 0.25
_LOOK_TIMEOUT_S = 5.0
_TELL_S = 15.0
_KEEPER_S = 15.0
"""Beyond the grace: what a keeper needs to end what a server left."""

Say = Callable[[str], None]


class ServerState(StrEnum):
    """Where a supervised server stands."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What is started.

    ``name`` names its log and its lock; ``command`` gives the argument list for the socket to listen on;
    ``environment`` is all that it gets. It serves once ``model`` stands in its ``/v1/models``.
    """

    name: str
    command: Callable[[Path], Sequence[str]]
    environment: Mapping[str, str] = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long things may take, in seconds, and how often a server is started again.

    After ``max_restarts`` starts in a row it is given up; one that served for ``settled_s`` has made good what came
    before. The wait before the n-th of them is ``first_wait_s`` doubled n - 1 times, at most ``longest_wait_s``.
    """

    start_timeout_s: float = 900.0
    max_restarts: int = 5
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    settled_s: float = 60.0
    grace_s: float = 15.0

    def wait_s(self, attempt: int) -> float:
        """Wait before the ``attempt``-th start in a row, counted from 1."""
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** (attempt - 1))


@asynccontextmanager
async def supervised(
    plan: ServerPlan, *, folder: Path, patience: Patience, say: Say, clock: Callable[[], float] = time.monotonic
) -> AsyncGenerator[SupervisedServer]:
    """A server that serves when the block begins, and is gone when it has ended.

    Args:
        plan: what is started.
        folder: where log and lock lie; made if need be.
        patience: limits.
        say: told in one line each what takes time or goes wrong.
        clock: seconds.

    Raises:
        ConfigError: the platform has no keeper, or the folder cannot be written.
        EngineError: it ended before it served; the message has the last lines of its log.
        EngineTimeoutError: it did not serve in time.
    """
    if sys.platform != "linux":
        raise ConfigError(f"supervised servers need Linux, this is {sys.platform!r}; start one and set its address")
    with socket_path(plan.name) as socket:
        server = SupervisedServer(plan, socket, folder=folder, patience=patience, say=say, clock=clock)
        try:
            await server.start()
            yield server
        finally:
            await server.close()


class SupervisedServer:
    """Made by :func:`supervised`."""

    def __init__(
        self, plan: ServerPlan, socket: Path, *, folder: Path, patience: Patience, say: Say, clock: Callable[[], float]
    ) -> None:
        self._plan = plan
        self._socket = socket
        self._folder = folder
        self._patience = patience
        self._say = say
        self._clock = clock
        self._log = ServerLog(folder / f"{plan.name}.log")
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._state = ServerState.STARTING
        self._reason = "it is starting"
        self._restarts = 0
        self._attempts = 0
        self._ending = asyncio.Lock()

    @property
    def name(self) -> str:
        """Name of the server."""
        return self._plan.name

    @property
    def socket(self) -> Path:
        """Where it listens; the same over restarts."""
        return self._socket

    @property
    def state(self) -> ServerState:
        """Where it stands."""
        return self._state

    @property
    def restarts(self) -> int:
        """How often it served again after it had ended."""
        return self._restarts

    def why_down(self) -> str | None:
        """Why it does not serve, for people; None while it does."""
        return None if self._state is ServerState.SERVING else f"{self.name}: {self._reason}"

    async def start(self) -> None:
        """Start it, wait until it serves, then watch it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._log.begin()
        except OSError as error:
            raise ConfigError(f"{str(error.filename)!r} cannot be written: {error.strerror}; see data_dir") from error
        await self._started()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End it. Whatever happens, none of its processes is left."""
        self._state, self._reason = ServerState.STOPPED, "it was stopped"
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self._ended()

    async def _started(self) -> None:
        """One attempt."""
        self._log.mark()
        self._socket.unlink(missing_ok=True)  # of one that was killed; vLLM does not start where there is one
        began = self._clock()
        command = [
            sys.executable, "-I", str(Path(keeper.__file__)), "--grace-s", f"{self._patience.grace_s:g}",
            "--lock", str(self._folder / f"{self.name}.lock"), "--", *self._plan.command(self._socket),
        ]  # fmt: skip
        try:
            with self._log.opened() as output:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=dict(self._plan.environment),
                    start_new_session=True,  # Ctrl-C in a terminal is Tidegate's to act upon
                )
        except OSError as error:
            raise EngineError(f"{self.name} cannot be started: {error}; see its log {str(self._log.path)!r}") from error
        try:
            await self._serves(self._process, began)
        except BaseException:
            await asyncio.shield(self._ended())
            raise
        self._state, self._reason = ServerState.SERVING, "it serves"
        self._say(f"{self.name} serves after {self._clock() - began:.0f} s")

    async def _serves(self, process: asyncio.subprocess.Process, began: float) -> None:
        """Return once it answers as it should."""
        ending = asyncio.create_task(process.wait())
        upstream = Upstream(f"http://{self.name}", socket=self._socket, connect_timeout_s=_LOOK_S)
        told = began
        try:
            while not await self._answers(upstream):
                await asyncio.wait({ending}, timeout=_LOOK_S)
                if ending.done():
                    raise EngineError(
                        f"{self.name} ended {_how(ending.result())} before it served; its log {str(self._log.path)!r} "
                        f"ends with:\n{self._log.tail()}"
                    )
                now = self._clock()
                if now - began >= self._patience.start_timeout_s:
                    raise EngineTimeoutError(
                        f"{self.name} did not serve within {self._patience.start_timeout_s:g} s and was ended; raise "
                        f"engine.start_timeout_s if it needs longer. Its log {str(self._log.path)!r} ends with:\n"
                        f"{self._log.tail()}"
                    )
                if now - told >= _TELL_S:
                    told = now
                    self._say(f"{self.name} is starting since {now - began:.0f} s: {self._log.last_line()}")
        finally:
            ending.cancel()
            await upstream.close()

    async def _answers(self, upstream: Upstream) -> bool:
        """Whether it is up, with the model."""
        try:
            await upstream.call("GET", "/health", None, timeout_s=_LOOK_TIMEOUT_S)
            return self._plan.model in await listed_models(upstream, timeout_s=_LOOK_TIMEOUT_S)
        except (RefusedError, TidegateError):
            return False

    async def _watch(self) -> None:
        """Start it again whenever it has ended, until that fails too often."""
        while self._process is not None:
            since = self._clock()
            code = await self._process.wait()
            await self._ended()  # a keeper that was killed leaves others
            self._reason = f"it ended {_how(code)}"
            self._state = ServerState.RESTARTING
            self._say(f"{self.name} ended {_how(code)} and is started again; its log is {str(self._log.path)!r}")
            if not await self._started_again(settled=self._clock() - since >= self._patience.settled_s):
                return

    async def _started_again(self, *, settled: bool) -> bool:
        if settled:
            self._attempts = 0
        while self._attempts < self._patience.max_restarts:
            self._attempts += 1
            await asyncio.sleep(self._patience.wait_s(self._attempts))
            try:
                await self._started()
            except TidegateError as error:
                self._reason = f"start {self._attempts} of {self._patience.max_restarts} failed: {error}"
                self._say(f"{self.name}: {self._reason}")
            else:
                self._restarts += 1
                return True
        self._state = ServerState.FAILED
        self._reason = (
            f"it ended {self._patience.max_restarts + 1} times in a row and is not started again ({self._reason}); see "
            f"{str(self._log.path)!r}, then restart 'tidegate serve'"
        )
        self._say(f"{self.name}: {self._reason}")
        return False

    async def _ended(self) -> None:
        """End the keeper, and with it the server; whoever calls meanwhile waits for it."""
        async with self._ending:
            process = self._process
            if process is None:
                return
            assert process.stdin is not None  # noqa: S101 - opened as a pipe above
            process.stdin.close()
            try:
                async with asyncio.timeout(2 * self._patience.grace_s + _KEEPER_S):
                    code = await process.wait()
            except TimeoutError:
                code = -signal.SIGKILL
            if code < 0:  # stuck, or killed: what it kept is in its group still
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            self._process = None


def _how(code: int) -> str:
    """An exit status of a keeper in words."""
    if code > 128:
        return f"by signal {code - 128}"
    return f"by signal {-code} to its keeper" if code < 0 else f"with exit code {code}"
