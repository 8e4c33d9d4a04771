"""A publisher over real stores in memory and an engine that only knows names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.core.errors import (
    CertificateError,
    EngineError,
    StoreError,
    TidegateError,
)
from tidegate.core.types import (
    AdapterRef,
    Candidate,
    CandidateState,
    GenerationEvent,
    GenerationRequest,
    Messages,
    Release,
)
from tidegate.ports import EngineHealth, ProbeResult
from tidegate.release import BARE_BASE, CHAMPION, Publisher, Router
from tidegate.stores.memory import MemoryAuditLog, MemoryReleaseStore

BASE = "b" * 64


class ShelfEngine:
    """Loads names and nothing else; ``lies`` decides what a probe finds."""

    replica = "shelf"
    base_sha256 = BASE

    def __init__(self) -> None:
        self.shelf: dict[str, AdapterRef] = {}
        self.lies: str | None = None
        self.deaf_to: str | None = None
        self.loads = 0
        self.probing = asyncio.Event()
        self.may_probe = asyncio.Event()
        self.may_probe.set()
        self.probe_failure: TidegateError | None = None

    async def load(self, adapter: AdapterRef) -> None:
        self.loads += 1
        if adapter.name != self.deaf_to:
            self.shelf[adapter.name] = adapter

    async def unload(self, name: str) -> None:
        self.shelf.pop(name, None)

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        return tuple(self.shelf.values())

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        raise EngineError(f"request {request.request_id!r}: this engine answers nothing")

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        assert prompts
        self.probing.set()
        await self.may_probe.wait()
        if self.probe_failure is not None:
            raise self.probe_failure
        sha256 = "f" * 64 if self.lies == "other weights" else self.shelf[name].sha256
        same = self.lies == "base answers" or (against is not None and self.shelf[against].sha256 == sha256)
        return ProbeResult(name=name, sha256=sha256, max_logit_difference=0.0 if same else 1.5)

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        raise EngineError(f"sequence of {len(token_ids)} tokens: this engine answers nothing")

    async def health(self) -> EngineHealth:
        return EngineHealth(ready=True, detail="", queued=0, running=0)


class TroubledStore(MemoryReleaseStore):
    """Fails or waits in a named method; ``entered`` says that a call has got there."""

    def __init__(self) -> None:
        super().__init__(MemoryAuditLog())
        self.fails_in: str | None = None
        self.waits_in: str | None = None
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def move_aliases(self, targets: Mapping[str, str], *, reason: str, time: float) -> None:
        self._trouble("move_aliases")
        super().move_aliases(targets, reason=reason, time=time)

    def set_candidate_state(
        self, candidate_id: str, state: CandidateState, *, reasons: Sequence[str], time: float
    ) -> Candidate:
        self._trouble("set_candidate_state")
        return super().set_candidate_state(candidate_id, state, reasons=reasons, time=time)

    def _trouble(self, method: str) -> None:
        if method == self.fails_in:
            raise StoreError("the disk is gone")
        if method == self.waits_in:
            self.entered.set()
            assert self.go_on.wait(30)


class World:
    """A publisher over real in-memory stores; certificates are plain data that name their content."""

    def __init__(self, tmp_path: Path) -> None:
        self.now = 100.0
        self.store = TroubledStore()
        self.engine = ShelfEngine()
        self.certificates: dict[str, Mapping[str, Any]] = {}
        self.adapters = tmp_path
        self.start()

    def start(self, *, canary_required: bool = False) -> None:
        """A new process: empty router and engine over the same store."""
        self.engine.shelf.clear()
        self.router = Router(model_name="m", episode_ttl_s=10.0, clock=lambda: self.now)
        self.publisher = Publisher(
            store=self.store, audit=self.store._audit, engine=self.engine, router=self.router,
            check_certificate=self.check, certificate_of=self.certificates.get,
            adapters_dir=self.adapters, model_name="m", clock=lambda: self.now,
            canary_required=lambda: canary_required,
        )  # fmt: skip

    @staticmethod
    def check(certificate: Mapping[str, Any] | None, *, adapter_sha256: str, base_sha256: str) -> None:
        if certificate is None or (certificate["adapter_sha256"], base_sha256) != (adapter_sha256, BASE):
            raise CertificateError("no certificate for this content")

    def certified(self, letter: str, *, kind: str = "gate") -> str:
        sha256 = letter * 64
        self.certificates[sha256] = {"kind": kind, "adapter_sha256": sha256}
        return self.candidate(letter, CandidateState.SCREENED, CandidateState.CERTIFIED)

    def candidate(self, letter: str, *states: CandidateState, manifest_hash: str | None = None) -> str:
        candidate = Candidate(
            id=f"cand-{letter * 8}", adapter_sha256=letter * 64, base_sha256=BASE, manifest_hash=manifest_hash,
            parent_sha256=None, state=CandidateState.PROPOSED, created_at=self.now, origin="test",
        )  # fmt: skip
        self.store.add_candidate(candidate)
        for state in states:
            self.store.set_candidate_state(candidate.id, state, reasons=("test",), time=self.now)
        return candidate.id

    async def publish(self, candidate: str) -> Release:
        """Publish a candidate that was judged against what is served."""
        served = next(r for r in self.store.list_releases() if r.id == self.store.aliases()[CHAMPION])
        return await self.publisher.publish(candidate, against=served.adapter_sha256 or BARE_BASE)

    def state(self, candidate: str) -> CandidateState:
        return next(c.state for c in self.store.list_candidates() if c.id == candidate)

    def serving(self) -> str | None:
        return self.router.resolve("champion", episode_id="new", user_key="u").adapter
