"""Canaries and their triggers through the commands and the HTTP API alone: a real server, users, a tiny model."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from loop_world import ANSWER, POLICY, LoopWorld, answered
from tidegate.app.stores import open_stores
from tidegate.core.gate.live_assignment import LiveArm
from tidegate.core.gate.live_records import look_at_canary, look_given
from tidegate.core.gate.live_state import CANARY_LOOK, LiveUnit
from tidegate.core.gate.state import gate_state
from tidegate.core.types import Split

CANARY = """
[canary]
weights = [0.5]
pairs_per_weight = 10
horizon_pairs = 400
margin = 0.05
bets = [0.2, 0.4, 0.7]
promote_at = 10.0
rollback_at = 10.0
"""
WATCH = """
[watch]
interval_s = 0.1
"""
BASE = "tiny-r0-base"
IMPOSSIBLE = "what nobody answers"


def _configured(world: LoopWorld, watch: str = WATCH) -> LoopWorld:
    policy = POLICY.replace('canary = "none"\n', "").replace("rollbacks_per_window = 2", "rollbacks_per_window = 1")
    (world.root / "gate.toml").write_text(policy.replace("drift_at = 100.0", "drift_at = 10.0") + CANARY)
    world.config.write_text(world.config.read_text() + watch)
    return world


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cycle that waits for its canary, which no server has served yet; the champion did well until now."""
    root = tmp_path_factory.mktemp("live") / "pristine"
    world = _configured(LoopWorld.with_traffic(root))
    with open_stores(world.data) as stores:
        recent = [replace(answered(Split.SEALED, n), created_at=time.time() - 3600.0) for n in range(100, 140)]
        stores.sealed_trajectories.append_interactions(recent)
    asyncio.run(world.first_release())
    done = world.tidegate("cycle", "run", "--json")
    assert done.returncode == 4, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["outcome"] == "waiting"
    assert "the canary goes on while 'tidegate serve' runs" in result["reasons"][0]
    return root


@pytest.fixture
def world(pristine: Path, tmp_path: Path) -> LoopWorld:
    shutil.copytree(pristine / "data", tmp_path / "data")
    return _configured(LoopWorld(tmp_path, pristine / "model"))


class Users:
    """Each asks once and declares what would be right."""

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._numbers = itertools.count()

    def ask(self, reference: str) -> tuple[str, str]:
        """The answer of a new user's request, and the release that gave it."""
        number = next(self._numbers)
        raw = self._client.chat.completions.with_raw_response.create(
            model="champion",
            messages=[{"role": "user", "content": "train 3"}],
            max_tokens=8,
            temperature=0,
            user=f"user-{number}",
            metadata={"tidegate_verifier": "exact_text", "tidegate_reference": reference},
        )
        return raw.parse().choices[0].message.content or "", raw.headers["x-tidegate-release"]

    def bases_answer(self) -> str:
        """What the base model says to the question that everybody asks."""
        raw = self._client.chat.completions.create(
            model=BASE, messages=[{"role": "user", "content": "train 3"}], max_tokens=8, temperature=0
        )
        return raw.choices[0].message.content or ""

    def ask_until(self, enough: Callable[[list[str]], bool], reference: str) -> list[str]:
        """Go on until the releases that answered are enough."""
        releases: list[str] = []
        deadline = time.monotonic() + 200.0
        while not enough(releases):
            assert time.monotonic() < deadline, releases[-30:]
            releases.append(self.ask(reference)[1])
        return releases


def only(release: str) -> Callable[[list[str]], bool]:
    """The last 16 answers all came from one release; with a canary at half of the users that is no chance."""
    return lambda releases: len(releases) >= 16 and set(releases[-16:]) == {release}


def trial(world: LoopWorld) -> dict[str, Any]:
    return json.loads(world.tidegate("canary", "status", "--json").stdout)


def candidate_state(world: LoopWorld) -> str:
    return json.loads(world.tidegate("candidates", "list", "--json").stdout)[-1]["state"]


