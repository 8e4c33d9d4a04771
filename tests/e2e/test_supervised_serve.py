"""``tidegate serve --engine vllm``: Tidegate starts the server that answers, and ends it. The vLLM is a stand-in."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from loop_world import LoopWorld, get
from supervised_world import StandIn, kill, propose
from tidegate.app.stores import open_stores

MESSAGES: Any = [{"role": "user", "content": "what is two plus two?"}]


@pytest.fixture
def world(tmp_path: Path) -> LoopWorld:
    return LoopWorld.with_traffic(tmp_path / "world")


@pytest.fixture
def stand_in(tmp_path: Path, world: LoopWorld) -> Generator[StandIn]:
    made = StandIn(tmp_path / "stand-in")
    with world.config.open("a") as file:
        file.write(f'\n[engine]\nkind = "vllm"\npython = "{made.interpreter()}"\n')
        file.write("start_timeout_s = 60.0\ncheck_interval_s = 0.2\n")
    yield made
    assert made.alive() == []


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_adapters_are_published_rolled_back_and_judged_by_a_server_of_our_own(
    world: LoopWorld, stand_in: StandIn, tmp_path: Path
) -> None:
    with world.serving() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        candidate = propose(world, tmp_path)

        def said() -> tuple[str | None, str | None]:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, temperature=0)
            return answer.choices[0].message.content, answer.system_fingerprint

        before, release = said()
        assert release == "tiny-r0-base"
        signed = world.tidegate("candidates", "sign", candidate, "--json")
        assert signed.returncode == 0, signed.stderr
        after, release = said()
        assert (release, after != before) == (json.loads(signed.stdout)["id"], True)
        assert world.tidegate("releases", "rollback", "--json").returncode == 0
        assert said()[0] == before
        with open_stores(world.data) as stores:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5)
            record = stores.trajectories.get_interaction(answer.id) or stores.sealed_trajectories.get_interaction(
                answer.id
            )
            assert record is not None
            assert record.engine_replica == "vllm-0"
            assert record.choices[0].token_exact
        result = world.cycle()  # trains here and measures there: it starts no server of its own
        assert result["outcome"] == "refused", result
        assert len(stand_in.pids()) == 1
    given = json.loads((stand_in.folder / "arguments").read_text())
    assert given[given.index("--max-lora-rank") + 1] == "8"  # training.rank is 4
    assert given[given.index("--max-model-len") + 1] == "256"
    assert world.data.announced_engines() == {}


def test_a_command_without_a_running_server_starts_one_for_itself(
    world: LoopWorld, stand_in: StandIn, tmp_path: Path
) -> None:
    with world.serving():
        candidate = propose(world, tmp_path)
    signed = world.tidegate("candidates", "sign", candidate, "--json")
    assert signed.returncode == 0, signed.stderr
    assert len(stand_in.pids()) == 2
    assert (world.data.engines / "command-0.log").exists()


def test_readyz_says_why_and_serving_goes_on_when_it_is_back(world: LoopWorld, stand_in: StandIn) -> None:
    with world.serving() as url:
        stand_in.switch("hold", on=True)
        kill(stand_in.alive()[0])
        wait_for(lambda: b"vllm-0: it ended by signal 9" in get(f"{url}/readyz")[1])
        assert get(f"{url}/readyz")[0] == 503
        stand_in.switch("hold", on=False)
        wait_for(lambda: get(f"{url}/readyz")[0] == 200)


def test_of_two_servers_one_goes_on_while_the_other_is_away_and_gets_its_adapters_back(
    world: LoopWorld, stand_in: StandIn, tmp_path: Path
) -> None:
    with world.config.open("a") as file:
        file.write("replicas = 2\n")
    with world.serving() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        signed = world.tidegate("candidates", "sign", propose(world, tmp_path), "--json")
        assert signed.returncode == 0, signed.stderr
        published = json.loads(signed.stdout)["id"]

        def answered_by() -> str:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
            assert answer.system_fingerprint == published
            with open_stores(world.data) as stores:
                record = stores.trajectories.get_interaction(answer.id) or stores.sealed_trajectories.get_interaction(
                    answer.id
                )
            assert record is not None
            return record.engine_replica

        stand_in.switch("hold", on=True)
        first, second = stand_in.alive_as("vllm-0"), stand_in.alive_as("vllm-1")
        kill(first)
        wait_for(lambda: first not in stand_in.alive())  # else a call may be in flight there
        assert {answered_by() for _ in range(5)} == {"vllm-1"}
        assert get(f"{url}/readyz")[0] == 200
        stand_in.switch("hold", on=False)
        wait_for(lambda: b"tidegate_replicas_in_service 2.0" in get(f"{url}/metrics")[1])
        kill(second)
        wait_for(lambda: second not in stand_in.alive())
        assert {answered_by() for _ in range(5)} == {"vllm-0"}


def test_a_server_that_does_not_start_keeps_the_ports_closed(world: LoopWorld, stand_in: StandIn) -> None:
    stand_in.switch("die", on=True, text="ValueError: no such dtype")
    refused = world.tidegate("serve", timeout_s=60)
    assert refused.returncode == 1
    assert "vllm-0 ended with exit code 3 before it served" in refused.stderr
    assert "ValueError: no such dtype" in refused.stderr
    assert world.data.server() is None


def test_sigkill_leaves_no_server_behind(world: LoopWorld, stand_in: StandIn) -> None:
    with world.serving():
        address = world.data.server()
        assert address is not None
        assert len(stand_in.alive()) == 1
        os.kill(address.pid, signal.SIGKILL)
        wait_for(lambda: not stand_in.alive())
    with world.serving():
        assert len(stand_in.alive()) == 1


def test_the_command_line_chooses_it_and_says_what_is_missing(tmp_path: Path) -> None:
    world = LoopWorld.with_traffic(tmp_path / "bare", train=1, dev=0, sealed=0)
    os.environ["TIDEGATE_CACHE_DIR"] = str(tmp_path / "cache")
    try:
        refused = world.tidegate("serve", "--engine", "vllm", timeout_s=60)
        assert refused.returncode == 2
        assert "run 'tidegate engine install vllm'" in refused.stderr
        os.environ["TIDEGATE_ENGINE__PYTHON"] = "/no/such/python"
        refused = world.tidegate("serve", "--engine", "vllm", timeout_s=60)
        assert refused.returncode == 2
        assert "engine.python = '/no/such/python' does not run" in refused.stderr
    finally:
        os.environ.pop("TIDEGATE_ENGINE__PYTHON", None)
        del os.environ["TIDEGATE_CACHE_DIR"]
