"""A swap is refused when the engine does not compute what the trainer did: real training, a real engine, its lies."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway_world import until
from release_world import World
from replica_world import PROMPTS, SOON
from tidegate.artifacts import adapter_manifest
from tidegate.core.agreement import MANIFEST_KEY, Tolerance, gap_between, record_in
from tidegate.core.errors import AdapterError, EngineError, RequestError
from tidegate.core.types import Candidate, CandidateState
from tidegate.engines.embedded import EmbeddedEngine
from tidegate.engines.replicas import Breaker, ReplicaSet
from tidegate.ports import Engine
from tidegate.release import CHAMPION, Publisher, Router
from tidegate.training import degrade_adapter
from training_fixtures import trained_adapter

TIGHT = Tolerance(max_nats=1e-3, mean_nats=1e-4)


class LyingEngine(EmbeddedEngine):
    """States log-probabilities of given tokens as ``lie`` says; everything else is the engine's own."""

    lie: str | None = None
    scored = 0

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        self.scored += 1
        match self.lie:
            case "base weights":
                return await super().sequence_logprobs(None, token_ids, first=first)
            case "off by one":
                return (await super().sequence_logprobs(adapter, token_ids, first=first - 1))[:-1]
            case "temperature":
                return await self._at_temperature(adapter, list(token_ids), first, 0.7)
            case "too long":
                raise RequestError("the prompt is too long; raise model.max_context")
            case "one short":
                return (await super().sequence_logprobs(adapter, token_ids, first=first))[:-1]
            case _:
                return await super().sequence_logprobs(adapter, token_ids, first=first)

    async def _at_temperature(
        self, adapter: str | None, token_ids: list[int], first: int, temperature: float
    ) -> tuple[float, ...]:
        assert self._state is not None
        with self._state.residents.holding(adapter) as held:
            lane = await self._state.residents.lane(held)
            logits = lane.runner.plain_logits(token_ids[:-1], last=len(token_ids) - first) / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        return tuple(logprobs.gather(1, torch.tensor(token_ids[first:])[:, None])[:, 0].tolist())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Model directory, folder of adapters by content, and the hash of one that the trainer made."""
    return trained_adapter(tmp_path_factory.mktemp("trained"))


@pytest.fixture
async def engine(trained: tuple[Path, Path, str]) -> AsyncGenerator[LyingEngine]:
    async with LyingEngine(trained[0], dtype="float32", threads=1) as engine:
        yield engine


class Deployment(World):
    """The publisher's world with a real engine and real adapter directories."""

    def __init__(self, adapters: Path, engine: Engine, tolerance: Tolerance = TIGHT) -> None:
        super().__init__(adapters)
        self.router = Router(model_name="m", episode_ttl_s=10.0, clock=lambda: self.now)
        self.publisher = Publisher(
            store=self.store, audit=self.store._audit, engine=engine, router=self.router,
            check_certificate=lambda *_, **__: None, certificate_of=self.certificates.get,
            adapters_dir=adapters, model_name="m", clock=lambda: self.now, tolerance=tolerance,
        )  # fmt: skip

    def candidate_of(self, sha256: str) -> str:
        self.certificates[sha256] = {"kind": "gate", "adapter_sha256": sha256}
        candidate = Candidate(
            id=f"cand-{sha256[:8]}", adapter_sha256=sha256, base_sha256="b" * 64, manifest_hash=None,
            parent_sha256=None, state=CandidateState.PROPOSED, created_at=self.now, origin="test",
        )  # fmt: skip
        self.store.add_candidate(candidate)
        for state in (CandidateState.SCREENED, CandidateState.CERTIFIED):
            self.store.set_candidate_state(candidate.id, state, reasons=("test",), time=self.now)
        return candidate.id

    @property
    def last_reason(self) -> str:
        return [r.body["reason"] for r in self.store._audit.read() if r.kind == "aliases_moved"][-1]


async def test_an_engine_that_computes_as_the_trainer_did_is_published(
    trained: tuple[Path, Path, str], engine: LyingEngine
) -> None:
    world = Deployment(trained[1], engine)
    await world.publisher.reconcile()
    release = await world.publish(world.candidate_of(trained[2]))
    assert world.store.aliases()[CHAMPION] == release.id
    assert "within" in world.last_reason
    assert "of the trainer" in world.last_reason


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ("base weights", "answers with the base weights"),
        ("off by one", "for the wrong tokens"),
        ("temperature", r"differ from the trainer's by up to [\d.]+ nats, [\d.]+ in the mean of \d+ tokens"),
        ("one short", r"the engine states .* against"),
    ],
)
async def test_an_engine_that_states_another_distribution_gets_no_traffic(
    trained: tuple[Path, Path, str], engine: LyingEngine, lie: str, says: str
) -> None:
    """Hash and probe are right in all of these: the adapter lies there, and logits changed."""
    world = Deployment(trained[1], engine, Tolerance(max_nats=0.5, mean_nats=0.1))
    await world.publisher.reconcile()
    engine.lie = lie
    with pytest.raises(EngineError, match=f"is not taken into use: .*{says}"):
        await world.publish(world.candidate_of(trained[2]))
    assert world.store.aliases() == {CHAMPION: "m-r0-base"}
    assert await engine.list_adapters() == ()


