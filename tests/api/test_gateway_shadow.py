"""Copies of calls for a release in the shadow: after the user's own answer, for the right calls, and out of the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fake_engine import FakeEngine
from gateway_world import BASE_RELEASE, CALCULATOR, NEXT_RELEASE, World, ask, until
from tidegate.config.shadow import ShadowSettings
from tidegate.core.errors import EngineBusyError, StoreError
from tidegate.core.shadow import Shadow, ShadowAnswer, ShadowOutcome
from tidegate.core.types import FinishReason, GenerationEvent, GenerationRequest, Split
from tidegate.gateway.shadow import ShadowCalls
from tidegate.release.shadow_route import ShadowRoute

CHAT = "/v1/chat/completions"
OTHER_RELEASE = "tiny-r2-cccccccc"


@dataclass
class TwoReleases(FakeEngine):
    """The champion's engine; what is asked of the release in the shadow goes to ``other``."""

    other: FakeEngine = field(default_factory=lambda: FakeEngine(answer="the sum is four"))

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        engine = self.other if request.adapter == OTHER_RELEASE else self
        return FakeEngine.generate(engine, request)


class ShadowWorld(World):
    """A gateway with a release in the shadow, spoken to without sockets."""

    def __init__(self, *, share: float = 1.0, **parts: Any) -> None:
        super().__init__(engine=TwoReleases(), **parts)
        shadow = Shadow(id="shadow-1", release_id=OTHER_RELEASE, share=share)
        self.route = ShadowRoute(shadow, adapter=OTHER_RELEASE, adapter_sha256="c" * 64)
        self.router.point_shadow_at(self.route)
        self._app = self.app()

    @property
    def shadow_engine(self) -> FakeEngine:
        return self.engine.other

    @property
    def calls(self) -> ShadowCalls:
        assert self._app is not None
        return self._app.state.shadows

    def time_out_after(self, seconds: float) -> None:
        self.calls._timeout_s = seconds

    async def say(self, text: str = "what is two plus two?", *, status: int = 200, **fields: Any) -> dict[str, Any]:
        headers = fields.pop("headers", {})
        found, _, body = await self.direct(CHAT, json.dumps(ask(text, **fields)).encode(), headers)
        assert found == status, body
        return json.loads(body)

    async def only_shadow(self) -> ShadowAnswer:
        await until(lambda: self.recorder.shadows)
        (answer,) = self.recorder.shadows
        return answer

    async def settle(self) -> list[ShadowAnswer]:
        """What was recorded, once no copy is under way."""
        await until(lambda: not self.calls._running and not self.calls._writing)
        return self.recorder.shadows

    def counted(self, outcome: str) -> float:
        assert self._app is not None
        registry = self._app.state.metrics.registry
        return registry.get_sample_value("tidegate_shadow_calls_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def world() -> ShadowWorld:
    return ShadowWorld()


async def test_the_user_gets_the_champion_and_the_shadow_answers_the_same_call(world: ShadowWorld) -> None:
    body = await world.say(temperature=0.5, seed=7, tools=[CALCULATOR], tool_choice="none", user="ann")
    assert body["system_fingerprint"] == BASE_RELEASE
    assert body["choices"][0]["message"]["content"] == "echo: what is two plus two?"
    answer = await world.only_shadow()
    main = world.only_record
    assert (answer.shadow_id, answer.interaction_id, answer.release_id) == ("shadow-1", main.id, OTHER_RELEASE)
    assert (answer.outcome, answer.reason, answer.text) == (ShadowOutcome.ANSWERED, "", "the sum is four")
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == (FinishReason.STOP, 6, 5)
    (asked,), (copied,) = world.engine.requests, world.shadow_engine.requests
    assert (copied.messages, copied.tools, copied.sampling) == (asked.messages, asked.tools, asked.sampling)
    assert (asked.caller, copied.caller) == ("key-of-ann", "shadow-1"), "a copy takes no turn of its user"
    assert world.counted("answered") == 1.0


async def test_an_answer_names_the_replica_that_gave_it_and_a_dropped_copy_none(world: ShadowWorld) -> None:
    world.engine.answers_as, world.shadow_engine.answers_as = "one", "two"
    await world.say()
    assert ((await world.only_shadow()).engine_replica, world.only_record.engine_replica) == ("two", "one")
    world.recorder.shadows.clear()
    world.shadow_engine.fail_at, world.shadow_engine.failure = 0, EngineBusyError("full")
    await world.say("again")
    dropped = await world.only_shadow()
    assert (dropped.outcome, dropped.engine_replica) == (ShadowOutcome.DROPPED, "")


async def test_a_call_with_a_search_is_not_copied(world: ShadowWorld) -> None:
    await world.say(headers={"x-tidegate-search": "majority-of-2"})
    assert await world.settle() == []
    assert not world.shadow_engine.requests


async def test_nothing_that_counts_for_the_champion_sees_the_shadow(world: ShadowWorld) -> None:
    world.shadow_engine.fail_at = 1
    await world.say(user="ann")
    await world.only_shadow()
    assert world.observed == [(BASE_RELEASE, "key-of-ann", False)]
    assert world.only_record.release_id == BASE_RELEASE
    text = world._app.state.metrics.render().decode()  # type: ignore[union-attr]
    assert 'tidegate_generations_total{outcome="finished"} 1.0' in text
    assert 'tidegate_generations_total{outcome="engine_failed"}' not in text
    assert "tidegate_first_token_seconds_count 1.0" in text


async def test_the_copy_waits_until_the_users_answer_is_durable_and_delivered(world: ShadowWorld) -> None:
    world.recorder.hold = asyncio.Event()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        assert not world.shadow_engine.requests, "the copy was begun before the last byte left"
        sent.append(message)

    asking = asyncio.create_task(world.into_app(CHAT, json.dumps(ask()).encode(), {}, send))
    await until(lambda: world.recorder.waiting)
    assert not world.shadow_engine.requests
    world.recorder.hold.set()
    await asking
    assert sent
    assert (await world.only_shadow()).outcome is ShadowOutcome.ANSWERED


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"headers": {"x-tidegate-line": "side"}},
        {"model": NEXT_RELEASE},
        {"model": "nobody", "status": 404},
    ],
    ids=["without consent", "a side call", "another release by its id", "a call that was refused"],
)
async def test_calls_that_are_not_copied(world: ShadowWorld, fields: dict[str, Any]) -> None:
    await world.say(**fields)
    assert await world.settle() == []
    assert not world.shadow_engine.requests
    await world.say()
    assert (await world.only_shadow()).outcome is ShadowOutcome.ANSWERED


