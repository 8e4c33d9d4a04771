"""``tidegate serve`` in front of somebody else's server, through the commands and the official client."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import APIStatusError, OpenAI

from engine_fixtures import write_adapter
from gateway_world import CALCULATOR
from loop_world import LoopWorld
from tidegate.app.serving import running
from tidegate.app.stores import open_stores
from tidegate.config import load_settings
from tidegate.core.types import Candidate, CandidateState, Interaction
from tidegate.engines.model_cache import base_hash
from upstream_server import UpstreamServer, upstream_in_a_thread

MESSAGES: Any = [{"role": "user", "content": "what is two plus two?"}]
TOOLS: Any = [CALCULATOR]
MODEL = "Org/Tiny-1B"
KEY = "sk-upstream-0123456789"
USERS = 24
DOWN = "http://127.0.0.1:9"
"""The discard port: nobody listens there."""


@dataclass(frozen=True)
class Deployment:
    world: LoopWorld
    server: UpstreamServer

    def recorded(self, interaction_id: str) -> Interaction | None:
        """What another process reads from the store now."""
        with open_stores(self.world.data) as stores:
            found = stores.trajectories.get_interaction(interaction_id)
            return found or stores.sealed_trajectories.get_interaction(interaction_id)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Deployment]:
    """A plain server with a key, and a data directory on a machine without any weights."""
    root = tmp_path_factory.mktemp("upstream")
    os.environ["UPSTREAM_KEY"] = KEY
    try:
        with upstream_in_a_thread(vllm=False, model=MODEL, key=KEY) as server:
            world = LoopWorld(root / "world", root / "no such model")
            world.set("engine", api_key_env="UPSTREAM_KEY")
            yield Deployment(world, server)
    finally:
        del os.environ["UPSTREAM_KEY"]


def test_a_server_behind_one_option_is_recorded_before_the_last_byte(recorder: Deployment) -> None:
    world, server = recorder.world, recorder.server
    with (
        world.serving("--upstream", f"{server.url}/v1") as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert MODEL in [model.id for model in client.models.list()]
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=200)
        assert answer.choices[0].message.tool_calls
        record = recorder.recorded(answer.id)
        assert record is not None
        assert record.choices[0].tool_calls[0]["function"]["arguments"] == '{"i": 7}'
        stream = client.chat.completions.create(
            model="champion", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=30, stream=True
        )
        chunks = list(stream)
        record = recorder.recorded(chunks[0].id)
        assert record is not None
        (choice,) = record.choices
        assert choice.text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert (choice.token_exact, choice.token_ids, record.prompt_token_ids) == (False, (), ())
        address = world.data.server()
        assert address is not None
        assert "libtorch" not in Path(f"/proc/{address.pid}/maps").read_text()
        server.faults.status = 429
        with pytest.raises(APIStatusError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES)
        server.faults.status = None
        assert caught.value.status_code == 429
    assert KEY not in (world.root / "serve.log").read_text()


def test_replicas_stand_in_for_one_another_and_each_record_says_which_answered(recorder: Deployment) -> None:
    first = recorder.server
    options = {"vllm": False, "model": MODEL, "key": KEY}
    with ExitStack() as stack:
        second = stack.enter_context(upstream_in_a_thread(**options))
        third = stack.enter_context(upstream_in_a_thread(**{**options, "model": "another"}))
        places = {one.url.removeprefix("http://") for one in (first, second)}
        several = [option for url in (first.url, second.url) for option in ("--upstream", url)]
        refused = recorder.world.tidegate("serve", *several, "--upstream", third.url, timeout_s=60)
        assert refused.returncode == 2
        assert "serve different models" in refused.stderr
        url = stack.enter_context(recorder.world.serving(*several))
        client = stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))

        def answered_by() -> str:
            answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5)
            record = recorder.recorded(answer.id)
            assert record is not None
            return record.engine_replica

        assert {answered_by() for _ in range(4)} == places
        first.faults.status = 429
        assert {answered_by() for _ in range(4)} == {second.url.removeprefix("http://")}
        first.faults.status = None
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
        assert "tidegate_replicas_in_service 2.0" in metrics
        assert all(f'tidegate_replica_breaker{{replica="{one}",state="closed"}} 1.0' in metrics for one in places)
        assert 'tidegate_failovers_total{reason="busy"}' in metrics
        world, urls = recorder.world, json.dumps([first.url, DOWN])
        os.environ.update(TIDEGATE_ENGINE__KIND="openai", TIDEGATE_ENGINE__URLS=urls)
        try:
            found = {one["check"]: one for one in json.loads(world.tidegate("doctor", "--json").stdout)}
        finally:
            del os.environ["TIDEGATE_ENGINE__KIND"], os.environ["TIDEGATE_ENGINE__URLS"]
        assert found[f"upstream {first.url}"]["state"] == "ok"
        assert found[f"upstream {DOWN}"]["state"] == "wrong"
        assert DOWN in found[f"upstream {DOWN}"]["detail"]
        assert found["upstreams"]["state"] == "ok"


def test_a_cycle_over_answers_without_tokens_abstains_and_says_how_many(recorder: Deployment) -> None:
    world, server = recorder.world, recorder.server
    server.script = "42"
    with (
        world.serving("--upstream", server.url, "--upstream-model", MODEL) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for number in range(USERS):
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"what is {number} plus {42 - number}?"}],
                user=f"user-{number}",
                metadata={"tidegate_verifier": "numeric_answer", "tidegate_reference": "42"},
            )
    options = {"TIDEGATE_ENGINE__KIND": "openai", "TIDEGATE_ENGINE__URLS": json.dumps([server.url])}
    os.environ.update(options)
    try:
        done = world.tidegate("cycle", "run", "--json")
        shown = world.root / "shown.jsonl"
        shown.write_text(json.dumps({"messages": [*MESSAGES, {"role": "assistant", "content": "4"}]}))
        trained = world.tidegate("train", "--demonstrations", str(shown))
        examined = world.tidegate("doctor", "--json")
    finally:
        for name in options:
            del os.environ[name]
    assert done.returncode == 4, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    lacking = result["steps"]["curate"]["counts"]["no_token_ids"]
    assert 0 < lacking <= USERS
    assert any(reason.startswith(f"no_token_ids: {lacking} episodes") for reason in result["reasons"])
    assert (trained.returncode, "recorder only" in trained.stderr) == (2, True)
    found = {one["check"]: one for one in json.loads(examined.stdout)}
    assert found["upstream"]["state"] == "ok", found["upstream"]
    assert "model" not in found


def test_what_cannot_be_asked_for_its_model_is_not_served(recorder: Deployment) -> None:
    refused = recorder.world.tidegate("serve", "--upstream", DOWN, timeout_s=60)
    assert refused.returncode == 1
    assert "cannot be reached" in refused.stderr
    wrong = recorder.world.tidegate("serve", "--upstream", "http://user:hunter2@host", timeout_s=60)
    assert wrong.returncode == 2
    assert "user or password" in wrong.stderr
    assert "hunter2" not in wrong.stderr


async def test_a_server_that_is_down_and_whose_model_is_named_is_waited_for(tmp_path: Path) -> None:
    world = LoopWorld(tmp_path / "world", tmp_path / "no such model")
    settings = load_settings(world.config, {"engine": {"kind": "openai", "urls": [DOWN], "model": MODEL}})
    async with running(settings, say=lambda line: None) as address, ClientSession() as session:
        async with session.get(f"{address.url}/readyz") as ready:
            assert ready.status == 503
            assert "cannot be reached" in (await ready.json())["error"]["message"]
        body = {"model": MODEL, "messages": MESSAGES}
        async with session.post(f"{address.url}/v1/chat/completions", json=body) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await answer.json())["error"]["code"] == "engine_unavailable"


def test_adapters_are_published_into_a_vllm_server_and_taken_back(tmp_path: Path) -> None:
    world = LoopWorld.with_traffic(tmp_path / "world")
    with upstream_in_a_thread() as server:
        world.set("engine", kind="vllm", urls=[server.url])
        base = base_hash(world.model)
        ref = write_adapter(tmp_path / "adapter", world.model, seed=3)
        ref.path.rename(world.data.adapters / ref.sha256)
        candidate = Candidate(
            id=f"cand-{ref.sha256[:8]}",
            adapter_sha256=ref.sha256,
            base_sha256=base,
            manifest_hash=None,
            parent_sha256=None,
            state=CandidateState.PROPOSED,
            created_at=0.0,
            origin="test",
        )
        with world.serving() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with open_stores(world.data) as stores:
                stores.releases.add_candidate(candidate)

            def said() -> tuple[str | None, str | None]:
                answer = client.chat.completions.create(
                    model="champion", messages=MESSAGES, max_tokens=30, temperature=0
                )
                return answer.choices[0].message.content, answer.system_fingerprint

            before, release = said()
            assert release == "tiny-r0-base"
            signed = world.tidegate("candidates", "sign", candidate.id, "--json")
            assert signed.returncode == 0, signed.stderr
            published = json.loads(signed.stdout)["id"]
            after, release = said()
            assert (release, after != before) == (published, True)
            assert list(server.adapters) == [published]
            server.adapters.clear()  # as a restart of the server does
            with pytest.raises(APIStatusError, match="has lost adapter") as caught:
                said()
            assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
            world.until_ready(url)
            assert said() == (after, published)
            rolled_back = json.loads(world.tidegate("releases", "rollback", "--json").stdout)
            assert said() == (before, rolled_back["id"])
            # a cycle trains here and measures there
            result = world.cycle()
            assert result["outcome"] == "refused", result
            judged = f"cand-{result['steps']['train']['adapter_sha256'][:8]}"
            assert ("load", judged) in server.changes
            assert ("unload", judged) in server.changes
            assert judged not in server.adapters
