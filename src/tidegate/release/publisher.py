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
from typing import Any

from tidegate.core.agreement import DEFAULT_TOLERANCE, Tolerance
from tidegate.core.errors import CertificateError, ConflictError, VoidCertificateError
from tidegate.core.types import CandidateState, JsonObject, Messages, Release
from tidegate.ports import AuditLog, Engine, ReleaseStore
from tidegate.release.loading import PROBE_PROMPTS, CertificateCheck, Loader
from tidegate.release.preconditions import as_champion, require_judged_against, require_state
from tidegate.release.records import ReleaseRecords
from tidegate.release.router import ANCHOR, CANARY, CHAMPION, PREVIOUS, Division, Router
from tidegate.release.shadowing import Shadowing

_log = logging.getLogger(__name__)


class Publisher:
    """Owns the set of loaded releases of one server.

    Args:
        store: durable releases and aliases.
        audit: the log that ``store`` writes its changes to.
        engine: where adapters are loaded.
        router: the in-memory pointer.
        check_certificate: the gate's verification; there is no way around it here.
        certificate_of: certificate by adapter hash, or None.
        adapters_dir: content-named adapter directories.
        model_name: first part of release ids.
        clock: Unix seconds.
        canary_required: whether what the gate certified reaches all users only through a canary now.
        tolerance: how far the engine's log-probabilities may lie from those that the trainer took down.
    """

    def __init__(
        self,
        *,
        store: ReleaseStore,
        audit: AuditLog,
        engine: Engine,
        router: Router,
        check_certificate: CertificateCheck,
        certificate_of: Callable[[str], JsonObject | None],
        adapters_dir: Path,
        model_name: str,
        clock: Callable[[], float],
        canary_required: Callable[[], bool] = lambda: False,
        probe_prompts: Sequence[Messages] = PROBE_PROMPTS,
        tolerance: Tolerance = DEFAULT_TOLERANCE,
    ) -> None:
        self._records = ReleaseRecords(store, audit)
        self._engine = engine
        self._router = router
        self._loader = Loader(
            records=self._records,
            engine=engine,
            router=router,
            check_certificate=check_certificate,
            adapters_dir=adapters_dir,
            probe_prompts=probe_prompts,
            tolerance=tolerance,
        )
        self._certificate_of = certificate_of
        self._model_name = model_name
        self._clock = clock
        self._canary_required = canary_required
        self._one_at_a_time = asyncio.Lock()
        self._changes: set[asyncio.Task[Release]] = set()
        self.shadowing = Shadowing(
            self._records, audit, loader=self._loader, router=router, lock=self._one_at_a_time, clock=clock
        )

    async def reconcile(self) -> Release:
        """Load what the store says is wanted, before any traffic: champion, previous, anchor and canary.

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
            for alias in (PREVIOUS, ANCHOR, CANARY):
                if alias in aliases and aliases[alias] not in {loaded.release_id for loaded in self._router.loaded()}:
                    wanted = await self._records.release(aliases[alias])
                    if not await self._records.is_taken_back(wanted):
                        await self._loader.add_if_standing(wanted, named=alias != CANARY)
            return champion

    async def _standing_champion(self) -> Release:
        """Load the champion; one whose certificate is void makes way for what its error names, then for the base."""
        aliases = await self._records.aliases()
        champion = await self._records.release(aliases[CHAMPION])
        try:
            await self._loader.add(champion)
        except VoidCertificateError as void:
            _log.warning("%s is not served any more: %s", champion.id, void)
            reason, earlier = f"rollback: {void}", await self._records.instead_of(champion, void.fallback)
        else:
            return champion
        for one in earlier:
            restored = await self._again(one)
            if await self._loader.add_if_standing(restored):
                targets = as_champion(restored, champion, aliases, CandidateState.ROLLED_BACK)
                await self._records.commit(restored, targets, reason=reason, time=self._clock())
                await self._records.move_candidates(
                    restored, reason=reason, old_state=CandidateState.ROLLED_BACK, time=self._clock()
                )
                return restored
        raise CertificateError(f"{reason}; nothing else that was released may be served either")

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

    async def start_canary(self, candidate_id: str, *, against: str) -> Release:
        """Load a certified candidate beside the champion; it gets traffic from :meth:`divide`.

        Repeating it after a crash gives the same release. Arguments and errors as :meth:`publish`.

        Raises:
            ConflictError: another canary runs.
        """
        return await self._to_its_end(self._start_canary(candidate_id, against))

    async def end_canary(self, state: CandidateState, *, reason: str) -> Release:
        """End the canary: ``champion`` promotes it without loading anything, another state takes its traffic away.

        Its traffic goes first, in memory: a store that is away delays the record of a rollback, not the rollback.
        Repeating it after a crash completes it.

        Args:
            state: what becomes of the candidate: ``champion``, ``rolled_back`` or ``rejected``.
            reason: goes into the audit log.

        Raises:
            ConflictError: no canary was ever started.
            CertificateError: the one to promote may not be served any more; nothing changed.
        """
        if state is not CandidateState.CHAMPION:
            self._router.divide(None)
        return await self._to_its_end(self._end_canary(state, reason))

    async def divide(self, division: Division | None) -> None:
        """Send a share of the users to a release that an alias names; None sends everybody to the champion.

        Raises:
            NotFoundError: the release is not loaded.
        """
        async with self._one_at_a_time:
            self._router.divide(division)

    async def replace_void(self, void: VoidCertificateError) -> Release:
        """Serve what still stands in the place of a void champion; CertificateError when nothing does."""
        return await self._to_its_end(self._replace_void(void))

    async def forget_previous(self, reason: str) -> Release:
        """Serve the previous champion to nobody any more; there is none then, and the champion stays.

        Args:
            reason: goes into the audit log.
        """
        return await self._to_its_end(self._forget_previous(reason))

    async def _forget_previous(self, reason: str) -> Release:
        async with self._one_at_a_time:
            aliases = await self._records.aliases()
            division = self._router.division
            if division is not None and division.release_id == aliases.get(PREVIOUS):
                self._router.divide(None)
            await self._records.move_aliases({PREVIOUS: aliases[CHAMPION]}, reason=reason, time=self._clock())
            await self._loader.unload_unneeded()
            return await self._records.release(aliases[CHAMPION])

    async def _replace_void(self, void: VoidCertificateError) -> Release:
        async with self._one_at_a_time:
            champion = await self._records.release((await self._records.aliases())[CHAMPION])
            reason = f"rollback: {void}"
            for earlier in await self._records.instead_of(champion, void.fallback):
                release, old_state = await self._again(earlier), CandidateState.ROLLED_BACK
                try:
                    return await self._swap(release, champion, reason=reason, old_state=old_state)
                except VoidCertificateError:
                    continue
            raise CertificateError(f"{reason}; nothing else that was released may be served either")

    async def served(self) -> dict[str, Release]:
        """The releases behind the aliases that new episodes can begin on, by alias, canary only while there is one."""
        aliases = await self._records.aliases()
        if aliases.get(CANARY) == aliases[CHAMPION]:
            del aliases[CANARY]
        return {
            alias: await self._records.release(aliases[alias])
            for alias in (CHAMPION, PREVIOUS, CANARY)
            if alias in aliases
        }

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
            require_state(candidate, CandidateState.CERTIFIED, CandidateState.CHAMPION)
            reason, content = f"published {candidate_id}", candidate.adapter_sha256
            aliases = await self._records.aliases()
            champion = await self._records.release(aliases[CHAMPION])
            if champion.adapter_sha256 == content:
                await self._finish(champion, reason=reason, old_state=CandidateState.RETIRED)
                return champion
            require_judged_against(candidate, champion, against)
            release = await self._release_of(content)
            by_the_gate = (release.certificate or {}).get("kind") == "gate"
            if by_the_gate and await asyncio.to_thread(self._canary_required):
                raise ConflictError(
                    f"candidate {candidate_id!r} was certified by the gate, and the policy in force asks for a canary "
                    "before all users are served by it; with that policy 'tidegate cycle run' starts one"
                )
            return await self._swap(release, champion, reason=reason, old_state=CandidateState.RETIRED)

    async def _start_canary(self, candidate_id: str, against: str) -> Release:
        async with self._one_at_a_time:
            candidate = await self._records.candidate(candidate_id)
            require_state(candidate, CandidateState.CERTIFIED, CandidateState.CANARY)
            aliases = await self._records.aliases()
            champion = await self._records.release(aliases[CHAMPION])
            release = await self._release_of(candidate.adapter_sha256)
            running = aliases.get(CANARY, champion.id)
            if running not in (champion.id, release.id):
                raise ConflictError(
                    f"candidate {candidate_id!r} cannot be a canary while {running!r} is one; wait for that one's end"
                )
            if running != release.id:
                require_judged_against(candidate, champion, against)
                await self._commit_loaded(release, champion, {CANARY: release.id}, reason=f"canary {candidate_id}")
            await self._records.move_candidate(candidate_id, CandidateState.CANARY, time=self._clock())
            return release

    async def _end_canary(self, state: CandidateState, reason: str) -> Release:
        async with self._one_at_a_time:
            aliases = await self._records.aliases()
            if CANARY not in aliases:
                raise ConflictError("no canary was ever started here; there is none to end")
            canary, champion = aliases[CANARY], aliases[CHAMPION]
            if state is CandidateState.CHAMPION:
                release = await self._records.release(canary)
                if canary != champion:
                    await self._loader.check(release)
                targets = {CHAMPION: canary, PREVIOUS: champion} if canary != champion else {}
                await self._records.move_aliases(targets, reason=reason, time=self._clock())
                self._router.point_champion_at(release.id)
                self._router.divide(None)
                await self._finish(release, reason=reason, old_state=CandidateState.RETIRED)
                return release
            await self._records.move_aliases({CANARY: champion}, reason=reason, time=self._clock())
            await self._records.end_canaries(state, reason=reason, time=self._clock())
            await self._loader.unload_unneeded()
            return await self._records.release(champion)

    async def _restore(self, release_id: str | None, *, reason: str, old_state: CandidateState) -> Release:
        async with self._one_at_a_time:
            aliases = await self._records.aliases()
            target = release_id or aliases.get(PREVIOUS)
            if target is None or (release_id is None and target == aliases[CHAMPION]):
                await self._finish(await self._records.release(aliases[CHAMPION]), reason=reason, old_state=old_state)
                raise ConflictError(
                    "there is no previous champion to roll back to; name a release ('--to', 'to' over HTTP)"
                )
            earlier = await self._records.release(target)
            await self._records.require_restorable(earlier)
            champion = await self._records.release(aliases[CHAMPION])
            if champion.adapter_sha256 == earlier.adapter_sha256:
                await self._finish(champion, reason=reason, old_state=old_state)
                raise ConflictError(
                    f"release {earlier.id!r} holds the same content as the champion {champion.id!r}; nothing to do"
                )
            return await self._swap(await self._again(earlier), champion, reason=reason, old_state=old_state)

    async def _swap(self, release: Release, old: Release, *, reason: str, old_state: CandidateState) -> Release:
        targets = as_champion(release, old, await self._records.aliases(), old_state)
        if release.certificate is not None and release.certificate.get("kind") == "person" and not release.restores:
            targets[ANCHOR] = release.id
        await self._commit_loaded(release, old, targets, reason=reason)
        self._router.point_champion_at(release.id)
        self._router.divide(None)  # whoever compared the old champion with another release compares it no longer
        if old_state is CandidateState.ROLLED_BACK:
            self._router.remove(old.id)  # at once, whatever the store says to the rest
        await self._finish(release, reason=reason, old_state=old_state)
        return release

    async def _commit_loaded(self, release: Release, old: Release, targets: dict[str, str], *, reason: str) -> None:
        """Load and prove a release, commit it with its aliases, and only then give it an address."""
        try:
            async with self._loader.bringing_in(release, old) as (routed, shown):
                await self._records.commit(release, targets, reason=f"{reason} ({shown})", time=self._clock())
        except Exception as error:
            await self._records.note_refused(release, old, reason=reason, error=error, time=self._clock())
            raise
        self._router.add(routed, created_at=release.created_at, named=CHAMPION in targets)

    async def _finish(self, release: Release, *, reason: str, old_state: CandidateState) -> None:
        """Everything after the commit; repeating it after a crash completes it."""
        if self._router.champion != release.id:
            await self._loader.add(release)
            self._router.point_champion_at(release.id)
        await self._records.move_candidates(release, reason=reason, old_state=old_state, time=self._clock())
        await self.shadowing.end_beside(release)
        await self._loader.unload_unneeded()

    async def _release_of(self, content: str) -> Release:
        """The first release of a certified content, not stored yet if there was none."""
        release = await self._records.first_of(content)
        if release is not None:
            return release
        certificate = await asyncio.to_thread(self._certificate_of, content)
        return await self._new_release(adapter_sha256=content, certificate=certificate)

    async def _again(self, earlier: Release) -> Release:
        """The content of an earlier release under the next number."""
        return await self._new_release(
            adapter_sha256=earlier.adapter_sha256, certificate=earlier.certificate, restores=earlier.id
        )

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
