"""``tidegate doctor``: what would keep this machine and data directory from serving, said before it does."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidegate.app.gates import build_policy, check_keys, gate_self_test, verify_log
from tidegate.app.layout import DataDirectory
from tidegate.app.splits import user_splitter
from tidegate.app.stores import open_stores
from tidegate.config import Settings
from tidegate.core.errors import ConfigError, ConflictError, TidegateError
from tidegate.engines.known_models import KNOWN_MODELS
from tidegate.engines.model_cache import cache_root, check_model_directory

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
    directory = DataDirectory(root=settings.data_dir)
    findings = [
        Finding(check="python", state="ok", detail=platform.python_version()),
        *_packages(),
        _finding("model", lambda: _model(settings)),
        _finding("policy", lambda: f"{build_policy(settings).name} ({build_policy(settings).hash[:12]})"),
        _finding("gate self-test", lambda: gate_self_test(settings)),
        _disk(settings),
    ]
    if directory.open_database.exists():
        findings.append(_finding("databases", lambda: _databases(directory)))
        findings.append(_finding("audit log", lambda: _audit(directory)))
        findings.append(_finding("keys", lambda: _keys(settings, directory)))
    else:
        detail = f"{str(settings.data_dir)!r} is empty; 'tidegate serve' fills it"
        findings.append(Finding(check="data directory", state="warning", detail=detail))
    return [*findings, *_server(settings, directory)]


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


def _packages() -> Iterator[Finding]:
    for extra, modules in (("embedded", ("torch", "transformers", "peft")), ("tasks", ("openai", "reasoning_gym"))):
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


def _databases(directory: DataDirectory) -> str:
    with open_stores(directory) as stores:
        return f"{len(stores.releases.list_releases())} releases, {len(stores.cycles.list_cycles())} cycles"


def _keys(settings: Settings, directory: DataDirectory) -> str:
    """Nothing is made anew here: a lost key must be seen, not replaced."""
    missing = [
        name for name in ("gate.pem", "operator.pem", "split.key") if not (directory.root / "keys" / name).exists()
    ]
    if missing:
        raise ConfigError(f"{missing} missing in {str(directory.root / 'keys')!r}; restore them from a backup")
    user_splitter(settings, directory)
    return check_keys(directory)


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
