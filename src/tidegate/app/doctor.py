"""``tidegate doctor``: what would keep this machine and data directory from serving, said before it does."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidegate.app.engines import upstream_state, upstreams_agree
from tidegate.app.gates import build_policy, check_keys, gate_self_test, verify_log
from tidegate.app.layout import DataDirectory
from tidegate.app.splits import user_splitter
from tidegate.app.stores import has_database, open_stores, reader_of_sealed
from tidegate.app.supervision import vllm_options, vllm_python
from tidegate.config import Settings
from tidegate.core.errors import ConfigError, ConflictError, TidegateError
from tidegate.engines.known_models import KNOWN_MODELS
from tidegate.engines.model_cache import cache_root, check_model_directory
from tidegate.engines.supervised import visible_gpus, vllm_plans

_MIN_FREE_BYTES = 2 << 30  # one converted model, its download and a few adapters

State = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check and how it went."""

    check: str
    state: State
    detail: str


def examine(settings: Settings) -> list[Finding]:
    """Run all checks; none changes what is stored."""
    directory = DataDirectory.of(settings)
    findings = [
        Finding(check="python", state="ok", detail=platform.python_version()),
        *_packages(settings),
        *_answering(settings),
        _finding("policy", lambda: f"{build_policy(settings).name} ({build_policy(settings).hash[:12]})"),
        _finding("gate self-test", lambda: gate_self_test(settings)),
        _disk(settings),
    ]
    return [*findings, *_stored(settings, directory), *_server(settings, directory)]


def _stored(settings: Settings, directory: DataDirectory) -> Iterator[Finding]:
    try:
        is_used = has_database(directory)
    except TidegateError as error:
        yield Finding(check="databases", state="wrong", detail=f"[{error.code}] {error}")
        return
    if not is_used:
        place = settings.database.shown_url or str(settings.data_dir)
        yield Finding(check="data directory", state="warning", detail=f"{place!r} is empty; 'tidegate serve' fills it")
        return
    yield _finding("databases", lambda: _databases(directory))
    yield _finding("audit log", lambda: _audit(directory))
    yield _finding("keys", lambda: _keys(settings, directory))
    reader = reader_of_sealed(directory)
    if reader is not None:
        yield Finding(check="sealed database", state="warning", detail=reader)


def _answering(settings: Settings) -> Iterator[Finding]:
    if settings.engine.kind != "openai":
        yield _finding("model", lambda: _model(settings))
    urls = settings.engine.urls
    for url in urls:
        check = "upstream" if len(urls) == 1 else f"upstream {url}"
        yield _finding(check, lambda url=url: asyncio.run(upstream_state(settings, url)))
    if len(urls) > 1:
        yield _finding("upstreams", lambda: asyncio.run(upstreams_agree(settings)))
    if settings.engine.supervised:
        yield _finding("engine", lambda: _vllm(settings))


def _server(settings: Settings, directory: DataDirectory) -> list[Finding]:
    try:
        running = directory.server()
    except ConflictError as error:
        return [Finding(check="server", state="warning", detail=str(error))]
    if running is None:
        return list(_ports(settings))
    return [Finding(check="server", state="ok", detail=f"running at {running.url} (pid {running.pid})")]


def _finding(check: str, run: Callable[[], str]) -> Finding:
    try:
        return Finding(check=check, state="ok", detail=run())
    except TidegateError as error:
        return Finding(check=check, state="wrong", detail=f"[{error.code}] {error}")


def _packages(settings: Settings) -> Iterator[Finding]:
    wanted: dict[str, tuple[str, ...]] = {"tasks": ("openai", "reasoning_gym")}
    if settings.engine.kind == "embedded":
        wanted["embedded"] = ("torch", "transformers", "peft", "llguidance")
    elif settings.engine.kind != "openai":  # trains here what serves there
        wanted["embedded"] = ("torch", "transformers", "peft")
    if settings.training.backend == "trl":
        wanted["trl"] = ("trl", "datasets")
    if settings.database.url is not None:
        wanted["postgres"] = ("psycopg",)
    for extra, modules in wanted.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        detail = f"{', '.join(missing)} missing: pip install 'tidegate[{extra}]'" if missing else "installed"
        yield Finding(check=f"extra {extra}", state="warning" if missing else "ok", detail=detail)


def _model(settings: Settings) -> str:
    spec = settings.model.path
    if Path(spec).expanduser().exists():
        check_model_directory(Path(spec).expanduser())
        return f"directory {spec!r} has weights, configuration and tokenizer"
    if spec in KNOWN_MODELS:
        return f"{spec!r} is fetched and checked at the first start, then kept in {str(cache_root())!r}"
    return f"{spec!r} is a hub name; it is fetched at the first start"


def _vllm(settings: Settings) -> str:
    """Whether a vLLM could be started here as the settings want it."""
    if sys.platform != "linux":
        raise ConfigError(f"Tidegate starts vLLM on Linux, this is {sys.platform!r}; start it and set engine.urls")
    python, origin = vllm_python(settings)
    gpus = visible_gpus(os.environ)
    vllm_plans(
        vllm_options(settings, python, Path()),
        prefix="vllm",
        replicas=settings.engine.replicas,
        gpus=gpus,
        environment={},
    )
    return (
        f"{origin}, {settings.engine.replicas} of them on {f'NVIDIA devices {list(gpus)}' if gpus else 'the processor'}"
    )


def _databases(directory: DataDirectory) -> str:
    with open_stores(directory) as stores:
        return f"{len(stores.releases.list_releases())} releases, {len(stores.cycles.list_cycles())} cycles"


def _keys(settings: Settings, directory: DataDirectory) -> str:
    """Nothing is made anew here: a lost key must be seen, not replaced."""
    with open_stores(directory) as stores:
        signed = any(release.certificate is not None for release in stores.releases.list_releases())
    keys = directory.root / "keys"
    missing = [name for name in ("gate.pem", "operator.pem", "split.key") if not (keys / name).exists()]
    if missing and (signed or "split.key" in missing):
        raise ConfigError(f"{missing} missing in {str(keys)!r}; restore them from a backup")
    user_splitter(settings, directory)
    return f"{', '.join(missing)} not made yet: nothing has been signed" if missing else check_keys(directory)


def _audit(directory: DataDirectory) -> str:
    with open_stores(directory) as stores:
        report = verify_log(stores.audit.read(), stores.releases.list_releases())
    return f"{report['records']} records, {report['decisions']} decisions recomputed"


def _disk(settings: Settings) -> Finding:
    place = settings.data_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    state: State = "ok" if free >= _MIN_FREE_BYTES else "warning"
    return Finding(check="disk", state=state, detail=f"{free / (1 << 30):.1f} GiB free at {str(place)!r}")


def _ports(settings: Settings) -> Iterator[Finding]:
    server = settings.server
    for name, host, port in (("port", server.host, server.port), ("admin_port", "127.0.0.1", server.admin_port)):
        try:
            with socket.create_server((host, port)):
                yield Finding(check=f"server.{name}", state="ok", detail=f"{port} is free")
        except OSError as error:
            yield Finding(
                check=f"server.{name}",
                state="wrong",
                detail=f"{port} on {host}: {error.strerror}; choose another with --{name.replace('_', '-')}",
            )