async def test_sealed_users_are_never_copied(world: ShadowWorld) -> None:
    world.split = Split.SEALED
    await world.say()
    assert await world.settle() == []
    world.split = Split.DEV
    await world.say()
    assert len(await world.settle()) == 1


async def test_an_answer_that_failed_or_is_given_again_is_not_copied(world: ShadowWorld) -> None:
    world.engine.fail_at = 1
    await world.say(status=502)
    world.engine.fail_at = None
    assert await world.settle() == []
    for _ in range(2):
        await world.say(headers={"idempotency-key": "k"})
    assert len(await world.settle()) == 1


async def test_an_episode_that_began_on_the_champion_before_is_not_copied(world: ShadowWorld) -> None:
    started: dict[str, Any] = {"headers": {"x-tidegate-episode": "e1"}, "tools": [CALCULATOR]}
    await world.say(**started)
    assert len(await world.settle()) == 1
    world.router.point_champion_at(NEXT_RELEASE)
    body = await world.say(**started)
    assert body["system_fingerprint"] == BASE_RELEASE, "the episode stays where it began"
    assert len(await world.settle()) == 1
    await world.say()
    assert len(await world.settle()) == 2


async def test_one_choice_is_asked_for_and_cut_as_the_users(world: ShadowWorld) -> None:
    world.shadow_engine.answer, world.shadow_engine.calls_per_answer = None, 3
    await world.say(n=3, tools=[CALCULATOR], parallel_tool_calls=False)
    answer = await world.only_shadow()
    assert world.shadow_engine.requests[0].sampling.n == 1
    assert [call["function"]["name"] for call in answer.tool_calls] == ["calculator"]
    assert answer.finish_reason is FinishReason.TOOL_CALLS


async def test_a_share_is_drawn_by_the_calls_id() -> None:
    world = ShadowWorld(share=0.25, shadow=ShadowSettings(max_calls=1000))
    for _ in range(200):
        await world.say()
    answers = await world.settle()
    assert {answer.interaction_id for answer in answers} == {
        record for record in world.recorder.interactions if world.route.shadow.takes(record)
    }
    assert 20 < len(answers) < 80


async def test_users_do_not_wait_for_a_shadow_that_does_not_answer() -> None:
    world = ShadowWorld(shadow=ShadowSettings(max_calls=2))
    world.shadow_engine.hold_at = 0
    for _ in range(5):
        await world.say()
    await until(lambda: len(world.recorder.shadows) == 3)
    assert {(one.outcome, one.reason) for one in world.recorder.shadows} == {(ShadowOutcome.DROPPED, "limit")}
    world.shadow_engine.go.set()
    assert [one.outcome for one in (await world.settle())[3:]] == [ShadowOutcome.ANSWERED] * 2
    assert (world.counted("limit"), world.counted("answered")) == (3.0, 2.0)


