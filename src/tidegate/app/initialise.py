"""``tidegate init``: a settings file with what most people change, and the gate's policy to edit."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from tidegate.artifacts import write_atomically
from tidegate.core.errors import ConfigError
from tidegate.core.types import JsonObject

_SETTINGS = """\
# Settings of Tidegate. Every name can also be set by a variable, e.g. TIDEGATE_SERVER__PORT=8420.
# 'tidegate config show' lists all of them; docs/reference/settings.md explains them.

data_dir = ".tidegate"
policy = "gate.toml" # what it takes to be promoted; its hash is in every certificate

[server]
host = "127.0.0.1"
port = 8420

[model]
path = "smollm2-135m" # or a directory or hub name of any causal LM with a chat template

# [engine] # a server instead of a model in this process; see docs/how-to/stand-in-front-of-a-server.md
# kind = "vllm" # or "sglang": loads adapters; "openai" is any other server, recorder only
# urls = ["http://127.0.0.1:8000"] # without, Tidegate starts a vLLM: docs/how-to/let-tidegate-run-vllm.md

[split] # shares of users, for good
train = 0.85
dev = 0.05
sealed = 0.10
"""


def write_initial_files(directory: Path) -> JsonObject:
    """Write ``tidegate.toml`` and ``gate.toml`` where they do not exist.

    Returns:
        For each file ``written`` or ``kept``.

    Raises:
        ConfigError: the directory cannot be written.
    """
    policy = files("tidegate.gate").joinpath("policies/default.toml").read_text(encoding="utf-8")
    states: dict[str, str] = {}
    for name, text in (("tidegate.toml", _SETTINGS), ("gate.toml", policy)):
        path = directory / name
        if path.exists():
            states[str(path)] = "kept"
            continue
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error
        states[str(path)] = "written"
    return states
