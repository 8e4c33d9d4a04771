"""``tidegate serve``: one process that answers, records, and swaps what it answers with.

Order of starting: the directory's lock, model, databases, gate self-test, engine, champion proven and loaded, then the
ports open. Whatever fails before that leaves no port open and nothing announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from tidegate.app.engines import Base, base_of, model_name, open_engine, other_names, with_upstream_model
from tidegate.app.gates import gate_self_test
from tidegate.app.layout import DataDirectory, ServerAddress
from tidegate.app.publishing import build_live_gate, build_publisher
from tidegate.app.splits import user_splitter
from tidegate.app.stores import Stores, open_stores, reader_of_sealed
from tidegate.app.watch import watch
from tidegate.app.watch_calls import CallTally
from tidegate.app.watch_prompts import CanaryPrompts
from tidegate.capture import Recorder
from tidegate.config import Settings
from tidegate.core.errors import ConfigError, RequestError
from tidegate.core.types import Release, Task
from tidegate.engines.replicas import ReplicaSet
from tidegate.gate import Grading
from tidegate.gateway.admin import AdminDependencies, create_admin
from tidegate.gateway.dependencies import GatewayDependencies
from tidegate.gateway.factory import create_gateway
from tidegate.gateway.serve import running_server
from tidegate.ports import Engine
from tidegate.release import Router
from tidegate.signals import builtin_environments, builtin_verifiers, judge_answer
from tidegate.signals.tasks.file import read_tasks

LOOPBACK = "127.0.0.1"

_log = logging.getLogger(__name__)


async def serve(settings: Settings, *, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let requests in flight end.

    Raises:
        ConfigError: a setting, the model or a port is not usable.
        ConflictError: another server serves this data directory.
        StoreError, CertificateError, AdapterError, EngineError: what should be served cannot be served.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    async with running(settings, say=say) as address:
        say(f"serving at {address.url}/v1 (admin at {address.admin_url}); stop with Ctrl-C")
        await stop.wait()
        say("stopping: requests in flight are finished first")


@asynccontextmanager
async def running(settings: Settings, *, say: Callable[[str], None]) -> AsyncGenerator[ServerAddress]:
    """A whole server for the length of a block."""
    directory = DataDirectory.of(settings).create()
    async with AsyncExitStack() as stack:
        stack.enter_context(directory.served_alone())
        settings = await with_upstream_model(settings)
        base = await asyncio.to_thread(base_of, settings, progress=say)
        stores = stack.enter_context(open_stores(directory))
        reader = await asyncio.to_thread(reader_of_sealed, directory)
        if reader is not None:
            _log.warning("%s", reader)
        gate_self_test(settings)
        engine = await stack.enter_async_context(_engine(settings, base, say=say))
        router = Router(
            model_name=model_name(settings),
            other_names=other_names(settings),
            episode_ttl_s=settings.server.episode_ttl_s,
            clock=time.monotonic,
        )
        publisher = build_publisher(directory, stores, engine, router, settings=settings, clock=time.time)
        champion = await publisher.reconcile()
        say(f"champion is {champion.id!r}")
        tally = CallTally()
        prompts = canary_prompts(settings, engine, router)
        live = build_live_gate(settings, directory, stores, publisher, clock=time.time, prompts=prompts, tally=tally)
        await live.resume()
        await publisher.shadowing.resume()
        recorder = Recorder(stores.trajectories, stores.sealed_trajectories, shadows=stores.shadows)
        stack.push_async_callback(recorder.close)
        gateway = create_gateway(
            GatewayDependencies(
                engine=engine,
                router=router,
                recorder=recorder,
                split_of=user_splitter(settings, directory),
                check_task=task_check(),
                clock=time.time,
                new_id=lambda: uuid.uuid4().hex,
                health=_store_health(stores),
                recorder_counts=recorder.counts,
                observe_call=tally.add,
                replicas=engine if isinstance(engine, ReplicaSet) else None,
                passes_fields_on=settings.engine.kind == "openai",
                judge=partial(judge_answer, builtin_verifiers()),
            ),
            settings.server,
            settings.shadow,
        )
        admin = create_admin(
            AdminDependencies(
                publisher=publisher,
                live=live,
                shadow=publisher.shadowing,
                releases=lambda: _releases(stores),
                new_id=lambda: uuid.uuid4().hex,
            ),
            directory.admin_token(),
        )
        server = settings.server
        port = await stack.enter_async_context(
            running_server(gateway, host=server.host, port=server.port, option="--port")
        )
        stack.push_async_callback(gateway.state.shadows.close)  # before the server waits for its own requests
        admin_port = await stack.enter_async_context(
            running_server(admin, host=LOOPBACK, port=server.admin_port, option="--admin-port")
        )
        host = f"[{server.host}]" if ":" in server.host else server.host
        address = ServerAddress(
            url=f"http://{host}:{port}", admin_url=f"http://{LOOPBACK}:{admin_port}", pid=os.getpid()
        )
        directory.announce_server(address)
        stack.callback(directory.withdraw_server)
        steps = gateway.state.metrics.watch_steps
        every_s = settings.watch.interval_s
        for looking in (
            watch(live.step, interval_s=every_s, count=lambda outcome: steps.labels(outcome).inc()),
            watch(publisher.shadowing.step, interval_s=every_s, count=lambda _: None),
        ):
            stack.push_async_callback(_ended, asyncio.create_task(looking))
        yield address


@asynccontextmanager
async def _engine(settings: Settings, base: Base, *, say: Callable[[str], None]) -> AsyncGenerator[Engine]:
    """What answers, servers of its own included."""
    name = model_name(settings)
    async with AsyncExitStack() as stack:
        members = None
        if settings.engine.supervised:
            from tidegate.app.supervision import announced_servers  # noqa: PLC0415 - only where it is asked for

            say(f"model {name!r} in vLLM, which is started now; that takes a minute or more")
            members = await stack.enter_async_context(announced_servers(settings, base.directory, say=say))
        else:
            place = f"at {', '.join(settings.engine.urls)}" if settings.engine.urls else "in this process"
            say(f"model {name!r} {place}")
        yield await stack.enter_async_context(open_engine(settings, base, replica="embedded-0", members=members))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def canary_prompts(settings: Settings, engine: Engine, router: Router) -> CanaryPrompts | None:
    """The fixed prompts of the settings.

    Raises:
        TaskFileError: the file is malformed.
    """
    if settings.watch.prompts is None:
        return None
    verifiers, environments = builtin_verifiers(), builtin_environments()
    cycle = settings.cycle
    grading = Grading(
        verifiers=verifiers,
        environments=environments,
        max_calls=cycle.max_calls,
        concurrency=cycle.concurrency,
        timeout_s=cycle.episode_timeout_s,
        clock=time.monotonic,
    )
    tasks = read_tasks(settings.watch.prompts, verifiers=verifiers, environments=environments)
    return CanaryPrompts(tasks, engine=engine, router=router, grading=grading)


def task_check() -> Callable[[Task], None]:
    """Raises RequestError for a declared task that nobody could replay and score."""
    verifiers, environments = builtin_verifiers(), builtin_environments()

    def check(task: Task) -> None:
        if task.verifier not in verifiers:
            raise RequestError(f"metadata.tidegate_verifier is {task.verifier!r}; registered: {sorted(verifiers)}")
        if task.environment is not None and task.environment not in environments:
            raise RequestError(
                f"metadata.tidegate_environment is {task.environment!r}; registered: {sorted(environments)}"
            )
        try:
            verifiers[task.verifier].check_reference(task.reference)
        except (ValueError, ConfigError) as error:
            raise RequestError(f"metadata.tidegate_reference is not usable: {error}") from error

    return check


def _store_health(stores: Stores) -> Callable[[], Awaitable[Sequence[str]]]:
    async def reasons() -> Sequence[str]:
        return await asyncio.to_thread(stores.problems)

    return reasons


async def _releases(stores: Stores) -> Sequence[Release]:
    return await asyncio.to_thread(stores.releases.list_releases)
