"""Running an app on a port inside an event loop that others share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections.abc import AsyncGenerator, Generator

import uvicorn
from starlette.types import ASGIApp

from tidegate.core.errors import ConfigError
from tidegate.gateway.guard import CLOSE_GRACE_S

_log = logging.getLogger(__name__)

_BACKLOG = 2048
DRAIN_S = 30.0
"""Requests in flight have this long to end after a stop; longer ones are cut short and recorded as such."""


class _Server(uvicorn.Server):
    """A server that leaves the process's signals to the composition root and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Stop accepting; :meth:`serve` returns when what is in flight has ended."""
        self.should_exit = True
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()

    async def main_loop(self) -> None:
        """Wake once a second, for the date header, and at once for a stop (uvicorn's own loop polls)."""
        ticks_a_second = 10
        counter = 0
        while not await self.on_tick(counter):
            counter += ticks_a_second
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()


@contextlib.asynccontextmanager
async def running_server(
    app: ASGIApp, *, host: str, port: int, option: str, drain_s: float = DRAIN_S
) -> AsyncGenerator[int]:
    """Serve ``app`` for the length of the block, then stop accepting and let requests in flight end.

    Args:
        app: the ASGI app; lifespan events are not sent, its resources belong to the caller.
        host: address to listen on.
        port: 0 lets the system choose.
        option: the command-line option that sets the port (``--port``), for error messages.
        drain_s: longest wait for requests in flight at the end, in seconds.

    Yields:
        The port that is listened on.

    Raises:
        ConfigError: the address cannot be listened on; the message says how to choose another.
    """
    listener = bind(host, port, option=option)
    bound_port: int = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_s),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    up = asyncio.create_task(server.up.wait())
    try:
        await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # raises what kept it from starting
        _log.info("listening on http://%s:%d", host, bound_port)
        yield bound_port
    finally:
        up.cancel()
        server.stop()
        await asyncio.wait({serving})
        await _settle(server)
        listener.close()


async def _settle(server: _Server) -> None:
    """Requests that were cut short still record how far they came, and their connections still flush."""
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=CLOSE_GRACE_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_GRACE_S):
            while server.server_state.connections:  # noqa: ASYNC110 - uvicorn offers nothing to wait on
                await asyncio.sleep(0.01)


def bind(host: str, port: int, *, option: str) -> socket.socket:
    """Listen on an address before anything else is started.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is no address of this machine.
    """
    setting = f"server.{option.lstrip('-').replace('-', '_')}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is not known ({error}); set server.host to an address here") from error
    except OSError as error:
        raise ConfigError(_why_not(error, host, port, option, setting)) from error


def _why_not(error: OSError, host: str, port: int, option: str, setting: str) -> str:
    choose = f"choose another with {option} or {setting}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is taken by another process; {choose}"
        case errno.EACCES | errno.EPERM:
            return f"port {port} on {host} needs privileges that this process lacks; {choose}"
        case errno.EADDRNOTAVAIL:
            return f"host {host!r} is no address of this machine; set server.host to one that is"
        case _:
            return f"port {port} on {host} cannot be listened on: {error}; {choose}"