@pytest.mark.parametrize("lie", ["base weights", "off by one", "temperature"])
async def test_one_replica_that_computes_something_else_is_left_out_and_comes_back_when_it_is_right(
    trained: tuple[Path, Path, str], lie: str
) -> None:
    """Every replica is held to every text: one that lies answers no user, also after it was looked at again."""
    async with AsyncExitStack() as stack:
        engines = [LyingEngine(trained[0], dtype="float32", threads=1, replica=f"r{number}") for number in range(2)]
        for one in engines:
            await stack.enter_async_context(one)
        tolerance = Tolerance(max_nats=0.5, mean_nats=0.1)
        replicas = await stack.enter_async_context(
            ReplicaSet(engines, probe_prompts=PROMPTS, limits=SOON, tolerance=tolerance)
        )
        world = Deployment(trained[1], replicas, tolerance)
        await world.publisher.reconcile()
        engines[0].lie = lie
        release = await world.publish(world.candidate_of(trained[2]))
        assert world.store.aliases()[CHAMPION] == release.id
        assert "within" in world.last_reason
        before = engines[0].scored
        await until(lambda: engines[0].scored >= before + 8)
        assert replicas.breakers()["r0"] is not Breaker.CLOSED
        health = (await replicas.health()).detail
        assert "log-probabilities differ from the trainer's" in health
        engines[0].lie = None
        await until(lambda: replicas.breakers()["r0"] is Breaker.CLOSED)


async def test_replicas_that_are_all_wrong_stay_and_the_swap_is_refused(
    trained: tuple[Path, Path, str],
) -> None:
    async with AsyncExitStack() as stack:
        engines = [LyingEngine(trained[0], dtype="float32", threads=1, replica=f"r{number}") for number in range(2)]
        for one in engines:
            await stack.enter_async_context(one)
        replicas = await stack.enter_async_context(ReplicaSet(engines, probe_prompts=PROMPTS, limits=SOON))
        world = Deployment(trained[1], replicas)
        await world.publisher.reconcile()
        for engine in engines:
            engine.lie = "temperature"
        with pytest.raises(EngineError, match="is not taken into use: its log-probabilities differ"):
            await world.publish(world.candidate_of(trained[2]))
        assert set(replicas.breakers().values()) == {Breaker.CLOSED}
        assert world.store.aliases() == {CHAMPION: "m-r0-base"}


async def test_an_adapter_without_a_record_goes_by_the_probe_and_the_log_says_so(
    trained: tuple[Path, Path, str], engine: LyingEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = Deployment(tmp_path, engine)
    await world.publisher.reconcile()
    made = degrade_adapter(trained[1] / trained[2], tmp_path, seed=1, scale=0.5)
    assert MANIFEST_KEY not in adapter_manifest(made)
    with caplog.at_level(logging.WARNING):
        await world.publish(world.candidate_of(made.name))
    assert "no record of the trainer" in world.last_reason
    assert "the probe alone" in caplog.text


async def test_texts_beyond_the_engines_context_are_left_out_and_it_is_said(
    trained: tuple[Path, Path, str], engine: LyingEngine
) -> None:
    world = Deployment(trained[1], engine)
    await world.publisher.reconcile()
    engine.lie = "too long"
    await world.publish(world.candidate_of(trained[2]))
    assert "no text of the trainer's record fits" in world.last_reason


async def test_a_record_that_was_changed_is_another_adapter(
    trained: tuple[Path, Path, str], engine: LyingEngine, tmp_path: Path
) -> None:
    """Whoever edits what the trainer said would otherwise decide what the engine may say."""
    source = trained[1] / trained[2]
    changed = tmp_path / trained[2]
    changed.mkdir()
    for file in source.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    manifest = (changed / "tidegate.json").read_text(encoding="utf-8")
    (changed / "tidegate.json").write_text(manifest.replace('"first": ', '"first": 1'), encoding="utf-8")
    world = Deployment(tmp_path, engine)
    await world.publisher.reconcile()
    with pytest.raises(AdapterError, match="its files are not those that were released"):
        await world.publish(world.candidate_of(trained[2]))


async def test_rollback_to_the_bare_base_needs_no_record(trained: tuple[Path, Path, str], engine: LyingEngine) -> None:
    world = Deployment(trained[1], engine)
    await world.publisher.reconcile()
    await world.publish(world.candidate_of(trained[2]))
    engine.lie = "temperature"
    back = await world.publisher.rollback(None, "users complain")
    assert back.adapter_sha256 is None
    assert world.last_reason == "rollback: users complain (probed)"


async def test_the_record_is_what_the_engine_says_to_the_last_digits(
    trained: tuple[Path, Path, str], engine: LyingEngine
) -> None:
    record = record_in(adapter_manifest(trained[1] / trained[2]), adapter="a")
    assert record is not None
    given: Any = [await engine.sequence_logprobs(None, s.token_ids, first=s.first) for s in record.sequences]
    assert gap_between(record.base, given, tolerance=TIGHT).max < 1e-4
    assert gap_between(record.trained, given, tolerance=TIGHT).mean > 0.1
