"""The release store as the publisher asks it: off the event loop, by what is looked for.

A store call may wait seconds for a lock and milliseconds for a disk; the loop that calls here answers requests
meanwhile. Whoever needs several calls to belong together holds the publisher's lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tidegate.core.errors import ConflictError, NotFoundError, TidegateError
from tidegate.core.types import Candidate, CandidateState, JsonObject, Release
from tidegate.ports import AuditLog, ReleaseStore
from tidegate.release.router import ANCHOR, CHAMPION

_log = logging.getLogger(__name__)

_MESSAGE_CHARACTERS = 1000
_NEVER_AGAIN = (
    CandidateState.PROPOSED,
    CandidateState.SCREENED,
    CandidateState.CANARY,
    CandidateState.REJECTED,
    CandidateState.QUARANTINED,
)
"""States of a candidate whose content is not restored, whatever it was before."""


def release_behind(store: ReleaseStore, alias: str) -> Release:
    """The release that an alias names; without an anchor that is release 0.

    Raises:
        ConflictError: nothing was ever served.
    """
    releases = store.list_releases()
    if not releases:
        raise ConflictError("nothing was ever served from this data directory; run 'tidegate serve' first")
    wanted = store.aliases().get(alias)
    return next((release for release in releases if release.id == wanted), releases[0])


class ReleaseRecords:
    """Each method raises StoreError when the store is away.

    Args:
        store: durable releases and aliases.
        audit: the log that ``store`` writes its changes to.
    """

    def __init__(self, store: ReleaseStore, audit: AuditLog) -> None:
        self._store = store
        self._audit = audit
        self._champions: set[str] = set()  # of the log up to ``_read_to``
        self._read_to = 0

    async def aliases(self) -> dict[str, str]:
        """Alias to release id."""
        return await asyncio.to_thread(self._store.aliases)

    async def releases(self) -> list[Release]:
        """All releases by number."""
        return await asyncio.to_thread(self._store.list_releases)

    async def release(self, release_id: str) -> Release:
        """One release.

        Raises:
            NotFoundError: there is none of this id.
        """
        releases = {release.id: release for release in await self.releases()}
        if release_id not in releases:
            raise NotFoundError(f"release {release_id!r} does not exist; 'tidegate releases list' shows all")
        return releases[release_id]

    async def first_of(self, adapter_sha256: str) -> Release | None:
        """The first release of a content, which gives the content its name in the engine."""
        matches = (release for release in await self.releases() if release.adapter_sha256 == adapter_sha256)
        return next(matches, None)

    async def candidate(self, candidate_id: str) -> Candidate:
        """One candidate.

        Raises:
            NotFoundError: there is none of this id.
        """
        candidates = {candidate.id: candidate for candidate in await asyncio.to_thread(self._store.list_candidates)}
        if candidate_id not in candidates:
            raise NotFoundError(f"candidate {candidate_id!r} does not exist; known: {sorted(candidates)}")
        return candidates[candidate_id]

    async def candidates_of(self, release: Release) -> list[Candidate]:
        """Candidates of a release's content."""
        candidates = await asyncio.to_thread(self._store.list_candidates)
        return [candidate for candidate in candidates if candidate.adapter_sha256 == release.adapter_sha256]

    async def instead_of(self, champion: Release, fallback: str) -> list[Release]:
        """Releases of other content that could take a void champion's place, best first.

        The one that the alias ``fallback`` names, the anchor, and release 0, as far as they may be restored. What was
        rolled back is served again only when a person asks for it.
        """
        aliases, releases = await self.aliases(), await self.releases()
        by_id = {release.id: release for release in releases}
        wanted = (aliases.get(fallback), aliases.get(ANCHOR), releases[0].id)
        found = (by_id[release_id] for release_id in wanted if release_id is not None)
        return [
            release
            for release in found
            if release.adapter_sha256 != champion.adapter_sha256
            and await self.why_not_restore(release) is None
            and not await self.is_taken_back(release)
        ]

    async def is_taken_back(self, release: Release) -> bool:
        """Whether the release's content was rolled back and nobody served it again since."""
        return any(one.state is CandidateState.ROLLED_BACK for one in await self.candidates_of(release))

    async def why_not_restore(self, release: Release) -> str | None:
        """Why an earlier release is not served again, in words; None when it may be.

        Only content that served all users before may: a canary that was taken back, or that never began, has a
        certificate too, but the comparison with the champion never ended in its favour.
        """
        for candidate in await self.candidates_of(release):
            if candidate.state in _NEVER_AGAIN:
                return f"it holds candidate {candidate.id!r}, which is {candidate.state.value!r}"
        champions = await asyncio.to_thread(self._champions_so_far)
        content = {one.id: one.adapter_sha256 for one in await self.releases()}
        if release.adapter_sha256 in {content[one] for one in champions if one in content}:
            return None
        return "its content never was the champion"

    async def require_restorable(self, release: Release) -> None:
        """Refuse what :meth:`why_not_restore` has a reason against.

        Raises:
            ConflictError: it has one.
        """
        reason = await self.why_not_restore(release)
        if reason is not None:
            raise ConflictError(
                f"release {release.id!r} is not served again: {reason}; name a release that was a champion, "
                "'tidegate releases list' shows all"
            )

    def _champions_so_far(self) -> set[str]:
        """Ids of releases that the champion's alias ever pointed at."""
        for record in self._audit.read(after_seq=self._read_to):
            if record.kind == "aliases_moved" and CHAMPION in record.body["to"]:
                self._champions.add(record.body["to"][CHAMPION])
            self._read_to = record.seq
        return self._champions

    async def new_release(
        self,
        *,
        model_name: str,
        adapter_sha256: str | None,
        base_sha256: str,
        certificate: JsonObject | None,
        time: float,
        restores: str | None = None,
    ) -> Release:
        """A release under the next number, not stored yet."""
        number = max((release.number for release in await self.releases()), default=-1) + 1
        suffix = adapter_sha256[:8] if adapter_sha256 else "base"
        return Release(
            id=f"{model_name}-r{number}-{suffix}",
            number=number,
            adapter_sha256=adapter_sha256,
            base_sha256=base_sha256,
            certificate=certificate,
            created_at=time,
            restores=restores,
        )

    async def commit(self, release: Release, targets: Mapping[str, str], *, reason: str, time: float) -> None:
        """Store a release and point aliases at it; a crash between the two leaves a release that nothing names."""

        def write() -> None:
            self._store.add_release(release)
            self._store.move_aliases(targets, reason=reason, time=time)

        await asyncio.to_thread(write)

    async def note_refused(self, release: Release, old: Release, *, reason: str, error: Exception, time: float) -> None:
        """Write down that a release was not taken into use and why; the caller hears ``error`` whatever comes of it."""
        body = {
            "release": release.id,
            "adapter_sha256": release.adapter_sha256,
            "instead_of": old.id,
            "reason": reason,
            "code": error.code if isinstance(error, TidegateError) else type(error).__name__,
            "message": str(error)[:_MESSAGE_CHARACTERS],
        }
        try:
            await asyncio.to_thread(lambda: self._audit.append("swap_refused", body, time=time))
        except TidegateError:
            _log.exception("the log does not say that %r was refused: %s", release.id, error)

    async def move_candidates(self, release: Release, *, reason: str, old_state: CandidateState, time: float) -> None:
        """The content of ``release`` is the champion, and what was it goes; repeating it changes nothing."""

        def write() -> None:
            for candidate in self._store.list_candidates():
                if candidate.adapter_sha256 == release.adapter_sha256:
                    self._store.set_candidate_state(candidate.id, CandidateState.CHAMPION, reasons=(reason,), time=time)
                elif candidate.state is CandidateState.CHAMPION:
                    self._store.set_candidate_state(candidate.id, old_state, reasons=(reason,), time=time)

        await asyncio.to_thread(write)

    async def move_aliases(self, targets: Mapping[str, str], *, reason: str, time: float) -> None:
        """Point aliases at stored releases; where they point there already nothing changes."""
        await asyncio.to_thread(self._store.move_aliases, targets, reason=reason, time=time)

    async def move_candidate(self, candidate_id: str, state: CandidateState, *, time: float) -> None:
        """Move one candidate; the state that it has already is no move."""
        await asyncio.to_thread(
            self._store.set_candidate_state, candidate_id, state, reasons=(f"it is the {state.value}",), time=time
        )

    async def end_canaries(self, state: CandidateState, *, reason: str, time: float) -> None:
        """Move every candidate that is a canary, which is one at most; repeating it changes nothing."""

        def write() -> None:
            for candidate in self._store.list_candidates():
                if candidate.state is CandidateState.CANARY:
                    self._store.set_candidate_state(candidate.id, state, reasons=(reason,), time=time)

        await asyncio.to_thread(write)
