"""The server of :mod:`upstream_server` in a process of its own, to be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class UpstreamProcess:
    """A server on a port of its own that stays the same when it is started again.

    Args:
        options: fields of :class:`upstream_server.UpstreamServer` that JSON can hold.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; returns when it listens."""
        options = json.dumps({**self._options, "port": self.port})
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said.strip().isdecimal():
            raise RuntimeError(f"the server did not start on port {self.port}")
        self.port = int(said)

    def kill(self) -> None:
        """End it at once: what it held is lost, connections to it break."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait(timeout=30)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None

    def stop(self) -> None:
        """Wedge it: connections are accepted, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End :meth:`stop`; it holds what it held."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


async def _main() -> None:
    from upstream_server import running_upstream

    async with running_upstream(**json.loads(sys.argv[1])) as server:
        sys.stdout.write(f"{server.url.rpartition(':')[2]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
