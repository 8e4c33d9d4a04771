"""Reaching the publisher: over the admin API of a running server, else one of our own over a local engine."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import aiohttp

from tidegate.app.engines import agreement_tolerance, model_name
from tidegate.app.gates import build_policy, certificate_check, certificate_of
from tidegate.app.layout import DataDirectory, ServerAddress
from tidegate.app.stores import Stores
from tidegate.app.watch import LiveGate
from tidegate.app.watch_calls import CallTally
from tidegate.app.watch_prompts import CanaryPrompts
from tidegate.app.watch_units import WatchRules
from tidegate.config import Settings
from tidegate.core.errors import (
    AdapterError,
    CertificateError,
    CommandError,
    ConflictError,
    NotFoundError,
    TidegateError,
    VoidCertificateError,
)
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import gate_state
from tidegate.core.types import JsonObject
from tidegate.gateway.admin import release_json
from tidegate.ports import AuditLog, Engine
from tidegate.release import Publisher, Router
from tidegate.signals import builtin_verifiers

_COMMIT_S = 60.0
"""How long a call that has ended may wait until it is committed, at most."""


class PublishesReleases(Protocol):
    """The slice of a publisher that commands and cycles use. Each method returns the release as JSON.

    ``against`` is the content hash of the adapter that the candidate was judged against, or ``base``.
    """

    async def publish(self, candidate_id: str, *, against: str) -> JsonObject: ...

    async def promote(self, release_id: str) -> JsonObject: ...

    async def rollback(self, to: str | None, reason: str) -> JsonObject: ...

    async def start_canary(self, candidate_id: str, *, against: str) -> JsonObject:
        """Returns the status of the canary's trial instead."""
        ...

    async def stop_canary(self, reason: str) -> JsonObject:
        """Returns the status of the canary's trial instead."""
        ...


class RemotePublisher:
    """Talks to the admin API of a running server.

    Raises (each method):
        ConflictError, NotFoundError: as the publisher in the server says.
        CommandError: the server refused for another reason or cannot be reached.
    """

    def __init__(self, address: ServerAddress, token: str) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}"}

    async def publish(self, candidate_id: str, *, against: str) -> JsonObject:
        return await self._post("publish", {"candidate": candidate_id, "against": against})

    async def promote(self, release_id: str) -> JsonObject:
        return await self._post("promote", {"release": release_id})

    async def rollback(self, to: str | None, reason: str) -> JsonObject:
        return await self._post("rollback", {"to": to, "reason": reason})

    async def start_canary(self, candidate_id: str, *, against: str) -> JsonObject:
        return await self._post("canary", {"candidate": candidate_id, "against": against})

    async def stop_canary(self, reason: str) -> JsonObject:
        return await self._post("canary/stop", {"reason": reason})

    async def start_shadow(self, release_id: str, share: float) -> JsonObject:
        """Returns the status of the shadow."""
        return await self._post("shadow", {"release": release_id, "share": share})

    async def stop_shadow(self, reason: str) -> JsonObject:
        """Returns which shadow ended, and why."""
        return await self._post("shadow/stop", {"reason": reason})

    async def _post(self, verb: str, body: JsonObject) -> JsonObject:
        url = f"{self._address.admin_url}/admin/{verb}"
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers) as client,
                client.post(url, json=dict(body)) as response,
            ):
                answer: dict[str, Any] = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise CommandError(f"the server at {self._address.admin_url} cannot be asked to {verb}: {error}") from error
        if "error" in answer:
            raise _error_of(answer["error"])
        return answer


def _error_of(body: JsonObject) -> TidegateError:
    """What the server refused with; only a refusal that lasts keeps its type, anything else may be tried again."""
    lasting = (AdapterError, CertificateError, ConflictError, NotFoundError, VoidCertificateError)
    kinds: dict[str, type[TidegateError]] = {kind.code: kind for kind in lasting}
    return kinds.get(str(body.get("code")), CommandError)(str(body.get("message")))


