"""Clients that leave, engines that fail or hang, recorders that cannot record."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from openai import APIError, APIStatusError, InternalServerError, RateLimitError
from starlette.types import Message

from fake_engine import FakeEngine, token_id
from gateway_world import BASE_RELEASE, NEXT_RELEASE, World, ask, running_world, until
from tidegate.config.settings import ServerSettings
from tidegate.core.errors import (
    AdapterError,
    ConfigError,
    ConflictError,
    EngineBusyError,
    EngineError,
    EngineTimeoutError,
    RequestError,
    StoreError,
)
from tidegate.core.types import FinishReason, GenerationEvent, TokenDelta
from tidegate.gateway.serve import bind

STREAMS = pytest.mark.parametrize("stream", [False, True])


@STREAMS
async def test_a_client_that_leaves_cancels_the_engine_and_is_recorded(world: World, stream: bool) -> None:
    world.engine.hold_at = 3
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(
            session.post(f"{world.url}/v1/chat/completions", json=ask("one two three", stream=stream))
        )
        await until(lambda: world.engine.holding == 1)
        if stream:
            (await request).close()
        else:
            request.cancel()
        await until(lambda: world.engine.closed_early == 1)
        await until(lambda: world.recorder.interactions)
    (choice,) = world.only_record.choices
    assert choice.finish_reason is FinishReason.CANCELLED
    assert choice.token_ids == (token_id("echo: "), token_id("one "))
    assert choice.text == "echo: one "
    assert not world.router.in_use(BASE_RELEASE)


async def test_a_client_that_leaves_before_the_first_token_leaves_an_empty_record(world: World) -> None:
    world.engine.hold_at = 0
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(f"{world.url}/v1/chat/completions", json=ask(n=2)))
        await until(lambda: world.engine.holding == 1)
        request.cancel()
        await until(lambda: world.recorder.interactions)
    assert [choice.finish_reason for choice in world.only_record.choices] == [FinishReason.CANCELLED] * 2
    assert [choice.index for choice in world.only_record.choices] == [0, 1]


async def test_a_client_that_leaves_while_its_answer_is_recorded_changes_nothing(world: World) -> None:
    world.recorder.hold = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(f"{world.url}/v1/chat/completions", json=ask("hi")))
        await until(lambda: world.recorder.waiting == 1)
        request.cancel()
        await asyncio.wait({request})
    world.recorder.hold.set()
    await until(lambda: world.recorder.interactions)
    assert world.only_record.choices[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("failure", [StoreError("the disk is full"), OSError("disk"), RuntimeError("bug")])
async def test_a_recorder_that_fails_withholds_a_json_answer(world: World, failure: Exception) -> None:
    world.recorder.failure = failure
    async with world.client() as client:
        with pytest.raises(InternalServerError, match="could not be recorded, so it is withheld") as caught:
            await client.chat.completions.create(**ask("hi"))
    assert caught.value.status_code == 503
    assert caught.value.code == "store_unavailable"
    assert caught.value.response.headers["retry-after"] == "1"
    assert "echo" not in caught.value.response.text


async def test_a_recorder_that_fails_ends_a_stream_with_an_error_and_no_done(world: World) -> None:
    world.recorder.failure = StoreError("the disk is full")
    _, _, text = await world.post(ask("hi", stream=True))
    assert "[DONE]" not in text
    assert '"finish_reason":"stop"' not in text
    last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["code"] == "store_unavailable"
    assert last["error"]["type"] == "server_error"
    async with world.client() as client:
        stream = await client.chat.completions.create(**ask("hi"), stream=True)
        with pytest.raises(APIError, match="could not be recorded"):
            _ = [chunk async for chunk in stream]


async def test_a_recorder_that_refuses_the_call_is_the_callers_error(world: World) -> None:
    world.recorder.failure = ConflictError("episode 'e' belongs to another user; choose another episode id")
    status, _, body = await world.post(ask("hi"))
    assert status == 409
    assert body["error"]["message"].startswith("episode 'e' belongs")


@STREAMS
@pytest.mark.parametrize(
    ("failure", "expected", "code"),
    [
        (EngineBusyError("256 choices wait already; repeat the request later"), 429, "engine_busy"),
        (EngineError("the engine broke"), 502, "engine_failed"),
        (EngineTimeoutError("no answer from the replica"), 504, "engine_timeout"),
        (AdapterError("adapter 'x' is not loaded"), 502, "engine_failed"),
        (RequestError("the prompt has 5000 tokens; at most 2048 fit"), 400, "invalid_request"),
        (RuntimeError("CUDA says no at /home/secret"), 502, "engine_failed"),
    ],
)
async def test_an_engine_that_fails_at_once_is_a_plain_status(
    failure: Exception, expected: int, code: str, stream: bool
) -> None:
    world = World(engine=FakeEngine(fail_at=0, failure=failure))
    status, headers, body = await world.direct("/v1/chat/completions", json.dumps(ask(stream=stream)).encode())
    error = json.loads(body)["error"]
    assert status == expected
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert headers["x-tidegate-release"] == BASE_RELEASE
    assert headers.get("retry-after") == ("1" if expected == 429 else None)
    assert len(world.recorder.interactions) == (expected == 504)  # a call that ran out of time is recorded, if empty
    assert not world.router.in_use(BASE_RELEASE)


async def test_the_sdk_sees_a_full_queue_as_a_rate_limit(world: World) -> None:
    world.engine.fail_at, world.engine.failure = 0, EngineBusyError("the queue is full")
    async with world.client() as client:
        with pytest.raises(RateLimitError, match="the queue is full"):
            await client.chat.completions.create(**ask(), stream=True)


@STREAMS
async def test_an_engine_that_fails_half_way_is_recorded_as_far_as_it_came(world: World, stream: bool) -> None:
    world.engine.fail_at, world.engine.failure = 2, EngineError("the replica died")
    status, _, body = await world.post(ask("hi", stream=stream))
    error = json.loads(body.split("\n\n")[-2].removeprefix("data: "))["error"] if stream else body["error"]
    assert status == (200 if stream else 502)
    assert error["code"] == "engine_failed"
    assert error["message"] == "the replica died"
    assert "[DONE]" not in body
    (choice,) = world.only_record.choices
    assert (choice.text, choice.finish_reason) == ("echo: ", FinishReason.CANCELLED)


async def test_an_engine_that_forgets_a_choice_is_an_error(world: World) -> None:
    world.engine.end_early = True
    status, _, body = await world.post(ask("hi", n=3))
    assert status == 502
    assert "after 2 of 3 choices" in body["error"]["message"]


@STREAMS
async def test_an_engine_that_hangs_is_ended_and_recorded(stream: bool) -> None:
    async with running_world(settings=ServerSettings(request_timeout_s=0.2)) as world:
        world.engine.hold_at = 2
        status, _, body = await world.post(ask("hi", stream=stream))
        error = json.loads(body.split("\n\n")[-2].removeprefix("data: "))["error"] if stream else body["error"]
        assert status == (200 if stream else 504)
        assert error["code"] == "engine_timeout"
        assert "within 0.2 s ('server.request_timeout_s')" in error["message"]
        assert "[DONE]" not in body
        assert world.engine.closed_early == 1
        assert world.only_record.choices[0].text == "echo: "
        assert world.only_record.choices[0].finish_reason is FinishReason.CANCELLED


async def test_a_hang_before_the_first_token_is_a_504_in_both_modes() -> None:
    async with running_world(settings=ServerSettings(request_timeout_s=0.1)) as world:
        world.engine.hold_at = 0
        for stream in (False, True):
            async with world.client() as client:
                with pytest.raises(APIStatusError) as caught:
                    await client.chat.completions.create(**ask(), stream=stream)
            assert caught.value.status_code == 504
        assert len(world.recorder.interactions) == 2


async def test_a_waiting_duplicate_runs_out_of_time_too() -> None:
    async with running_world(settings=ServerSettings(request_timeout_s=0.3)) as world:
        world.engine.hold_at = 1
        answers = await asyncio.gather(*(world.post(ask("hi"), idempotency_key="k") for _ in range(2)))
        assert [status for status, _, _ in answers] == [504, 504]


async def test_a_failed_lookup_of_a_retried_request_is_503(world: World) -> None:
    class Away:
        async def find(self, interaction_id: str) -> Any:
            raise StoreError(f"cannot read {interaction_id!r}")

    object.__setattr__(world.deps, "recorder", Away())
    status, headers, body = await world.post(ask("hi"), idempotency_key="k")
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "store_unavailable", "1")
    assert not world.engine.requests


async def test_a_swap_fails_and_delays_no_request(world: World) -> None:
    """Requests in flight end on the release that they began on; new ones take the new one."""
    world.engine.hold_at = 1
    async with world.client() as client, asyncio.TaskGroup() as tasks:
        create = client.chat.completions.create
        before = [tasks.create_task(create(**ask(f"before {i}"))) for i in range(8)]
        await until(lambda: world.engine.holding == 8)
        world.router.point_champion_at(NEXT_RELEASE)
        after = [tasks.create_task(create(**ask(f"after {i}"))) for i in range(8)]
        await until(lambda: world.engine.holding == 16)
        assert not world.router.remove(BASE_RELEASE)
        world.engine.go.set()
    assert {task.result().system_fingerprint for task in before} == {BASE_RELEASE}
    assert {task.result().system_fingerprint for task in after} == {NEXT_RELEASE}
    assert world.router.remove(BASE_RELEASE)


async def test_a_stop_lets_requests_in_flight_end() -> None:
    stack = AsyncExitStack()
    world = await stack.enter_async_context(running_world())
    world.engine.hold_at = 2
    answer = asyncio.create_task(world.post(ask("hi", stream=True)))
    await until(lambda: world.engine.holding == 1)
    stop = asyncio.create_task(stack.aclose())
    await until(lambda: is_free(world.port))
    assert not stop.done()
    world.engine.go.set()
    status, _, body = await answer
    assert status == 200
    assert body.endswith("data: [DONE]\n\n")
    assert world.only_record.choices[0].finish_reason is FinishReason.STOP
    await stop


async def test_a_stop_that_cannot_wait_records_what_it_cuts_short() -> None:
    stack = AsyncExitStack()
    world = await stack.enter_async_context(running_world(drain_s=0.0))
    world.engine.hold_at = 2
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{world.url}/v1/chat/completions", json=ask("hi", stream=True))
        await until(lambda: world.engine.holding == 1)
        await stack.aclose()
        text = await response.text()
    assert '"code":"server_stopping"' in text
    assert "[DONE]" not in text
    assert world.only_record.choices[0].finish_reason is FinishReason.CANCELLED
    assert world.only_record.choices[0].text == "echo: "


async def test_a_stop_waits_for_the_records_of_what_it_cut_short() -> None:
    stack = AsyncExitStack()
    world = await stack.enter_async_context(running_world(drain_s=0.0))
    world.engine.hold_at = 2
    world.recorder.hold = asyncio.Event()
    answer = asyncio.create_task(world.post(ask("hi")))
    await until(lambda: world.engine.holding == 1)
    stop = asyncio.create_task(stack.aclose())
    await until(lambda: world.recorder.waiting == 1)
    await until(lambda: is_free(world.port))
    assert not stop.done()
    world.recorder.hold.set()
    await stop
    assert world.only_record.choices[0].text == "echo: "
    status, headers, body = await answer
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "server_stopping", "1")


class ClosableEvents:
    """Not a generator: nothing but an explicit ``aclose`` ends it."""

    def __init__(self) -> None:
        self.closed = False

    def __aiter__(self) -> ClosableEvents:
        return self

    async def __anext__(self) -> GenerationEvent:
        return TokenDelta(choice=0, token_ids=(1,), logprobs=(-1.0,), text="word ")

    async def aclose(self) -> None:
        self.closed = True


async def test_a_client_that_does_not_read_is_cut_off_and_its_generation_closed() -> None:
    """The engine's iterator is closed even when the request is stuck in sending, not in waiting for tokens."""
    world = World(settings=ServerSettings(request_timeout_s=0.2))
    events = ClosableEvents()
    object.__setattr__(world.engine, "generate", lambda request: events)
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        if not events.closed and len(sent) == 3:
            await asyncio.get_running_loop().create_future()
        sent.append(message.get("body", b""))

    await world.into_app("/v1/chat/completions", json.dumps(ask("hi", stream=True)).encode(), {}, send)
    assert events.closed
    assert b"engine_timeout" in b"".join(sent)
    assert world.only_record.choices[0].finish_reason is FinishReason.CANCELLED


def is_free(port: int) -> bool:
    """Nobody listens; found out without opening a connection that would itself be waited for."""
    try:
        bind("127.0.0.1", port, option="--port").close()
    except ConfigError:
        return False
    return True
