"""A real vLLM on loopback with one adapter, as a peer: a process of its own that ends with the block."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tidegate.core.types import AdapterRef
from tidegate.engines.supervised import installed, recipe_for
from tidegate.engines.supervised.adapted_modules import adapted_modules

BASE = "base"
_START_S = 400.0
_POLL_S = 0.5
_SHOWN_CHARACTERS = 12_000


def vllm_python(values: Mapping[str, str]) -> Path | None:
    """The interpreter that option ``vllm`` names: a path, or ``installed``: what ``engine install`` made.

    Raises:
        RuntimeError: nothing is installed.
    """
    wanted = values.get("vllm")
    if wanted != "installed":
        return None if wanted is None else Path(wanted)
    for build in ("cuda", "cpu"):
        found = installed(recipe_for("vllm", build))
        if found is not None:
            return found.python
    raise RuntimeError("vllm=installed, and vLLM is not; run 'tidegate engine install vllm' first")


@contextmanager
def vllm_server(python: Path, model: Path, adapter: AdapterRef, *, log: Path) -> Generator[str]:
    """Address of a vLLM that serves ``model`` as ``base`` and ``adapter`` under its name.

    Raises:
        RuntimeError: it did not come up; ``log`` says why.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)  # our packages are not its packages
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", BASE,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024",
        "--max-num-seqs", "32", "--enable-lora", "--max-lora-rank", "16", "--max-loras", "2",
        "--max-cpu-loras", "8", "--api-server-count", "1",
        "--lora-target-modules", *adapted_modules(model),
        "--lora-modules", f"{adapter.name}={adapter.path}",
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    except BaseException:
        _say_last_words(log)  # the file goes with its folder, and a server that fails says why only there
        raise
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310 - loopback, an address of ours
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    raise RuntimeError(f"vLLM did not serve within {_START_S:g} s; its last words follow")


def _say_last_words(log: Path) -> None:
    text = log.read_text(encoding="utf-8", errors="replace")
    # the first error says why; behind it each waiting call repeats that there was one
    first = text.find("ERROR")
    shown = text[-_SHOWN_CHARACTERS:] if first < 0 else text[first : first + _SHOWN_CHARACTERS]
    print(shown, file=sys.stderr)
