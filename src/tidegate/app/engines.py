"""Constructing the engine that the settings ask for."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.config import Settings
from tidegate.config.engine import RECORDER_ONLY, place_of
from tidegate.core.agreement import Tolerance
from tidegate.core.errors import ConfigError, EngineError
from tidegate.ports import Engine
from tidegate.release import PROBE_PROMPTS

if TYPE_CHECKING:
    from tidegate.engines.remote import Upstream
    from tidegate.engines.replicas import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The base model: content hash of its weights, and where they lie; None where nobody here can read them."""

    sha256: str
    directory: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """A server behind the engine: its name in records, and how it is reached; ``socket`` instead of the url's host."""

    name: str
    url: str
    key: str | None = field(default=None, repr=False)
    socket: Path | None = None
    why_down: Callable[[], str | None] = lambda: None


def model_name(settings: Settings) -> str:
    """Name of the model in ``/v1/models`` and release ids: ASCII letters, digits, dots, dashes and underscores.

    Release ids go out in headers, which hold no others. Never empty.
    """
    own = settings.model.path.rstrip("/").rsplit("/", 1)[-1]
    if settings.engine.kind == "openai":
        own = settings.engine.model or "upstream"
    name = settings.model.name or own
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-.") or "model"


def agreement_tolerance(settings: Settings) -> Tolerance:
    """How far serving's log-probabilities may lie from the trainer's."""
    engine = settings.engine
    return Tolerance(max_nats=engine.agreement_max_nats, mean_nats=engine.agreement_mean_nats)


def other_names(settings: Settings) -> tuple[str, ...]:
    """What clients of the server behind Tidegate call its model, so that they need not change."""
    remote = settings.engine.kind != "embedded" and settings.engine.model is not None
    return (str(settings.engine.model),) if remote else ()


async def with_upstream_model(settings: Settings) -> Settings:
    """The settings with the name of the upstream's model filled in, if each upstream that can be asked lists just it.

    Raises:
        ConfigError: one lists none or several and ``engine.model`` names none, or two list different ones.
        EngineError: none of them can be asked.
    """
    if settings.engine.kind == "embedded":
        return settings
    from tidegate.engines.remote.models import only_model  # noqa: PLC0415 - an HTTP client that embedded does not need

    if settings.engine.model is not None:
        return settings
    if settings.engine.supervised:
        return settings.model_copy(
            update={"engine": settings.engine.model_copy(update={"model": model_name(settings)})}
        )
    names: dict[str, str] = {}
    failures: list[EngineError] = []
    async with opened_upstreams(settings) as upstreams:
        for upstream in upstreams:
            try:
                names[upstream.url] = await only_model(upstream)
            except EngineError as error:
                failures.append(error)
    if len(set(names.values())) > 1:
        raise ConfigError(f"the replicas serve different models: {names}; all must serve one, under one name")
    if not names:
        raise failures[0] if len(failures) == 1 else EngineError("; ".join(map(str, failures)))
    (name,) = set(names.values())
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"model": name})})


def base_of(settings: Settings, *, progress: Callable[[str], None] | None = None) -> Base:
    """The base model, its weights fetched into the cache if need be.

    Args:
        settings: with the name of the upstream's model, see :func:`with_upstream_model`.
        progress: told of downloads.
    """
    if settings.engine.kind == "openai":
        from tidegate.engines.remote.openai import unknown_base  # noqa: PLC0415 - see above

        return Base(sha256=unknown_base(settings.engine.model or ""), directory=None)
    from tidegate.engines.model_cache import base_hash  # noqa: PLC0415 - pulls in torch when converting

    directory = resolve_base(settings, progress=progress)
    return Base(sha256=base_hash(directory), directory=directory)


def resolve_base(settings: Settings, *, progress: Callable[[str], None] | None = None) -> Path:
    """Directory of the base model, fetched into the cache if need be.

    Raises:
        ConfigError: the model is an upstream's, whose weights nobody here can read.
        ModelError: it cannot be used.
    """
    if settings.engine.kind == "openai":
        raise ConfigError(f"engine.kind is 'openai': {RECORDER_ONLY}, and model.path to the weights")
    from tidegate.engines.model_cache import resolve_model  # noqa: PLC0415 - pulls in torch when converting

    return resolve_model(settings.model.path, progress=progress)


@asynccontextmanager
async def opened_upstreams(settings: Settings) -> AsyncGenerator[tuple[Upstream, ...]]:
    """Clients of the servers that the settings name, for the length of a block.

    Raises:
        ConfigError: they name none, or the variable with their key is empty.
    """
    async with _opened(settings, members_by_address(settings)) as upstreams:
        yield upstreams


def members_by_address(settings: Settings) -> tuple[EngineServer, ...]:
    """The servers that the settings name.

    Raises:
        ConfigError: they name none, or the variable with their key is empty.
    """
    engine = settings.engine
    if not engine.urls:
        raise ConfigError(f"engine.kind is {engine.kind!r} and engine.urls is missing; set it to ['http://HOST:PORT']")
    key = None if engine.api_key_env is None else os.environ.get(engine.api_key_env)
    if engine.api_key_env is not None and not key:
        raise ConfigError(
            f"engine.api_key_env names {engine.api_key_env!r}, and no such variable is set; export the key there"
        )
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the variable {engine.api_key_env!r} holds no key: printable ASCII is accepted")
    return tuple(EngineServer(name=place_of(url), url=url, key=key) for url in engine.urls)


