"""``tidegate serve`` with a vLLM of its own: answers, publishing, rollback, SIGKILL. ``make test-vllm`` runs it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from loop_world import LoopWorld, get
from real_vllm import write_servable_model
from supervised_world import is_alive, kill, propose
from tidegate.app.stores import open_stores

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
MESSAGES: Any = [{"role": "user", "content": "what is two plus two?"}]


def api_server(keeper_of: int) -> int:
    """The vLLM process below a Tidegate server: the child of its keeper."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    (keeper,) = children[keeper_of]
    return min(children[keeper])


def below(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, found) for one in (child, *below(child))]


def test_a_real_vllm_serves_learns_rolls_back_and_comes_back(tmp_path: Path) -> None:
    world = LoopWorld(tmp_path / "world", write_servable_model(tmp_path / "model"))
    world.set("engine", kind="vllm")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    try:
        with world.serving(within_s=900.0) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            address = world.data.server()
            assert address is not None
            candidate = propose(world, tmp_path)

            def said() -> tuple[str | None, str | None]:
                answer = client.chat.completions.create(
                    model="champion", messages=MESSAGES, max_tokens=20, temperature=0
                )
                return answer.choices[0].message.content, answer.system_fingerprint

            before, release = said()
            assert release == "tiny-r0-base"
            chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, stream=True))
            with open_stores(world.data) as stores:
                record = stores.trajectories.get_interaction(
                    chunks[0].id
                ) or stores.sealed_trajectories.get_interaction(chunks[0].id)
            assert record is not None
            assert (record.choices[0].token_exact, record.engine_replica) == (True, "vllm-0")
            signed = world.tidegate("candidates", "sign", candidate, "--json")
            assert signed.returncode == 0, signed.stderr
            published = json.loads(signed.stdout)["id"]
            after, release = said()
            assert (release, after != before) == (published, True)
            assert world.tidegate("releases", "rollback", "--json").returncode == 0
            assert said()[0] == before
            assert world.tidegate("releases", "promote", published, "--json").returncode == 0
            assert said()[0] == after

            server = api_server(address.pid)
            family = [server, *below(server)]
            assert len(family) > 1  # an engine process that would outlive it
            kill(server)
            wait_for(lambda: get(f"{url}/readyz")[0] == 503, seconds=60)
            wait_for(lambda: get(f"{url}/readyz")[0] == 200, seconds=600)
            assert not any(map(is_alive, family))
            assert said()[0] == after
            family = [address.pid, *below(address.pid)]
        assert not any(map(is_alive, family))
    finally:
        del os.environ["VLLM_CPU_KVCACHE_SPACE"]


def wait_for(condition: Any, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
