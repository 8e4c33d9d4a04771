"""The real server around an engine, in this process, with releases that no gate had to certify.

Gateway, recorder, SQLite, router and publisher are those of ``tidegate serve``; only the certificates are not
looked at, for what is measured here is serving and swapping.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tidegate.app.layout import DataDirectory
from tidegate.app.stores import Stores, open_stores
from tidegate.capture import Recorder
from tidegate.config.settings import ServerSettings
from tidegate.core.types import AdapterRef, Candidate, CandidateState, JsonObject, Release, Split
from tidegate.gateway.dependencies import GatewayDependencies
from tidegate.gateway.factory import create_gateway
from tidegate.gateway.serve import running_server
from tidegate.ports import Engine
from tidegate.release import BARE_BASE, Publisher, Router

MODEL_NAME = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStack:
    """A running server. ``url`` is that of its API, without ``/v1``; ``adapters`` holds folders by content hash."""

    url: str
    engine: Engine
    router: Router
    publisher: Publisher
    stores: Stores
    adapters: Path

    async def publish(self, adapter: AdapterRef) -> Release:
        """Serve an adapter of the data directory to everybody."""
        candidate = Candidate(
            id=f"cand-{adapter.sha256[:8]}",
            adapter_sha256=adapter.sha256,
            base_sha256=self.engine.base_sha256,
            manifest_hash=None,
            parent_sha256=None,
            state=CandidateState.PROPOSED,
            created_at=time.time(),
            origin="benchmark",
        )
        store = self.stores.releases
        store.add_candidate(candidate)
        for state in (CandidateState.SCREENED, CandidateState.CERTIFIED):
            store.set_candidate_state(candidate.id, state, reasons=("benchmark",), time=time.time())
        served = next(r for r in store.list_releases() if r.id == store.aliases()["champion"])
        return await self.publisher.publish(candidate.id, against=served.adapter_sha256 or BARE_BASE)


@asynccontextmanager
async def serving_stack(folder: Path, engine: Engine) -> AsyncGenerator[ServingStack]:
    """Serve ``engine`` from a data directory in ``folder`` for the length of a block."""
    directory = DataDirectory(root=folder).create()
    async with AsyncExitStack() as stack:
        stores = stack.enter_context(open_stores(directory))
        router = Router(model_name=MODEL_NAME, episode_ttl_s=1.0, clock=time.monotonic)
        publisher = Publisher(
            store=stores.releases,
            audit=stores.audit,
            engine=engine,
            router=router,
            check_certificate=_unchecked,
            certificate_of=lambda sha256: {"kind": "benchmark", "adapter_sha256": sha256},
            adapters_dir=directory.adapters,
            model_name=MODEL_NAME,
            clock=time.time,
        )
        await publisher.reconcile()
        recorder = Recorder(stores.trajectories, stores.sealed_trajectories)
        stack.push_async_callback(recorder.close)
        settings = ServerSettings(port=0)
        gateway = create_gateway(
            GatewayDependencies(
                engine=engine,
                router=router,
                recorder=recorder,
                split_of=lambda user: (user, Split.TRAIN),
                check_task=lambda task: None,
                clock=time.time,
                new_id=lambda: uuid.uuid4().hex,
                recorder_counts=recorder.counts,
            ),
            settings,
        )
        port = await stack.enter_async_context(
            running_server(gateway, host=settings.host, port=0, option="--port", drain_s=5.0)
        )
        yield ServingStack(
            url=f"http://{settings.host}:{port}",
            engine=engine,
            router=router,
            publisher=publisher,
            stores=stores,
            adapters=directory.adapters,
        )


def _unchecked(certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None:
    del certificate, adapter_sha256, base_sha256