@asynccontextmanager
async def _opened(settings: Settings, members: Sequence[EngineServer]) -> AsyncGenerator[tuple[Upstream, ...]]:
    from tidegate.engines.remote import Upstream  # noqa: PLC0415 - see above

    async with AsyncExitStack() as stack:
        upstreams: list[Upstream] = []
        for member in members:
            upstream = Upstream(
                member.url,
                key=member.key,
                socket=member.socket,
                connect_timeout_s=settings.engine.connect_timeout_s,
                read_timeout_s=settings.engine.read_timeout_s,
            )
            stack.push_async_callback(upstream.close)
            upstreams.append(upstream)
        yield tuple(upstreams)


@asynccontextmanager
async def open_engine(
    settings: Settings, base: Base, *, replica: str, members: Sequence[EngineServer] | None = None
) -> AsyncGenerator[Engine]:
    """The engine that the settings ask for, for the length of a block.

    Args:
        settings: with the name of the upstream's model.
        base: the base model.
        replica: name of an engine in this process; a server is named by its address or by whoever starts it.
        members: servers that run already; None looks them up, or starts them for the length of the block.
    """
    if base.directory is not None and settings.engine.kind == "embedded":
        async with embedded_engine(settings, base.directory, replica=replica) as engine:
            yield engine
        return
    async with AsyncExitStack() as stack:
        if members is None:
            members = await stack.enter_async_context(_members(settings, base, replica=replica))
        upstreams = await stack.enter_async_context(_opened(settings, members))
        engines = [_remote_engine(settings, base, *pair) for pair in zip(members, upstreams, strict=True)]
        if settings.engine.kind == "openai" and len(engines) == 1:
            yield engines[0]  # it has nothing to lose and nobody to stand in
            return
        from tidegate.engines.replicas import ReplicaSet  # noqa: PLC0415 - see above

        replicas = ReplicaSet(
            engines,
            probe_prompts=PROBE_PROMPTS,
            limits=_replica_limits(settings),
            tolerance=agreement_tolerance(settings),
        )
        yield await stack.enter_async_context(replicas)


@asynccontextmanager
async def _members(settings: Settings, base: Base, *, replica: str) -> AsyncGenerator[Sequence[EngineServer]]:
    if not settings.engine.supervised:
        yield members_by_address(settings)
        return
    from tidegate.app.supervision import borrowed_or_started  # noqa: PLC0415 - see above

    async with borrowed_or_started(settings, base.directory, prefix=replica) as members:
        yield members


def _remote_engine(settings: Settings, base: Base, member: EngineServer, upstream: Upstream) -> Engine:
    from tidegate.engines.remote import OpenAIEngine, SglangEngine, VllmEngine  # noqa: PLC0415 - see above

    model = str(settings.engine.model)
    if settings.engine.kind == "openai":
        return OpenAIEngine(upstream, model=model, replica=member.name)
    raw_logprobs = settings.engine.raw_logprobs
    if settings.engine.kind == "sglang":
        return SglangEngine(
            upstream, model=model, base_sha256=base.sha256, replica=member.name, raw_logprobs=raw_logprobs
        )
    return VllmEngine(
        upstream,
        model=model,
        base_sha256=base.sha256,
        replica=member.name,
        raw_logprobs=raw_logprobs,
        why_down=member.why_down,
    )


def _replica_limits(settings: Settings) -> Limits:
    from tidegate.engines.replicas import Limits  # noqa: PLC0415 - see above

    engine = settings.engine
    return Limits(
        failures=engine.breaker_failures,
        first_event_timeout_s=engine.first_token_timeout_s,
        swap_timeout_s=engine.swap_timeout_s,
        check_interval_s=engine.check_interval_s,
    )


@asynccontextmanager
async def engine_of(settings: Settings, *, replica: str) -> AsyncGenerator[Engine]:
    """As :func:`open_engine`, with everything that it needs looked up first."""
    named = await with_upstream_model(settings)
    base = await asyncio.to_thread(base_of, named)
    async with open_engine(named, base, replica=replica) as engine:
        yield engine


async def upstream_state(settings: Settings, url: str) -> str:
    """What a person should know of one of the servers that the settings name.

    Raises:
        ConfigError, EngineError: why it cannot be used.
    """
    from tidegate.engines.remote.models import listed_models  # noqa: PLC0415 - see above
    from tidegate.engines.remote.sglang_notes import sglang_notes  # noqa: PLC0415 - see above

    engine = settings.engine.model_copy(update={"urls": (url,)})
    named = await with_upstream_model(settings.model_copy(update={"engine": engine}))
    async with opened_upstreams(named) as (upstream,):
        names = sorted(await listed_models(upstream))
        notes = f"; {await sglang_notes(upstream)}" if named.engine.kind == "sglang" else ""
    if named.engine.model not in names:
        raise ConfigError(f"{upstream.url} does not list {named.engine.model!r} but {names[:10]}; see engine.model")
    return f"{upstream.url} serves {named.engine.model!r}{notes}"


async def upstreams_agree(settings: Settings) -> str:
    """That all servers of the settings serve one model, as far as they can be asked.

    Raises:
        ConfigError, EngineError: they don't, or none can be asked.
    """
    named = await with_upstream_model(settings)
    return f"{len(named.engine.urls)} replicas of {named.engine.model!r}"


@asynccontextmanager
async def embedded_engine(settings: Settings, model_dir: Path, *, replica: str) -> AsyncGenerator[Engine]:
    """Start an embedded engine for the length of a block."""
    from tidegate.engines.embedded import EmbeddedEngine  # noqa: PLC0415 - imports torch

    engine = EmbeddedEngine(
        model_dir,
        dtype=settings.model.dtype,
        max_batch=settings.model.max_batch,
        max_queue=settings.model.max_queue,
        max_context=settings.model.max_context,
        max_resident_adapters=settings.model.max_resident_adapters,
        threads=settings.model.threads,
        replica=replica,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
