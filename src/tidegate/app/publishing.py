"""Reaching the publisher: over the admin API of a running server, else one of our own over a local engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import aiohttp

from tidegate.app.gates import certificate_check, certificate_of
from tidegate.app.layout import DataDirectory, ServerAddress
from tidegate.app.stores import Stores
from tidegate.core.errors import CommandError, ConflictError, NotFoundError, TidegateError
from tidegate.core.types import JsonObject
from tidegate.gateway.admin import release_json
from tidegate.ports import Engine
from tidegate.release import Publisher, Router


class PublishesReleases(Protocol):
    """The slice of a publisher that commands and cycles use. Each method returns the release as JSON.

    ``against`` is the content hash of the adapter that the candidate was judged against, or ``base``.
    """

    async def publish(self, candidate_id: str, *, against: str) -> JsonObject: ...

    async def promote(self, release_id: str) -> JsonObject: ...

    async def rollback(self, to: str | None, reason: str) -> JsonObject: ...


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
    kinds: dict[str, type[TidegateError]] = {kind.code: kind for kind in (ConflictError, NotFoundError)}
    return kinds.get(str(body.get("code")), CommandError)(str(body.get("message")))


class LocalPublisher:
    """A publisher in this process: proves the weights on an engine of its own, then commits the alias."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def publish(self, candidate_id: str, *, against: str) -> JsonObject:
        return release_json(await self._publisher.publish(candidate_id, against=against))

    async def promote(self, release_id: str) -> JsonObject:
        return release_json(await self._publisher.promote(release_id))

    async def rollback(self, to: str | None, reason: str) -> JsonObject:
        return release_json(await self._publisher.rollback(to, reason))


def build_publisher(
    directory: DataDirectory,
    stores: Stores,
    engine: Engine,
    router: Router,
    *,
    model_name: str,
    clock: Callable[[], float],
) -> Publisher:
    """Wire a publisher to the stores and the gate's certificates."""
    return Publisher(
        store=stores.releases,
        engine=engine,
        router=router,
        check_certificate=certificate_check(directory, stores.audit),
        certificate_of=lambda sha256: certificate_of(directory, sha256),
        adapters_dir=directory.adapters,
        model_name=model_name,
        clock=clock,
    )


@asynccontextmanager
async def publisher_for(
    directory: DataDirectory,
    stores: Stores,
    open_engine: Callable[[], AbstractAsyncContextManager[Engine]],
    *,
    model_name: str,
    clock: Callable[[], float],
) -> AsyncGenerator[PublishesReleases]:
    """The running server's publisher if there is a server, else a local one."""
    address = directory.server()
    if address is not None:
        yield RemotePublisher(address, directory.admin_token())
        return
    async with open_engine() as engine:
        router = Router(model_name=model_name, episode_ttl_s=0.0, clock=clock)
        publisher = build_publisher(directory, stores, engine, router, model_name=model_name, clock=clock)
        await publisher.reconcile()
        yield LocalPublisher(publisher)