class LocalPublisher:
    """A publisher in this process: proves the weights on an engine of its own, then commits the alias."""

    def __init__(self, publisher: Publisher, live: LiveGate) -> None:
        self._publisher = publisher
        self._live = live

    async def publish(self, candidate_id: str, *, against: str) -> JsonObject:
        return release_json(await self._publisher.publish(candidate_id, against=against))

    async def promote(self, release_id: str) -> JsonObject:
        return release_json(await self._publisher.promote(release_id))

    async def rollback(self, to: str | None, reason: str) -> JsonObject:
        return release_json(await self._publisher.rollback(to, reason))

    async def start_canary(self, candidate_id: str, *, against: str) -> JsonObject:
        return await self._live.start_canary(candidate_id, against=against)

    async def stop_canary(self, reason: str) -> JsonObject:
        return await self._live.stop(reason)


def build_publisher(
    directory: DataDirectory,
    stores: Stores,
    engine: Engine,
    router: Router,
    *,
    settings: Settings,
    clock: Callable[[], float],
) -> Publisher:
    """Wire a publisher to the stores and the gate's certificates."""
    policy = build_policy(settings)
    return Publisher(
        store=stores.releases,
        audit=stores.audit,
        engine=engine,
        router=router,
        check_certificate=certificate_check(directory, stores.audit),
        certificate_of=lambda sha256: certificate_of(directory, sha256),
        adapters_dir=directory.adapters,
        model_name=model_name(settings),
        clock=clock,
        canary_required=lambda: canary_required(policy, stores.audit),
        tolerance=agreement_tolerance(settings),
    )


def canary_required(policy: Policy, audit: AuditLog) -> bool:
    """Whether the policy in force asks for a canary, or ``policy``, which may ask for more at once but not for less."""
    in_force = gate_state(audit.read()).controls.policy
    return any(rules.canary != "none" for rules in (policy, in_force) if rules is not None)


def build_live_gate(
    settings: Settings,
    directory: DataDirectory,
    stores: Stores,
    publisher: Publisher,
    *,
    clock: Callable[[], float],
    prompts: CanaryPrompts | None = None,
    tally: CallTally | None = None,
) -> LiveGate:
    """Wire the live part of the gate to a publisher."""
    server = settings.server
    return LiveGate(
        publisher=publisher,
        audit=stores.audit,
        releases=stores.releases,
        stores=(stores.trajectories, stores.sealed_trajectories),
        verifiers=builtin_verifiers(),
        check_certificate=certificate_check(directory, stores.audit),
        policy=build_policy(settings),
        rules=WatchRules(
            metric=settings.watch.metric,
            verdict_wait_s=settings.watch.verdict_wait_s,
            late_s=server.request_timeout_s + _COMMIT_S,
            open_ttl_s=server.episode_ttl_s,
            max_calls=settings.cycle.max_calls,
        ),
        prompts=prompts,
        tally=CallTally() if tally is None else tally,
        clock=clock,
        new_id=lambda: uuid.uuid4().hex,
    )


@asynccontextmanager
async def publisher_for(
    directory: DataDirectory,
    stores: Stores,
    open_engine: Callable[[], AbstractAsyncContextManager[Engine]],
    *,
    settings: Settings,
    clock: Callable[[], float],
) -> AsyncGenerator[PublishesReleases]:
    """The running server's publisher if there is a server, else a local one."""
    address = directory.server()
    if address is not None:
        yield RemotePublisher(address, directory.admin_token())
        return
    async with open_engine() as engine:
        router = Router(model_name=model_name(settings), episode_ttl_s=0.0, clock=clock)
        publisher = build_publisher(directory, stores, engine, router, settings=settings, clock=clock)
        await publisher.reconcile()
        yield LocalPublisher(publisher, build_live_gate(settings, directory, stores, publisher, clock=clock))
