"""A release in the shadow over the embedded engine, from the command to the report, through the public API."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from typer.testing import CliRunner

from engine_fixtures import write_adapter, write_tiny_model
from loop_world import LoopWorld
from tidegate.app.operations import rollback_release, sign_candidate
from tidegate.app.serving import running
from tidegate.app.shadows import shadow_report, start_shadow, stop_shadow
from tidegate.app.splits import user_splitter
from tidegate.app.stores import open_stores
from tidegate.cli.main import app
from tidegate.core.errors import CommandError, ConflictError, NotFoundError
from tidegate.core.types import Candidate, CandidateState, JsonObject, Split
from tidegate.engines.model_cache import base_hash

BASE = "tiny-r0-base"
CALLS = 6


def quiet(line: str) -> None:
    del line


def a_user_of(world: LoopWorld, wanted: Split) -> str:
    split_of = user_splitter(world.settings, world.data)
    return next(name for name in (f"user-{n}" for n in range(10_000)) if split_of(name)[1] is wanted)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is in the database
            await asyncio.sleep(0.02)


async def ask(url: str, user: str, number: int, *, max_tokens: int = 8, **fields: Any) -> str | None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="champion",
            messages=[{"role": "user", "content": f"what is {number} plus two?"}],
            max_tokens=max_tokens,
            temperature=0,
            user=user,
            metadata={"tidegate_verifier": "numeric_answer", "tidegate_reference": "4"},
            **fields,
        )
    return answer.system_fingerprint


def candidate_in(world: LoopWorld, folder: Path) -> Candidate:
    ref = write_adapter(folder, world.model, seed=3)
    ref.path.rename(world.data.adapters / ref.sha256)
    return Candidate(
        id=f"cand-{ref.sha256[:8]}", adapter_sha256=ref.sha256, base_sha256=base_hash(world.model), manifest_hash=None,
        parent_sha256=None, state=CandidateState.PROPOSED, created_at=0.0, origin="test",
    )  # fmt: skip


def command(world: LoopWorld, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["--config", str(world.config), "releases", "shadow", *arguments])
    return result.exit_code, result.stdout


async def test_a_shadow_from_its_start_to_the_day_it_is_the_champion(tmp_path: Path) -> None:
    world = LoopWorld(tmp_path / "world", write_tiny_model(tmp_path / "model"))
    settings = world.settings
    candidate = candidate_in(world, tmp_path / "adapter")

    def report() -> JsonObject:
        return shadow_report(settings)

    async with running(settings, say=quiet) as address:
        with open_stores(world.data) as stores:
            stores.releases.add_candidate(candidate)
        champion = (await sign_candidate(settings, candidate.id))["id"]
        with pytest.raises(NotFoundError, match="ever in the shadow"):
            report()
        with pytest.raises(ConflictError, match="same content as the champion"):
            await start_shadow(settings, champion, 1.0)
        assert (await start_shadow(settings, BASE, 1.0))["id"] == "shadow-1"
        open_user, sealed_user = a_user_of(world, Split.TRAIN), a_user_of(world, Split.SEALED)
        for number in range(CALLS):
            assert await ask(address.url, open_user, number) == champion
            await ask(address.url, sealed_user, number)
            await until(lambda done=number + 1: sum_of(report()) == done)
        await ask(address.url, open_user, 0, store=False)
        found = report()
    assert (found["release"], found["ended"], found["left_out"]) == (BASE, None, 0)
    assert found["calls"] == {"answered": CALLS, "failed": {}, "dropped": {}}
    (comparison,) = found["comparisons"]
    assert (comparison["main"], comparison["pairs"], comparison["passed"]["of"]) == (champion, CALLS, CALLS)
    assert comparison["identical_greedy"]["of"] == CALLS
    assert comparison["identical"]["count"] < CALLS, "the base answers otherwise than the adapter"
    with open_stores(world.data) as stores:
        episodes = stores.trajectories.list_episodes(splits=tuple(Split))
        assert {call.release_id for episode in episodes for call in episode.interactions} == {champion}
        assert stores.trajectories.list_verdicts() == []
    # it is taken up again after a restart, and ends when its content is served to everybody
    async with running(settings, say=quiet) as address:
        await ask(address.url, open_user, 9)
        await until(lambda: sum_of(report()) == CALLS + 1)
        await rollback_release(settings, BASE, "the test says so")
        await ask(address.url, open_user, 10)
    found = report()
    assert found["ended"].startswith("its content is the champion ")
    assert sum_of(found) == CALLS + 1
    assert command(world)[0] == 0
    code, text = command(world, "--json")
    assert (code, json.loads(text)) == (0, json.loads(json.dumps(found)))


async def test_a_server_looks_at_certificates_and_stops_without_losing_count(tmp_path: Path) -> None:
    world = LoopWorld(
        tmp_path / "world", write_tiny_model(tmp_path / "model"), more_settings="[watch]\ninterval_s = 0.05\n"
    )
    settings = world.settings
    candidate = candidate_in(world, tmp_path / "adapter")
    async with running(settings, say=quiet) as address:
        with open_stores(world.data) as stores:
            stores.releases.add_candidate(candidate)
        released = (await sign_candidate(settings, candidate.id))["id"]
        await rollback_release(settings, BASE, "the test says so")
        await start_shadow(settings, released, 1.0)
        certificate = put_certificate(world, released, "{}")
        await until(lambda: shadow_report(settings)["ended"] is not None)
        assert shadow_report(settings)["ended"].startswith("its certificate does not stand")
        # copies are under way when the server stops
        put_certificate(world, released, certificate)
        await start_shadow(settings, released, 1.0)
        user = a_user_of(world, Split.TRAIN)
        await asyncio.gather(*(ask(address.url, user, number, max_tokens=200) for number in range(CALLS)))
    found = shadow_report(settings)
    assert sum_of(found) == CALLS, found


def put_certificate(world: LoopWorld, release: str, certificate: str) -> str:
    """Change it behind everybody's back; returns what stood there."""
    database = sqlite3.connect(world.data.open_database, isolation_level=None)
    ((before,),) = database.execute("SELECT certificate FROM releases WHERE id = ?", (release,)).fetchall()
    database.execute("UPDATE releases SET certificate = ? WHERE id = ?", (certificate, release))
    database.close()
    return before


