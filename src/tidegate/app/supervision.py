"""vLLM servers of our own: started for the server, found by the commands beside it, or started for a command alone."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tidegate.app.engines import EngineServer
from tidegate.app.layout import DataDirectory
from tidegate.artifacts import CONFIG_FILE, read_json
from tidegate.config import Settings
from tidegate.core.errors import ConfigError
from tidegate.engines.supervised import (
    RECIPES,
    Patience,
    VllmOptions,
    installed,
    supervised,
    visible_gpus,
    vllm_plans,
)

Say = Callable[[str], None]

_ASKED = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
_ASKED_TIMEOUT_S = 60.0

_log = logging.getLogger(__name__)


def vllm_python(settings: Settings) -> tuple[Path, str]:
    """The interpreter that runs vLLM, and what it is, for people.

    Raises:
        ConfigError: there is none.
    """
    named = settings.engine.python
    if named is not None:
        return _checked(named.expanduser()), "engine.python"
    wanted = "cuda" if visible_gpus(os.environ) else "cpu"
    for recipe in sorted(RECIPES, key=lambda recipe: recipe.build != wanted):
        found = installed(recipe)
        if recipe.engine == "vllm" and found is not None:
            return found.python, f"{recipe.requirement} in {str(found.folder)!r}"
    raise ConfigError(
        "engine.kind is 'vllm' without engine.urls, and vLLM is not installed: run 'tidegate engine install vllm', set "
        "engine.python to an interpreter that has it, or engine.urls to one that runs"
    )


def vllm_options(settings: Settings, python: Path, model_dir: Path) -> VllmOptions:
    """The settings in vLLM's terms."""
    model = settings.model
    return VllmOptions(
        python=python,
        model_dir=model_dir,
        served_name=str(settings.engine.model),
        max_rank=max([settings.training.rank, *_ranks_in(DataDirectory.of(settings).adapters)]),
        resident=model.max_resident_adapters,
        max_context=model.max_context,
        max_running=model.max_batch,
        dtype=model.dtype,
        raw_logprobs=settings.engine.raw_logprobs,
        arguments=settings.engine.arguments,
    )


def _ranks_in(adapters: Path) -> list[int]:
    """Ranks of all adapters that lie here: a rollback may want any of them, whatever the settings say now."""
    ranks: list[int] = []
    for file in adapters.glob(f"*/{CONFIG_FILE}"):
        try:
            fields = read_json(file, "an adapter's configuration")
        except ConfigError:
            continue  # loading it says what is wrong with it
        found = [fields.get("r"), *dict(fields.get("rank_pattern") or {}).values()]
        ranks += [rank for rank in found if isinstance(rank, int) and rank > 0]
    return ranks


def _checked(python: Path) -> Path:
    """An interpreter that a user named.

    Raises:
        ConfigError: it does not run, or has no vllm.
    """
    try:
        done = subprocess.run([python, "-I", "-c", _ASKED], capture_output=True, timeout=_ASKED_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python = {str(python)!r} does not run ({error}); name an interpreter") from error
    if done.returncode != 0:
        raise ConfigError(
            f"engine.python = {str(python)!r} has no module 'vllm'; install it there, or leave the setting out after "
            "'tidegate engine install vllm'"
        )
    return python


@asynccontextmanager
async def started_servers(
    settings: Settings, model_dir: Path | None, *, prefix: str, say: Say
) -> AsyncGenerator[tuple[EngineServer, ...]]:
    """The servers that the settings ask for, for the length of a block.

    Args:
        settings: with the name of the model.
        model_dir: the base model.
        prefix: what their names begin with.
        say: told of what takes time or goes wrong.

    Raises:
        ConfigError: vLLM is not installed, or a setting does not fit.
        EngineError: a server did not start.
    """
    if model_dir is None:
        raise ConfigError("engine.kind 'vllm' without engine.urls serves model.path, which cannot be read here")
    engine = settings.engine
    python, _ = await asyncio.to_thread(vllm_python, settings)
    plans = vllm_plans(
        vllm_options(settings, python, model_dir),
        prefix=prefix,
        replicas=engine.replicas,
        gpus=visible_gpus(os.environ),
        environment=os.environ,
        without=() if engine.api_key_env is None else (engine.api_key_env,),
    )
    patience = Patience(start_timeout_s=engine.start_timeout_s, max_restarts=engine.max_restarts)
    folder = DataDirectory.of(settings).engines
    async with AsyncExitStack() as stack:
        # One after the other: each compiles with every core, and the next one finds that in vLLM's cache.
        servers = [
            await stack.enter_async_context(supervised(plan, folder=folder, patience=patience, say=say))
            for plan in plans
        ]
        yield tuple(
            EngineServer(name=server.name, url=f"http://{server.name}", socket=server.socket, why_down=server.why_down)
            for server in servers
        )


@asynccontextmanager
async def announced_servers(
    settings: Settings, model_dir: Path | None, *, say: Say
) -> AsyncGenerator[tuple[EngineServer, ...]]:
    """:func:`started_servers` of the server of a data directory: cycles beside it answer with the same."""
    directory = DataDirectory.of(settings)
    async with started_servers(settings, model_dir, prefix="vllm", say=say) as members:
        directory.announce_engines({one.name: str(one.socket) for one in members})
        try:
            yield members
        finally:
            directory.withdraw_engines()


@asynccontextmanager
async def borrowed_or_started(
    settings: Settings, model_dir: Path | None, *, prefix: str
) -> AsyncGenerator[Sequence[EngineServer]]:
    """The servers of the running Tidegate server; where there is none, servers of our own.

    Raises:
        ConflictError: a server is starting.
        ConfigError, EngineError: as :func:`started_servers`.
    """
    directory = DataDirectory.of(settings)
    found = directory.announced_engines() if directory.server() is not None else {}
    if found:
        yield tuple(EngineServer(name=name, url=f"http://{name}", socket=Path(where)) for name, where in found.items())
        return
    async with started_servers(settings, model_dir, prefix=prefix, say=_log.info) as members:
        yield members
