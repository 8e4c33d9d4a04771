"""A retried request is one record and one answer."""

from __future__ import annotations

import asyncio
import json

from gateway_world import BASE_RELEASE, CALCULATOR, NEXT_RELEASE, World, ask, running_world, until
from tidegate.config.settings import ServerSettings
from tidegate.core.errors import StoreError
from tidegate.core.types import FinishReason

KEY = {"Idempotency-Key": "key-1"}


async def test_a_repeated_request_gets_the_recorded_answer(world: World) -> None:
    async with world.client() as client:
        create = client.chat.completions.with_raw_response.create
        first = await create(**ask("hi", n=2, tools=[CALCULATOR]), extra_headers=KEY)
        world.router.point_champion_at(NEXT_RELEASE)
        world.now += 60
        second = await create(**ask("hi", n=2, tools=[CALCULATOR]), extra_headers=KEY)
    assert "x-tidegate-replayed" not in first.headers
    assert second.headers["x-tidegate-replayed"] == "true"
    assert second.headers["x-tidegate-release"] == BASE_RELEASE
    assert second.parse() == first.parse()
    assert len(world.engine.requests) == 1
    assert len(world.recorder.interactions) == 1


async def test_a_recorded_answer_may_be_repeated_as_a_stream(world: World) -> None:
    _, _, first = await world.post(ask("hi there", tools=[CALCULATOR]), idempotency_key="k")
    _, headers, text = await world.post(
        ask("hi there", tools=[CALCULATOR], stream=True, stream_options={"include_usage": True}), idempotency_key="k"
    )
    assert headers["x-tidegate-replayed"] == "true"
    events = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2]]
    assert text.endswith("data: [DONE]\n\n")
    assert {event["id"] for event in events} == {first["id"]}
    calls = [c for e in events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["id"] for call in calls] == ["call_0_0"]
    assert events[-1]["usage"] == first["usage"]
    assert len(world.engine.requests) == 1


async def test_logprobs_of_a_repeated_answer_are_null_not_invented(world: World) -> None:
    await world.post(ask("hi", logprobs=True), idempotency_key="k")
    _, _, again = await world.post(ask("hi", logprobs=True), idempotency_key="k")
    assert again["choices"][0]["logprobs"] is None


async def test_the_sdk_retry_after_a_failure_is_one_record(world: World) -> None:
    """The SDK repeats a 503 by itself, with the same key; by then the store is back."""
    world.recorder.failure = StoreError("the disk is full")
    async with world.client(max_retries=2) as client, asyncio.TaskGroup() as tasks:
        request = tasks.create_task(client.chat.completions.create(**ask("hi"), extra_headers=KEY))
        await until(lambda: len(world.engine.requests) == 1)
        await until(lambda: world.engine.finished == 1)
        world.recorder.failure = None
        completion = await request
    assert completion.choices[0].message.content == "echo: hi"
    assert list(world.recorder.interactions) == [completion.id]


async def test_a_concurrent_duplicate_waits_for_the_first(world: World) -> None:
    world.engine.hold_at = 1
    async with world.client() as client, asyncio.TaskGroup() as tasks:
        create = client.chat.completions.create
        requests = [tasks.create_task(create(**ask("hi"), extra_headers=KEY)) for _ in range(4)]
        await until(lambda: world.engine.holding == 1)
        other = tasks.create_task(create(**ask("something else"), extra_headers=KEY))
        await until(lambda: world.engine.holding == 2)
        assert not any(request.done() for request in requests)
        world.engine.go.set()
    assert len({request.result().id for request in requests}) == 1
    assert other.result().choices[0].message.content == "echo: something else"
    assert len(world.engine.requests) == 2
    assert len(world.recorder.interactions) == 2


async def test_a_duplicate_takes_over_when_the_first_client_goes_away(world: World) -> None:
    world.engine.hold_at = 2
    async with world.client() as client, asyncio.TaskGroup() as tasks:
        create = client.chat.completions.create
        first = asyncio.create_task(create(**ask("hi"), extra_headers=KEY))
        await until(lambda: world.engine.holding == 1)
        second = tasks.create_task(create(**ask("hi"), extra_headers=KEY))
        first.cancel()
        await until(lambda: world.engine.closed_early == 1)
        await until(lambda: world.engine.holding == 1)
        world.engine.go.set()
        answer = await second
    base, retry = world.recorder.interactions.values()
    assert base.choices[0].finish_reason is FinishReason.CANCELLED
    assert retry.choices[0].finish_reason is FinishReason.STOP
    assert answer.id == retry.id == f"{base.id}-2"
    assert answer.choices[0].message.content == "echo: hi"


async def test_ids_depend_on_key_caller_and_request() -> None:
    async with running_world(settings=ServerSettings(api_keys=("a", "b"))) as world:
        ids: list[str] = []
        for key, caller, user, text in [
            ("k", "a", "u", "hi"),
            ("other", "a", "u", "hi"),
            ("k", "b", "u", "hi"),
            ("k", "a", "v", "hi"),
            ("k", "a", "u", "ho"),
        ]:
            _, headers, body = await world.post(
                ask(text, user=user), idempotency_key=key, authorization=f"Bearer {caller}"
            )
            assert "x-tidegate-replayed" not in headers
            ids.append(body["id"])
        assert len(set(ids)) == 5
        assert all(i.startswith("chatcmpl-") for i in ids)


async def test_without_a_key_equal_requests_are_two(world: World) -> None:
    _, _, first = await world.post(ask("hi"))
    _, _, second = await world.post(ask("hi"))
    assert first["id"] != second["id"]
    assert len(world.recorder.interactions) == 2


async def test_without_consent_there_is_nothing_to_repeat(world: World) -> None:
    bodies = [(await world.post(ask("hi", store=False), idempotency_key="k"))[2] for _ in range(2)]
    assert [body["choices"][0]["message"]["content"] for body in bodies] == ["echo: hi", "echo: hi"]
    assert bodies[0]["id"] == bodies[1]["id"]
    assert len(world.recorder.interactions) == 1
