"""Releases in and out of the engine: certified content in, proven, and out when nobody needs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from tidegate.artifacts import adapter_manifest
from tidegate.core.agreement import AgreementRecord, ScoredSequence, Tolerance, compare, record_in
from tidegate.core.errors import CertificateError, EngineError, VoidCertificateError
from tidegate.core.types import AdapterRef, JsonObject, Messages, Release
from tidegate.ports import Engine
from tidegate.release.records import ReleaseRecords
from tidegate.release.router import RoutedRelease, Router

_log = logging.getLogger(__name__)

PROBE_PROMPTS: tuple[Messages, ...] = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    ({"role": "user", "content": "Name a colour."},),
)


class CertificateCheck(Protocol):
    """Raises CertificateError unless ``certificate`` covers exactly this content."""

    def __call__(self, certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None: ...


class Loader:
    """Loads and unloads for one publisher, which holds its lock around every call.

    Args:
        records: durable releases and aliases.
        engine: where adapters are loaded.
        router: what is addressable.
        check_certificate: the gate's verification; there is no way around it here.
        adapters_dir: content-named adapter directories.
        probe_prompts: what the engine's logits are compared on.
        tolerance: how far the engine's log-probabilities may lie from the trainer's.
    """

    def __init__(
        self,
        *,
        records: ReleaseRecords,
        engine: Engine,
        router: Router,
        check_certificate: CertificateCheck,
        adapters_dir: Path,
        probe_prompts: Sequence[Messages],
        tolerance: Tolerance,
    ) -> None:
        self._records = records
        self._engine = engine
        self._router = router
        self._check_certificate = check_certificate
        self._adapters_dir = adapters_dir
        self._probe_prompts = probe_prompts
        self._tolerance = tolerance
        self._told_apart: set[frozenset[str | None]] = set()  # pairs of names in the engine
        self._agreement_shown: dict[str, str] = {}

    async def add(self, release: Release, *, named: bool = True) -> None:
        """Load what an alias names already, and make it addressable, unless ``named`` not by its id."""
        routed = await self.load(release, await self.engine_name(release))
        self._router.add(routed, created_at=release.created_at, named=named)

    async def add_if_standing(self, release: Release, *, named: bool = True) -> bool:
        """Load a release that an alias names, unless its certificate is void; whether it was loaded."""
        try:
            await self.add(release, named=named)
        except VoidCertificateError as void:
            _log.warning("%s is not loaded: %s", release.id, void)
            return False
        return True

    async def check(self, release: Release) -> None:
        """Whether a release may be served here.

        Raises:
            CertificateError: its certificate does not stand, or it is another base model than the engine's.
        """
        if release.adapter_sha256 is not None:
            await asyncio.to_thread(
                self._check_certificate,
                release.certificate,
                adapter_sha256=release.adapter_sha256,
                base_sha256=self._engine.base_sha256,
            )
        elif release.base_sha256 != self._engine.base_sha256:
            raise CertificateError(
                f"release {release.id!r} is the base model {release.base_sha256[:12]}, the engine serves "
                f"{self._engine.base_sha256[:12]}; start with the model that this data directory was made with"
            )

    async def load(self, release: Release, adapter: str | None) -> RoutedRelease:
        """Check a release's content and load it into the engine; nobody can address it yet."""
        await self.check(release)
        if adapter is not None and release.adapter_sha256 is not None:
            directory = self._adapters_dir / release.adapter_sha256
            await self._engine.load(AdapterRef(name=adapter, path=directory, sha256=release.adapter_sha256))
        return RoutedRelease(release_id=release.id, adapter=adapter)

    @asynccontextmanager
    async def bringing_in(self, release: Release, old: Release) -> AsyncGenerator[tuple[RoutedRelease, str]]:
        """Load and prove a release for the length of a block, which takes it into use; what fails unloads it again.

        Yields:
            Where it lies, and what was shown of it.
        """
        adapter = await self.engine_name(release)
        try:
            routed = await self.load(release, adapter)
            yield routed, await self.prove(release, adapter, old)
        except BaseException:
            await self.discard(adapter)
            raise

    async def engine_name(self, release: Release) -> str | None:
        """The name in the engine is that of the content's first release; the bare base model has none."""
        if release.adapter_sha256 is None:
            return None
        return (await self._records.first_of(release.adapter_sha256) or release).id

    async def prove(self, release: Release, adapter: str | None, old: Release) -> str:
        """The loaded bytes are the certified ones; they answer otherwise than the old release, and as the trainer did.

        What was proven here of weights that the engine has held ever since is not asked again, so that a rollback to
        what is loaded waits for nothing.

        Returns:
            What was shown, for the audit log.

        Raises:
            EngineError: one of them does not hold.
        """
        against = await self.engine_name(old)
        probed, base = (adapter, against) if adapter is not None else (against, adapter)
        if probed is None:
            raise EngineError("both releases are the bare base model; there is nothing to tell apart")
        held = {ref.name: ref.sha256 for ref in await self._engine.list_adapters()}
        here = all(
            name is None or held.get(name) == sha256
            for name, sha256 in ((adapter, release.adapter_sha256), (against, old.adapter_sha256))
        )
        pair = frozenset((adapter, against))
        if not (here and pair in self._told_apart):
            await self._probe(probed, against=base, release=release, old=old, adapter=adapter)
            self._told_apart.add(pair)
        if adapter is None:
            return "probed"
        if not (here and adapter in self._agreement_shown):
            self._agreement_shown[adapter] = await self._agreement(release, adapter)
        return f"probed, {self._agreement_shown[adapter]}"

    async def _probe(
        self, probed: str, *, against: str | None, release: Release, old: Release, adapter: str | None
    ) -> None:
        result = await self._engine.probe(probed, against=against, prompts=self._probe_prompts)
        expected = release.adapter_sha256 if adapter is not None else old.adapter_sha256
        problem = None
        if result.sha256 != expected:
            problem = f"the engine holds {result.sha256[:12]} under {probed!r}, the release is {str(expected)[:12]}"
        elif not result.max_logit_difference > 0.0:
            problem = f"loading it changed no logit against {old.id!r}: the engine answers with other weights"
        if problem is not None:
            raise EngineError(f"release {release.id!r} is not taken into use: {problem}")

    async def _agreement(self, release: Release, adapter: str) -> str:
        """Hold what the engine states for a few texts to what the trainer took down with the weights.

        Raises:
            EngineError: they are not the same distribution.
        """
        record = await asyncio.to_thread(self._record_of, release)
        if record is None:
            _log.warning("%s: its adapter holds no record of the trainer; the probe alone speaks for it", release.id)
            return "no record of the trainer to compare with"

        async def ask(sequence: ScoredSequence) -> Sequence[float]:
            return await self._engine.sequence_logprobs(adapter, sequence.token_ids, first=sequence.first)

        gap, objection = await compare(record, ask, tolerance=self._tolerance)
        if objection is not None:
            raise EngineError(
                f"release {release.id!r} is not taken into use: {objection}. Serve the base weights that it was "
                "trained on; 'tidegate engine check' says what differs, and engine.agreement_max_nats and "
                "agreement_mean_nats what is accepted"
            )
        if gap is None:
            _log.warning("%s: no text of the trainer's record fits into the engine's context", release.id)
            return "no text of the trainer's record fits into the context"
        shown = f"within {gap.max:.2g} nats of the trainer ({gap.mean:.2g} in the mean of {gap.tokens} tokens)"
        _log.info("%s: %s", release.id, shown)
        return shown

    def _record_of(self, release: Release) -> AgreementRecord | None:
        directory = self._adapters_dir / str(release.adapter_sha256)
        return record_in(adapter_manifest(directory), adapter=release.id) if directory.is_dir() else None

    async def _unload(self, adapter: str) -> None:
        self._told_apart = {pair for pair in self._told_apart if adapter not in pair}
        self._agreement_shown.pop(adapter, None)
        await self._engine.unload(adapter)

    async def discard(self, adapter: str | None) -> None:
        """Unload what a failed attempt loaded, unless a release that is in use has the same content."""
        if adapter is None or adapter in self._router.adapters():
            return
        try:
            await self._unload(adapter)
        except Exception:  # noqa: BLE001 - the caller has to hear what made the attempt fail
            _log.exception("%r was not published and could not be unloaded; the next swap tries again", adapter)

    async def unload_unneeded(self) -> None:
        """Drop releases that no alias names and nobody uses; the engine forgets content with its last release."""
        named = set((await self._records.aliases()).values())
        wanted = [one for one in await self._records.releases() if one.id in named]
        kept_ids = {one.id for one in wanted if not await self._records.is_taken_back(one)}
        for release in self._router.loaded():
            if release.release_id not in kept_ids:
                self._router.remove(release.release_id)
        kept = self._router.adapters()
        try:
            for adapter in await self._engine.list_adapters():
                if adapter.name not in kept:
                    await self._unload(adapter.name)
        except EngineError:
            # The swap is committed and served; the next one unloads again.
            _log.exception("adapters that nobody needs could not be unloaded")
