"""From certified weights to served weights, and back.

One path for publishing, promoting and rolling back: verify the certificate, load under an immutable name,
probe that the loaded weights are the certified ones and change the logits, commit the alias, move the pointer.
Whatever fails before the commit leaves the champion as it was. Never trains, never decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tidegate.core.errors import CertificateError, ConflictError, EngineError, NotFoundError
from tidegate.core.types import AdapterRef, Candidate, CandidateState, JsonObject, Messages, Release
from tidegate.ports import Engine, ReleaseStore
from tidegate.release.router import ANCHOR, CHAMPION, PREVIOUS, RoutedRelease, Router

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
        self._store = store
        self._engine = engine
        self._router = router
        self._check_certificate = check_certificate
        self._certificate_of = certificate_of
        self._adapters_dir = adapters_dir
        self._model_name = model_name
        self._clock = clock
        self._probe_prompts = probe_prompts
        self._one_at_a_time = asyncio.Lock()

    async def reconcile(self) -> Release:
        """Load what the store says is wanted, before any traffic: champion, previous and anchor.

        A store without releases gets release 0, the bare base model.

        Raises:
            CertificateError, AdapterError: the champion cannot be served as certified; the server must not start.
        """
        async with self._one_at_a_time:
            if not self._store.list_releases():
                base = self._new_release(adapter_sha256=None, certificate=None)
                self._store.add_release(base)
                self._store.move_aliases({CHAMPION: base.id}, reason="first start", time=self._clock())
            aliases = self._store.aliases()
            champion = self._release(aliases[CHAMPION])
            await self._load(champion)
            self._router.point_champion_at(champion.id)
            for alias in (PREVIOUS, ANCHOR):
                if alias in aliases and aliases[alias] != champion.id:
                    await self._load(self._release(aliases[alias]))
            return champion

    async def publish(self, candidate_id: str) -> Release:
        """Serve a certified candidate as a new release. Repeating it after a crash gives the same release.

        Raises:
            NotFoundError: no such candidate.
            ConflictError: the candidate is not certified.
            CertificateError, AdapterError, EngineError: it cannot be served; the champion stays.
        """
        async with self._one_at_a_time:
            candidate = self._candidate(candidate_id)
            if candidate.state not in (CandidateState.CERTIFIED, CandidateState.CHAMPION):
                raise ConflictError(
                    f"candidate {candidate_id!r} is {candidate.state.value!r}; only a 'certified' one is published"
                )
            release = self._release_of(candidate.adapter_sha256)
            if release is None:
                certificate = self._certificate_of(candidate.adapter_sha256)
                release = self._new_release(adapter_sha256=candidate.adapter_sha256, certificate=certificate)
            return await self._swap(release, reason=f"published {candidate_id}", old_state=CandidateState.RETIRED)

    async def promote(self, release_id: str) -> Release:
        """Serve an earlier release's content again as a new release, e.g. after a rollback."""
        async with self._one_at_a_time:
            return await self._restore(
                self._release(release_id), reason=f"promoted {release_id}", old_state=CandidateState.RETIRED
            )

    async def rollback(self, to: str | None, reason: str) -> Release:
        """Serve the previous champion's content (or that of release ``to``) again as a new release.

        Raises:
            ConflictError: there is no previous champion.
        """
        async with self._one_at_a_time:
            target = to or self._store.aliases().get(PREVIOUS)
            if target is None:
                raise ConflictError("there is no previous champion to roll back to; name a release with 'to'")
            return await self._restore(
                self._release(target), reason=f"rollback: {reason}", old_state=CandidateState.ROLLED_BACK
            )

    async def status(self) -> JsonObject:
        """Champion, aliases and loaded releases."""
        return {
            "champion": self._router.champion,
            "aliases": self._store.aliases(),
            "loaded": [
                {
                    "release": release.release_id,
                    "adapter": release.adapter,
                    "in_use": self._router.in_use(release.release_id),
                }
                for release in self._router.loaded()
            ],
            "replica": self._engine.replica,
            "base_sha256": self._engine.base_sha256,
        }

    async def _restore(self, earlier: Release, *, reason: str, old_state: CandidateState) -> Release:
        champion = self._release(self._store.aliases()[CHAMPION])
        if champion.adapter_sha256 == earlier.adapter_sha256:
            raise ConflictError(
                f"release {earlier.id!r} holds the same content as the champion {champion.id!r}; nothing to do"
            )
        release = self._new_release(
            adapter_sha256=earlier.adapter_sha256, certificate=earlier.certificate, restores=earlier.id
        )
        return await self._swap(release, reason=reason, old_state=old_state)

    async def _swap(self, release: Release, *, reason: str, old_state: CandidateState) -> Release:
        aliases = self._store.aliases()
        if aliases[CHAMPION] == release.id:
            return release
        old = self._release(aliases[CHAMPION])
        await self._load(release)
        try:
            await self._prove(release, old)
        except EngineError:
            self._router.remove(release.id)
            await self._unload_unneeded()
            raise
        now = self._clock()
        self._store.add_release(release)
        targets = {CHAMPION: release.id, PREVIOUS: old.id}
        if release.certificate is not None and release.certificate.get("kind") == "person" and not release.restores:
            targets[ANCHOR] = release.id
        self._store.move_aliases(targets, reason=reason, time=now)
        self._router.point_champion_at(release.id)
        self._move_candidates(release, old, reason=reason, old_state=old_state, time=now)
        await self._unload_unneeded()
        return release

    async def _load(self, release: Release) -> None:
        """Check and load a release's content; the name in the engine is that of the content's first release."""
        adapter: str | None = None
        if release.adapter_sha256 is not None:
            self._check_certificate(
                release.certificate, adapter_sha256=release.adapter_sha256, base_sha256=self._engine.base_sha256
            )
            first = self._release_of(release.adapter_sha256) or release
            adapter = first.id
            directory = self._adapters_dir / release.adapter_sha256
            await self._engine.load(AdapterRef(name=adapter, path=directory, sha256=release.adapter_sha256))
        elif release.base_sha256 != self._engine.base_sha256:
            raise CertificateError(
                f"release {release.id!r} is the base model {release.base_sha256[:12]}, the engine serves "
                f"{self._engine.base_sha256[:12]}; start with the model that this data directory was made with"
            )
        self._router.add(RoutedRelease(release_id=release.id, adapter=adapter), created_at=release.created_at)

    async def _prove(self, release: Release, old: Release) -> None:
        """The loaded bytes are the certified ones, and they answer differently from the old release."""
        by_id = {loaded.release_id: loaded for loaded in self._router.loaded()}
        adapter, against = by_id[release.id].adapter, by_id[old.id].adapter
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

    def _move_candidates(
        self, release: Release, old: Release, *, reason: str, old_state: CandidateState, time: float
    ) -> None:
        for candidate in self._store.list_candidates():
            if candidate.adapter_sha256 == old.adapter_sha256 and candidate.state is CandidateState.CHAMPION:
                self._store.set_candidate_state(candidate.id, old_state, reasons=(reason,), time=time)
            elif candidate.adapter_sha256 == release.adapter_sha256:
                self._store.set_candidate_state(candidate.id, CandidateState.CHAMPION, reasons=(reason,), time=time)

    async def _unload_unneeded(self) -> None:
        """Drop releases that no alias names and nobody uses; the engine forgets content with its last release."""
        wanted = set(self._store.aliases().values())
        for release in self._router.loaded():
            if release.release_id not in wanted:
                self._router.remove(release.release_id)
        kept = {release.adapter for release in self._router.loaded()}
        for adapter in await self._engine.list_adapters():
            if adapter.name not in kept:
                await self._engine.unload(adapter.name)

    def _new_release(
        self, *, adapter_sha256: str | None, certificate: JsonObject | None, restores: str | None = None
    ) -> Release:
        number = max((release.number for release in self._store.list_releases()), default=-1) + 1
        suffix = adapter_sha256[:8] if adapter_sha256 else "base"
        return Release(
            id=f"{self._model_name}-r{number}-{suffix}",
            number=number,
            adapter_sha256=adapter_sha256,
            base_sha256=self._engine.base_sha256,
            certificate=certificate,
            created_at=self._clock(),
            restores=restores,
        )

    def _release_of(self, adapter_sha256: str) -> Release | None:
        """The first release of a content."""
        matches = (r for r in self._store.list_releases() if r.adapter_sha256 == adapter_sha256)
        return next(matches, None)

    def _release(self, release_id: str) -> Release:
        releases = {release.id: release for release in self._store.list_releases()}
        if release_id not in releases:
            raise NotFoundError(f"release {release_id!r} does not exist; 'tidegate releases list' shows all")
        return releases[release_id]

    def _candidate(self, candidate_id: str) -> Candidate:
        candidates = {candidate.id: candidate for candidate in self._store.list_candidates()}
        if candidate_id not in candidates:
            raise NotFoundError(f"candidate {candidate_id!r} does not exist; known: {sorted(candidates)}")
        return candidates[candidate_id]
