"""Releases into the shadow and out of it: certified and proven as any that is loaded, but never in the routing table.

The audit log alone says which shadow runs. A server that starts takes it up again, or writes down why it cannot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tidegate.core.errors import CertificateError, ConflictError, RequestError, StoreError, TidegateError
from tidegate.core.shadow import SHADOW_ENDED, SHADOW_STARTED, Shadow, ended_body, last_run, started_body
from tidegate.core.types import JsonObject, Release
from tidegate.ports import AuditLog
from tidegate.release.loading import Loader
from tidegate.release.records import ReleaseRecords
from tidegate.release.router import CHAMPION, Router
from tidegate.release.shadow_route import ShadowRoute

_log = logging.getLogger(__name__)

_IDLE_S = 10.0
"""Calls of a shadow that has ended break off in this time; else the next swap unloads what it leaves."""


class Shadowing:
    """The shadow of one publisher, whose lock it shares.

    Args:
        records: durable releases and aliases.
        audit: remembers which shadow runs.
        loader: loads, proves and unloads.
        router: holds the route.
        lock: held by whoever changes what is loaded.
        clock: Unix seconds.
    """

    def __init__(
        self,
        records: ReleaseRecords,
        audit: AuditLog,
        *,
        loader: Loader,
        router: Router,
        lock: asyncio.Lock,
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._audit = audit
        self._loader = loader
        self._router = router
        self._lock = lock
        self._clock = clock

    async def start(self, release_id: str, share: float) -> JsonObject:
        """Put a release into the shadow; returns its status.

        Args:
            release_id: any release whose certificate stands, one that was rolled back included.
            share: of the calls that the champion answers, in (0, 1].

        Raises:
            NotFoundError: no such release.
            ConflictError: a shadow runs, or the release holds the champion's content.
            RequestError: the share is out of range.
            CertificateError, AdapterError, EngineError: it cannot be loaded as certified; nothing changed.
        """
        if not 0.0 < share <= 1.0:
            raise RequestError(f"share is {share!r}; a number above 0 and up to 1 is accepted", param="share")
        async with self._lock:
            running = self._router.shadow
            if running is not None:
                raise ConflictError(
                    f"release {running.shadow.release_id!r} is in the shadow; stop it first with 'tidegate releases "
                    "shadow --stop'"
                )
            last = await asyncio.to_thread(lambda: last_run(self._audit.read()))
            number = 1 if last is None else last.number + 1
            await self._begin(Shadow(id=f"shadow-{number}", release_id=release_id, share=share), recorded=False)
        return self._status() or {}

    async def stop(self, reason: str) -> JsonObject:
        """End the shadow: calls that run break off, and its adapter is unloaded unless something else needs it.

        Raises:
            ConflictError: none runs.
            StoreError: it has ended, but the log does not say so; repeat it, or the next start takes it up again.
        """
        async with self._lock:
            route = self._router.end_shadow()
            shadow = await self._recorded_shadow() if route is None else route.shadow
            if shadow is None:
                raise ConflictError("no release is in the shadow; there is none to stop")
            await self._note(SHADOW_ENDED, ended_body(shadow, reason))
        await self._unload_after(route)
        return ended_body(shadow, reason)

    async def resume(self) -> None:
        """After a start: take up the shadow that the log says runs. One that cannot be loaded ends, with the reason.

        Raises:
            StoreError: the log cannot be read or written.
        """
        async with self._lock:
            shadow = await self._recorded_shadow()
            if shadow is None:
                return
            try:
                await self._begin(shadow, recorded=True)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - no shadow, whatever is wrong with it, keeps a server from starting
                _log.warning("%s is in the shadow no more: %s", shadow.release_id, error)
                await self._note(SHADOW_ENDED, ended_body(shadow, f"it could not be loaded again: {error}"))

    async def step(self) -> None:
        """End a shadow whose certificate stands no more."""
        route = self._router.shadow
        if route is None:
            return
        try:
            await self._loader.check(await self._records.release(route.shadow.release_id))
        except CertificateError as error:
            if self._router.shadow is route:
                await self.stop(f"its certificate does not stand: {error}")

    def status(self) -> JsonObject:
        """What runs now, under ``shadow``: its id, release, share and calls in flight; None when nothing does."""
        return {"shadow": self._status()}

    async def end_beside(self, champion: Release) -> None:
        """End a shadow that has become the champion; under the lock, in the middle of a swap, which it never fails."""
        route = self._router.shadow
        if route is None or route.adapter_sha256 != champion.adapter_sha256:
            return
        self._router.end_shadow()
        try:
            await self._note(SHADOW_ENDED, ended_body(route.shadow, f"its content is the champion {champion.id!r}"))
        except TidegateError:
            _log.exception("a shadow has ended and the log does not say so; the next start ends it again")

    def _status(self) -> JsonObject | None:
        route = self._router.shadow
        if route is None:
            return None
        shadow = route.shadow
        return {"id": shadow.id, "release": shadow.release_id, "share": shadow.share, "calls": route.calls}

    async def _begin(self, shadow: Shadow, *, recorded: bool) -> None:
        release = await self._records.release(shadow.release_id)
        champion = await self._records.release((await self._records.aliases())[CHAMPION])
        if release.adapter_sha256 == champion.adapter_sha256:
            raise ConflictError(
                f"release {release.id!r} holds the same content as the champion {champion.id!r}; beside itself it "
                "shows nothing: name another release"
            )
        async with self._loader.bringing_in(release, champion) as (routed, _):
            if not recorded:
                body = started_body(shadow, adapter_sha256=release.adapter_sha256, base_sha256=release.base_sha256)
                await self._note(SHADOW_STARTED, body)
        route = ShadowRoute(shadow, adapter=routed.adapter, adapter_sha256=release.adapter_sha256)
        self._router.point_shadow_at(route)

    async def _recorded_shadow(self) -> Shadow | None:
        """The shadow that the log says runs."""
        last = await asyncio.to_thread(lambda: last_run(self._audit.read()))
        return last.shadow if last is not None and last.ended is None else None

    async def _note(self, kind: str, body: JsonObject) -> None:
        await asyncio.to_thread(lambda: self._audit.append(kind, body, time=self._clock()))

    async def _unload_after(self, route: ShadowRoute | None) -> None:
        if route is not None:
            try:
                async with asyncio.timeout(_IDLE_S):
                    await route.idle.wait()
            except TimeoutError:
                _log.warning("calls of %s still run; the next swap unloads it", route.shadow.id)
        async with self._lock:
            await self._loader.unload_unneeded()
