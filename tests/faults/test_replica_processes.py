"""Three servers in processes of their own, one killed and one wedged while adapters are swapped under load."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine_fixtures import call, write_adapter, write_tiny_model
from gateway_world import until
from replica_world import PROMPTS, SOON, replicas_at
from tidegate.core.errors import EngineError
from tidegate.core.generation import GenerationFold
from tidegate.core.types import AdapterRef
from tidegate.engines.model_cache import base_hash
from tidegate.engines.replicas import Breaker, ReplicaSet
from upstream_process import UpstreamProcess

USERS = 6
LIMITS = replace(
    SOON, check_interval_s=0.1, check_timeout_s=1.0, swap_timeout_s=20.0, retry_s=0.05, longest_retry_s=0.2
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("replicas") / "model")


@dataclass
class Load:
    """Users that ask without a pause, each call by the adapter that is served when it begins."""

    engine: ReplicaSet
    served: AdapterRef
    answered: list[tuple[str, str | None, str]] = field(default_factory=list)
    failed: list[EngineError] = field(default_factory=list)
    over: bool = False

    async def user(self, number: int) -> None:
        asked = 0
        while not self.over:
            asked += 1
            adapter, fold = self.served.name, GenerationFold()
            request = call(f"{number}/{asked}", max_tokens=8, temperature=1.0, seed=number, adapter=adapter)
            try:
                async for event in self.engine.generate(request):
                    fold.add(event)
            except EngineError as error:
                self.failed.append(error)
                continue
            self.answered.append((adapter, fold.replica, fold.choices()[0].text))

    async def more(self, calls: int = 2 * USERS) -> None:
        """Wait until so many more calls were answered."""
        wanted = len(self.answered) + calls
        await until(lambda: len(self.answered) >= wanted)

    async def swap(self, ref: AdapterRef) -> None:
        """As a publisher does it: load, prove, move the pointer, unload."""
        await self.engine.load(ref)
        proof = await self.engine.probe(ref.name, against=self.served.name, prompts=PROMPTS)
        assert (proof.sha256, proof.max_logit_difference > 0.0) == (ref.sha256, True)
        before, self.served = self.served, ref
        await self.engine.unload(before.name)


def closed(engine: ReplicaSet) -> int:
    return sum(state is Breaker.CLOSED for state in engine.breakers().values())


async def test_one_killed_and_one_wedged_cost_what_was_in_flight_on_the_dead_one(
    model_dir: Path, tmp_path: Path
) -> None:
    refs = [write_adapter(tmp_path / f"a{seed}", model_dir, seed=seed) for seed in range(6)]
    with ExitStack() as stack:
        servers = [stack.enter_context(UpstreamProcess(pace_s=0.002)) for _ in range(3)]
        killed, wedged, _ = servers
        dead = killed.url.partition("://")[2]
        opened = replicas_at([one.url for one in servers], base_sha256=base_hash(model_dir), limits=LIMITS)
        async with opened as engine:
            await engine.load(refs[0])
            load = Load(engine, refs[0])
            users = [asyncio.create_task(load.user(number)) for number in range(USERS)]
            stack.callback(lambda: [user.cancel() for user in users])
            await load.more()
            await load.swap(refs[1])
            await load.more()

            killed.kill()
            await load.swap(refs[2])
            await load.more()
            assert all(dead in str(error) for error in load.failed)
            in_flight = len(load.failed)
            assert in_flight <= USERS

            wedged.stop()
            await load.swap(refs[3])
            await load.more()
            assert closed(engine) == 1
            assert len(load.failed) == in_flight

            killed.start()
            await until(lambda: closed(engine) == 2)
            await load.swap(refs[4])
            wedged.go_on()
            await until(lambda: closed(engine) == 3)
            await load.swap(refs[5])
            since = len(load.answered)
            await load.more(6 * USERS)
            load.over = True
            await asyncio.gather(*users)

            assert len(load.failed) == in_flight
            assert len({replica for _, replica, _ in load.answered[since:]}) == 3
            assert {adapter for adapter, _, _ in load.answered[since:]} == {refs[5].name}
            assert await engine.list_adapters() == (refs[5],)
