"""A process that behaves as ``python -m vllm.entrypoints.openai.api_server`` does, over :mod:`upstream_server`.

What it does differently, tests say through files in the folder that STAND_IN_FOLDER names, read at each start:

- ``die``: print its text and exit with 3, before serving;
- ``hold``: serve only once the file is gone;
- ``stubborn``: ignore SIGTERM;
- ``child``: have a child in a session of its own that ignores SIGTERM, as an engine process that lost its parent.

As vLLM it does not start where its socket's path is taken. ``pids`` gets a line for every process, ``arguments`` and
``environment`` hold what the last start was given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from aiohttp import web

from upstream_server import UpstreamServer

_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"


async def main() -> None:
    folder = Path(os.environ["STAND_IN_FOLDER"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--max-model-len", type=int, default=512)
    options, _ = parser.parse_known_args()
    (folder / "arguments").write_text(json.dumps(sys.argv))
    (folder / "environment").write_text(json.dumps(dict(os.environ)))
    note_pid(folder, os.getpid())
    print("starting", flush=True)
    if (folder / "stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if (folder / "child").exists():
        child = subprocess.Popen([sys.executable, "-c", _CHILD], start_new_session=True, stdout=subprocess.PIPE)
        note_pid(folder, child.pid)
        assert child.stdout is not None
        child.stdout.read(1)  # from now on it ignores SIGTERM
    if (folder / "die").exists():
        print((folder / "die").read_text(), flush=True)
        sys.exit(3)
    while (folder / "hold").exists():  # noqa: ASYNC110 - another process decides
        await asyncio.sleep(0.01)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(options.uds)
    server = UpstreamServer(model=options.served_model_name, max_context=options.max_model_len)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    print("serving", flush=True)
    await asyncio.Event().wait()


def note_pid(folder: Path, pid: int) -> None:
    with (folder / "pids").open("a") as file:
        file.write(f"{pid}\n")


if __name__ == "__main__":
    asyncio.run(main())