def sum_of(report: JsonObject) -> int:
    calls = report["calls"]
    return calls["answered"] + sum(calls["failed"].values()) + sum(calls["dropped"].values())


async def test_without_a_server_a_shadow_is_stopped_and_none_begun(tmp_path: Path) -> None:
    world = LoopWorld(tmp_path / "world", write_tiny_model(tmp_path / "model"))
    settings = world.settings
    candidate = candidate_in(world, tmp_path / "adapter")
    async with running(settings, say=quiet):
        with open_stores(world.data) as stores:
            stores.releases.add_candidate(candidate)
        await sign_candidate(settings, candidate.id)
        await start_shadow(settings, BASE, 0.5)
    with pytest.raises(CommandError, match="no server runs"):
        await start_shadow(settings, BASE, 0.5)
    assert (await stop_shadow(settings, "enough"))["reason"] == "enough"
    with pytest.raises(ConflictError, match="none to stop"):
        await stop_shadow(settings, "again")
    with open_stores(world.data) as stores:
        assert [r.kind for r in stores.audit.read() if r.kind.startswith("shadow")] == [
            "shadow_started", "shadow_ended",
        ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [("tiny-r0-base",), ("--share", "0.1"), ("--stop", "--share", "0.1"), ("tiny-r0-base", "--stop")],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    world = LoopWorld(tmp_path / "world", tmp_path / "no model")
    assert command(world, *arguments)[0] == 2
