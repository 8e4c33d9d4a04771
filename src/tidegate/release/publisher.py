"""From certified weights to served weights, and back.

One path for publishing, promoting and rolling back: verify the certificate, load under an immutable name,
probe that the loaded weights are the certified ones and change the logits, commit the alias, and only then make
the release addressable and move the pointer. Whatever fails before the commit leaves the champion as it was and
nothing else loaded. Never trains, never decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from tidegate.core.errors import CertificateError, ConflictError, EngineError, VoidCertificateError
from tidegate.core.types import AdapterRef, CandidateState, JsonObject, Messages, Release
from tidegate.ports import Engine, ReleaseStore
from tidegate.release.records import ReleaseRecords
from tidegate.release.router import ANCHOR, CHAMPION, PREVIOUS, RoutedRelease, Router

_log = logging.getLogger(__name__)

BARE_BASE = "base"
"""What a candidate was judged against when no adapter was served yet."""

PROBE_PROMPTS: tuple[Messages, ...] = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    ({"role": "user", "content": "Name a colour."},),
)


class CertificateCheck(Protocol):
    """Raises CertificateError unless ``certificate`` covers exactly this content."""

    def __call__(self, certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None: ...


class Publisher:
    """Owns the set of loaded releases of one server.

    Args:
        store: durable releases and aliases.
        engine: where adapters are loaded.
        router: the in-memory pointer.
        check_certificate: the gate's verification; there is no way around it here.
        certificate_of: certificate by adapter hash, or None.
        adapters_dir: content-named adapter directories.
        model_name: first part of release ids.
        clock: Unix seconds.
    """

    def __init__(
        self,
        *,
        store: ReleaseStore,
        engine: Engine,
        router: Router,
        check_certificate: CertificateCheck,
        certificate_of: Callable[[str], JsonObject | None],
        adapters_dir: Path,
        model_name: str,
        clock: Callable[[], float],
        probe_prompts: Sequence[Messages] = PROBE_PROMPTS,
    ) -> None:
        self._records = ReleaseRecords(store)
        self._engine = engine
        self._router = router
        self._check_certificate = check_certificate
        self._certificate_of = certificate_of
        self._adapters_dir = adapters_dir
        self._model_name = model_name
        self._clock = clock
        self._probe_prompts = probe_prompts
        self._one_at_a_time = asyncio.Lock()
        self._changes: set[asyncio.Task[Release]] = set()

    async def reconcile(self) -> Release:
        """Load what the store says is wanted, before any traffic: champion, previous and anchor.

        A store without releases gets release 0, the bare base model. A champion whose certificate is void is rolled
        back: to the anchor, to the previous champion, or to the base model, whichever still stands.

        Raises:
            CertificateError, AdapterError: the champion cannot be served as certified; the server must not start.
        """
        async with self._one_at_a_time:
            if not await self._records.releases():
                base = await self._new_release(adapter_sha256=None, certificate=None)
                await self._records.commit(base, {CHAMPION: base.id}, reason="first start", time=self._clock())
            champion = await self._standing_champion()
            self._router.point_champion_at(champion.id)
            aliases = await self._records.aliases()
            for alias in (PREVIOUS, ANCHOR):
                if alias in aliases and aliases[alias] != champion.id:
                    await self._add_if_standing(await self._records.release(aliases[alias]))
            return champion

    async def _standing_champion(self) -> Release:
        """Load the champion; one whose certificate is void makes way for what its error names, then for the base."""
        aliases = await self._records.aliases()
        champion = await self._records.release(aliases[CHAMPION])
        try:
            await self._add(champion)
        except VoidCertificateError as void:
            _log.warning("%s is not served any more: %s", champion.id, void)
            reason, fallback = f"rollback: {void}", void.fallback
        else:
            return champion
        base = (await self._records.releases())[0]
        for release_id in (aliases.get(fallback), aliases.get(ANCHOR), base.id):
            earlier = None if release_id is None else await self._records.release(release_id)
            if earlier is None or earlier.adapter_sha256 == champion.adapter_sha256:
                continue
            restored = await self._new_release(
                adapter_sha256=earlier.adapter_sha256, certificate=earlier.certificate, restores=earlier.id
            )
            if await self._add_if_standing(restored):
                targets = {CHAMPION: restored.id, PREVIOUS: champion.id}
                await self._records.commit(restored, targets, reason=reason, time=self._clock())
                await self._records.move_candidates(
                    restored, champion, reason=reason, old_state=CandidateState.ROLLED_BACK, time=self._clock()
                )
                return restored
        raise CertificateError(f"{reason}; nothing else that was released may be served either")

    async def _add_if_standing(self, release: Release) -> bool:
        """Load a release that an alias names, unless its certificate is void; whether it was loaded."""
        try:
            await self._add(release)
        except VoidCertificateError as void:
            _log.warning("%s is not loaded: %s", release.id, void)
            return False
        return True

    async def publish(self, candidate_id: str, *, against: str) -> Release:
        """Serve a certified candidate as a new release. Repeating it after a crash gives the same release.

        Args:
            candidate_id: which one.
            against: content hash of the adapter that it was judged against, or ``base`` for the bare base model.

        Raises:
            NotFoundError: no such candidate.
            ConflictError: the candidate is not certified, or the champion is another than it was judged against.
            CertificateError, AdapterError, EngineError: it cannot be served; the champion stays.
        """
        return await self._to_its_end(self._publish(candidate_id, against))

    async def promote(self, release_id: str) -> Release:
        """Serve an earlier release's content again as a new release, e.g. after a rollback."""
        return await self._to_its_end(
            self._restore(release_id, reason=f"promoted {release_id}", old_state=CandidateState.RETIRED)
        )

    async def rollback(self, to: str | None, reason: str) -> Release:
        """Serve the previous champion's content (or that of release ``to``) again as a new release.

        Raises:
            ConflictError: there is no previous champion.
        """
        return await self._to_its_end(
            self._restore(to, reason=f"rollback: {reason}", old_state=CandidateState.ROLLED_BACK)
        )

    async def status(self) -> JsonObject:
        """Champion, aliases and loaded releases."""
        in_use = self._router.in_use
        return {
            "champion": self._router.champion,
            "aliases": await self._records.aliases(),
            "loaded": [
                {"release": loaded.release_id, "adapter": loaded.adapter, "in_use": in_use(loaded.release_id)}
                for loaded in self._router.loaded()
            ],
            "replica": self._engine.replica,
            "base_sha256": self._engine.base_sha256,
        }

    async def _to_its_end(self, change: Coroutine[Any, Any, Release]) -> Release:
        """A caller that is cancelled stops waiting; the change ends, since its commit cannot be called back."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _publish(self, candidate_id: str, against: str) -> Release:
        async with self._one_at_a_time:
            candidate = await self._records.candidate(candidate_id)
            if candidate.state not in (CandidateState.CERTIFIED, CandidateState.CHAMPION):
                raise ConflictError(
                    f"candidate {candidate_id!r} is {candidate.state.value!r}; only a 'certified' one is published"
                )
            reason, content = f"published {candidate_id}", candidate.adapter_sha256
            aliases = await self._records.aliases()
            champion = await self._records.release(aliases[CHAMPION])
            if champion.adapter_sha256 == content:
                await self._finish(champion, aliases.get(PREVIOUS), reason=reason, old_state=CandidateState.RETIRED)
                return champion
            served = champion.adapter_sha256 or BARE_BASE
            if served != against:
                raise ConflictError(
                    f"candidate {candidate_id!r} was judged against {against[:12]!r}, but the champion {champion.id!r} "
                    f"is {served[:12]!r}; have it judged again with 'tidegate cycle run --candidate DIRECTORY'"
                )
            release = await self._records.first_of(content)
            if release is None:
                certificate = await asyncio.to_thread(self._certificate_of, content)
                release = await self._new_release(adapter_sha256=content, certificate=certificate)
            return await self._swap(release, champion, reason=reason, old_state=CandidateState.RETIRED)

    async def _restore(self, release_id: str | None, *, reason: str, old_state: CandidateState) -> Release:
        async with self._one_at_a_time:
            aliases = await self._records.aliases()
            target = release_id or aliases.get(PREVIOUS)
            if target is None:
                raise ConflictError("there is no previous champion to roll back to; name a release with 'to'")
            earlier = await self._records.release(target)
            champion = await self._records.release(aliases[CHAMPION])
            if champion.adapter_sha256 == earlier.adapter_sha256:
                await self._finish(champion, aliases.get(PREVIOUS), reason=reason, old_state=old_state)
                raise ConflictError(
                    f"release {earlier.id!r} holds the same content as the champion {champion.id!r}; nothing to do"
                )
            release = await self._new_release(
                adapter_sha256=earlier.adapter_sha256, certificate=earlier.certificate, restores=earlier.id
            )
            return await self._swap(release, champion, reason=reason, old_state=old_state)

    async def _swap(self, release: Release, old: Release, *, reason: str, old_state: CandidateState) -> Release:
        targets = {CHAMPION: release.id, PREVIOUS: old.id}
        if release.certificate is not None and release.certificate.get("kind") == "person" and not release.restores:
            targets[ANCHOR] = release.id
        adapter = await self._engine_name(release)
        try:
            routed = await self._load(release, adapter)
            await self._prove(release, adapter, old)
            await self._records.commit(release, targets, reason=reason, time=self._clock())
        except BaseException:
            await self._discard(adapter)
            raise
        self._router.add(routed, created_at=release.created_at)
        self._router.point_champion_at(release.id)
        await self._finish(release, old.id, reason=reason, old_state=old_state)
        return release

    async def _finish(self, release: Release, old_id: str | None, *, reason: str, old_state: CandidateState) -> None:
        """Everything after the commit; repeating it after a crash completes it."""
        if self._router.champion != release.id:
            await self._add(release)
            self._router.point_champion_at(release.id)
        old = None if old_id is None else await self._records.release(old_id)
        await self._records.move_candidates(release, old, reason=reason, old_state=old_state, time=self._clock())
        await self._unload_unneeded()

    async def _add(self, release: Release) -> None:
        """Load what an alias names already, and make it addressable."""
        routed = await self._load(release, await self._engine_name(release))
        self._router.add(routed, created_at=release.created_at)

    async def _load(self, release: Release, adapter: str | None) -> RoutedRelease:
        """Check a release's content and load it into the engine; nobody can address it yet."""
        if adapter is not None and release.adapter_sha256 is not None:
            await asyncio.to_thread(
                self._check_certificate,
                release.certificate,
                adapter_sha256=release.adapter_sha256,
                base_sha256=self._engine.base_sha256,
            )
            directory = self._adapters_dir / release.adapter_sha256
            await self._engine.load(AdapterRef(name=adapter, path=directory, sha256=release.adapter_sha256))
        elif release.base_sha256 != self._engine.base_sha256:
            raise CertificateError(
                f"release {release.id!r} is the base model {release.base_sha256[:12]}, the engine serves "
                f"{self._engine.base_sha256[:12]}; start with the model that this data directory was made with"
            )
        return RoutedRelease(release_id=release.id, adapter=adapter)

    async def _engine_name(self, release: Release) -> str | None:
        """The name in the engine is that of the content's first release; the bare base model has none."""
        if release.adapter_sha256 is None:
            return None
        return (await self._records.first_of(release.adapter_sha256) or release).id

    async def _prove(self, release: Release, adapter: str | None, old: Release) -> None:
        """The loaded bytes are the certified ones, and they answer differently from the old release."""
        against = await self._engine_name(old)
        probed, base = (adapter, against) if adapter is not None else (against, adapter)
        if probed is None:
            raise EngineError("both releases are the bare base model; a swap would change nothing")
        result = await self._engine.probe(probed, against=base, prompts=self._probe_prompts)
        expected = release.adapter_sha256 if adapter is not None else old.adapter_sha256
        problem = None
        if result.sha256 != expected:
            problem = f"the engine holds {result.sha256[:12]} under {probed!r}, the release is {str(expected)[:12]}"
        elif not result.max_logit_difference > 0.0:
            problem = f"loading it changed no logit against {old.id!r}: the engine answers with other weights"
        if problem is not None:
            raise EngineError(f"release {release.id!r} is not published: {problem}")

    async def _discard(self, adapter: str | None) -> None:
        """Unload what a failed attempt loaded, unless a served release has the same content."""
        if adapter is None or adapter in {served.adapter for served in self._router.loaded()}:
            return
        try:
            await self._engine.unload(adapter)
        except Exception:  # noqa: BLE001 - the caller has to hear what made the attempt fail
            _log.exception("%r was not published and could not be unloaded; the next swap tries again", adapter)

    async def _unload_unneeded(self) -> None:
        """Drop releases that no alias names and nobody uses; the engine forgets content with its last release."""
        wanted = set((await self._records.aliases()).values())
        for release in self._router.loaded():
            if release.release_id not in wanted:
                self._router.remove(release.release_id)
        kept = {release.adapter for release in self._router.loaded()}
        try:
            for adapter in await self._engine.list_adapters():
                if adapter.name not in kept:
                    await self._engine.unload(adapter.name)
        except EngineError:
            # The swap is committed and served; the next one unloads again.
            _log.exception("adapters that nobody needs could not be unloaded")

    async def _new_release(
        self, *, adapter_sha256: str | None, certificate: JsonObject | None, restores: str | None = None
    ) -> Release:
        return await self._records.new_release(
            model_name=self._model_name,
            adapter_sha256=adapter_sha256,
            base_sha256=self._engine.base_sha256,
            certificate=certificate,
            time=self._clock(),
            restores=restores,
        )
