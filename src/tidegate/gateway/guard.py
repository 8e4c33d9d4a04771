"""Work that ends when its client goes away or its time is up, and calls that take turns under one id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from tidegate.core.errors import EngineTimeoutError
from tidegate.gateway.problems import ClientGoneError

_log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
"""An engine that does not let go of a cancelled generation in this time is left behind, and logged."""

T = TypeVar("T")


class Guard:
    """Watches one request, whose body has been read, and runs its work in tasks that can be ended.

    Args:
        receive: the ASGI channel; nothing but the disconnect may still come from it.
        timeout_s: longest time for all the work together.
    """

    def __init__(self, receive: Receive, *, timeout_s: float) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._gone: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._gone = asyncio.create_task(self._until_gone())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._gone is not None:
            await end_task(self._gone)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, or cancel it and wait until it has cleaned up.

        Raises:
            ClientGoneError: the client closed the connection first.
            EngineTimeoutError: the time was up first.
        """
        task = asyncio.create_task(work)
        watched: set[asyncio.Task[Any]] = {task} if self._gone is None else {task, self._gone}
        left_s = self._deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(watched, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            if self._gone is not None and self._gone.done():
                raise ClientGoneError
            raise EngineTimeoutError(
                f"no complete answer within {self._timeout_s:g} s ('server.request_timeout_s'); ask for fewer "
                "tokens, or raise the limit"
            )
        finally:
            await end_task(task)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has cleaned up, for :data:`CLOSE_GRACE_S` at most."""
    if task.done():
        return
    task.cancel()
    _, pending = await asyncio.wait({task}, timeout=CLOSE_GRACE_S)
    if pending:
        _log.error("a cancelled generation did not end within %g s; it is left behind", CLOSE_GRACE_S)


class Turns:
    """One call at a time for each id; the others wait for it and then look at what it left."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Event] = {}

    async def wait_for(self, key: str) -> None:
        """Take the turn of ``key``; give it back with :meth:`done`."""
        while (running := self._running.get(key)) is not None:
            await running.wait()
        self._running[key] = asyncio.Event()

    def done(self, key: str) -> None:
        """Let the next one have its turn."""
        self._running.pop(key).set()

    @asynccontextmanager
    async def turn(self, key: str, guard: Guard) -> AsyncGenerator[None]:
        """Hold the turn of ``key``; waiting for it ends with the client or the time."""
        await guard.run(self.wait_for(key))
        try:
            yield
        finally:
            self.done(key)