def verified(world: LoopWorld) -> None:
    done = world.tidegate("audit", "verify", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recomputed"]["canary_look"] >= 1


def test_a_canary_that_does_better_is_promoted_and_its_cycle_ends(world: LoopWorld) -> None:
    canary = trial(world)["subject"]
    with world.serving() as url:
        users = Users(url)
        releases = users.ask_until(only(canary), ANSWER)
        assert {BASE, canary} <= set(releases)
        result = world.cycle()
    assert (result["outcome"], result["steps"]["publish"]["release"]) == ("done", canary)
    assert candidate_state(world) == "champion"
    verified(world)


def test_triggers_1_and_5_a_worse_canary_is_taken_back_and_learning_frozen(world: LoopWorld) -> None:
    with world.serving() as url:
        users = Users(url)
        releases = users.ask_until(only(BASE), users.bases_answer())
        assert len(set(releases)) == 2
    ended = trial(world)
    assert (ended["decision"], candidate_state(world)) == ("roll_back", "rolled_back")
    assert "K-" in ended["reason"]
    assert "learning is frozen until two people sign" in ended["reason"]
    frozen = world.tidegate("cycle", "run")
    assert frozen.returncode == 1
    assert "two people sign" in frozen.stderr
    kinds = [json.loads(line)["kind"] for line in world.tidegate("audit", "export").stdout.splitlines()]
    assert [kinds.count(kind) for kind in ("freeze", "quarantine", "live_carried_out")] == [1, 1, 1]
    verified(world)


def test_a_decision_whose_process_died_is_carried_out_before_the_ports_open(world: LoopWorld) -> None:
    with open_stores(world.data) as stores:
        state = gate_state(stores.audit.read())
        running = state.live.running
        assert running is not None
        arms = (LiveArm.CONTROL, LiveArm.SUBJECT)
        units = [
            LiveUnit(user=f"{arm}{n}", arm=arm, outcome=float(arm is arms[0]), time=1.0)
            for arm in arms
            for n in range(20)
        ]
        _, body = look_at_canary(look_given(running, time=time.time(), units=units), state)
        stores.audit.append(CANARY_LOOK, body, time=time.time())
    with world.serving() as url:
        users = Users(url)
        assert {users.ask(ANSWER)[1] for _ in range(16)} == {BASE}
    with world.serving():
        assert candidate_state(world) == "rolled_back"
    kinds = [json.loads(line)["kind"] for line in world.tidegate("audit", "export").stdout.splitlines()]
    assert [kinds.count(kind) for kind in ("freeze", "quarantine", "live_carried_out")] == [1, 1, 1]
    verified(world)


def test_trigger_2_a_canary_prompt_answered_wrongly_takes_the_canary_back_before_any_pair(world: LoopWorld) -> None:
    prompts = world.root / "prompts.jsonl"
    task = {"id": "name", "messages": [{"role": "user", "content": "train 3"}], "verifier": "exact_text"}
    prompts.write_text(json.dumps({**task, "reference": IMPOSSIBLE}) + "\n")
    world.config.write_text(world.config.read_text() + f'prompts = "{prompts}"\n')
    with world.serving() as url:
        Users(url).ask_until(only(BASE), IMPOSSIBLE)
    ended = trial(world)
    assert (ended["decision"], "'name'" in ended["reason"]) == ("roll_back", True)
    verified(world)


def test_trigger_3_an_invalidated_verifier_ends_the_canary_that_it_certified(world: LoopWorld) -> None:
    from tidegate.signals import builtin_verifiers

    version = builtin_verifiers()["exact_text"].version
    with world.serving() as url:
        done = world.tidegate("gate", "invalidate", "exact_text", version, "--reason", "people disagree")
        assert done.returncode == 0, done.stderr
        Users(url).ask_until(only(BASE), IMPOSSIBLE)
    ended = trial(world)
    assert ended["decision"] == "inconclusive"
    assert "does not stand" in ended["reason"]


def test_trigger_4_both_arms_fall_and_learning_freezes_while_the_canary_stays(world: LoopWorld) -> None:
    canary = trial(world)["subject"]

    def frozen(releases: list[str]) -> bool:
        if len(releases) < 40 or len(releases) % 20:
            return False
        status = world.tidegate("gate", "status", "--json")
        return json.loads(status.stdout)["frozen"] is not None

    with world.serving() as url:
        users = Users(url)
        users.ask_until(frozen, IMPOSSIBLE)
        assert canary in {users.ask(IMPOSSIBLE)[1] for _ in range(16)}  # nothing was rolled back
    assert trial(world)["decision"] is None
    assert world.tidegate("cycle", "run").returncode == 1
    verified(world)