async def test_a_copy_is_broken_off_when_users_come() -> None:
    world = ShadowWorld(shadow=ShadowSettings(max_beside=1))
    world.shadow_engine.hold_at = 1
    await world.say()
    await until(lambda: world.shadow_engine.holding)
    world.engine.hold_at = 1
    first = asyncio.create_task(world.say())
    await until(lambda: world.engine.holding == 1)
    assert world.shadow_engine.holding == 1, "one user's choice is not too many"
    second = asyncio.create_task(world.say())
    assert (await world.only_shadow()).reason == "interrupted"
    assert world.shadow_engine.closed_early == 1
    world.engine.go.set()
    await asyncio.gather(first, second)
    await world.calls.close()
    assert len(world.recorder.shadows) == 3


async def test_no_copy_begins_while_users_keep_the_engine_busy() -> None:
    world = ShadowWorld(shadow=ShadowSettings(max_beside=1))
    world.engine.hold_at = 1
    slow = asyncio.create_task(world.say(n=2))
    await until(lambda: world.engine.holding)
    world.engine.hold_at = None
    await world.say()
    answer = await world.only_shadow()
    assert (answer.outcome, answer.reason, answer.seconds) == (ShadowOutcome.DROPPED, "busy", 0.0)
    assert not world.shadow_engine.requests
    world.engine.go.set()
    await slow
    assert len(await world.settle()) == 2


@pytest.mark.parametrize(
    ("failure", "outcome", "reason"),
    [
        (EngineBusyError("the queue is full"), ShadowOutcome.DROPPED, "engine_busy"),
        (RuntimeError("broken"), ShadowOutcome.FAILED, "engine_failed"),
    ],
)
async def test_a_fault_of_the_shadow_is_its_own(
    world: ShadowWorld, failure: Exception, outcome: ShadowOutcome, reason: str
) -> None:
    world.shadow_engine.fail_at, world.shadow_engine.failure = 0, failure
    await world.say()
    answer = await world.only_shadow()
    assert (answer.outcome, answer.reason, answer.text, answer.finish_reason) == (outcome, reason, "", None)
    assert world.counted(reason) == 1.0


async def test_an_answer_that_ends_in_the_middle_is_a_failure(world: ShadowWorld) -> None:
    world.shadow_engine.end_early = True
    await world.say()
    assert (await world.only_shadow()).reason == "engine_failed"


async def test_a_shadow_that_is_silent_too_long_has_failed(world: ShadowWorld) -> None:
    world.time_out_after(0.01)
    world.shadow_engine.hold_at = 0
    await world.say()
    answer = await world.only_shadow()
    assert (answer.outcome, answer.reason) == (ShadowOutcome.FAILED, "engine_timeout")
    assert world.shadow_engine.holding == 0


async def test_a_shadow_that_ends_takes_its_calls_along(world: ShadowWorld) -> None:
    world.shadow_engine.hold_at = 1
    await world.say()
    await until(lambda: world.shadow_engine.holding)
    assert world.router.adapters() == {None, NEXT_RELEASE, OTHER_RELEASE}
    assert world.router.end_shadow() is world.route
    assert OTHER_RELEASE in world.router.adapters(), "not unloaded while a call runs"
    assert (await world.only_shadow()).reason == "ended"
    assert OTHER_RELEASE not in world.router.adapters()
    await world.say()
    assert len(await world.settle()) == 1


async def test_a_server_that_stops_does_not_wait_for_copies(world: ShadowWorld) -> None:
    world.shadow_engine.hold_at = 1
    await world.say()
    await until(lambda: world.shadow_engine.holding)
    await world.calls.close()
    await world.say()
    assert [one.reason for one in await world.settle()] == ["stopping", "stopping"]
    assert (world.shadow_engine.holding, world.shadow_engine.closed_early) == (0, 1)


async def test_an_answer_that_cannot_be_recorded_is_counted(world: ShadowWorld) -> None:
    world.shadow_engine.hold_at = 0
    await world.say()
    world.recorder.failure = StoreError("the disk is gone")
    world.shadow_engine.go.set()
    assert await world.settle() == []
    assert world.counted("unrecorded") == 1.0


async def test_no_request_ends_up_in_the_shadow(world: ShadowWorld) -> None:
    body = await world.say(model=OTHER_RELEASE, status=404)
    assert OTHER_RELEASE not in body["error"]["message"].partition("choose one of")[2]
    assert OTHER_RELEASE not in [name for name, _ in world.router.models()]
