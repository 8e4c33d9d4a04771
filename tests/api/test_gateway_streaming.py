"""Server-sent events, through the official SDK and on the wire."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from fake_engine import END_TOKEN, token_id
from gateway_world import BASE_RELEASE, CALCULATOR, World, ask, until


async def events_of(world: World, body: dict[str, Any]) -> list[Any]:
    """The JSON of every event; the last is the text ``[DONE]`` when the stream ended well."""
    status, headers, text = await world.post({**body, "stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert text.endswith("\n\n")
    data = [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_the_sdk_reads_role_content_finish_and_usage(world: World) -> None:
    async with world.client() as client:
        stream = await client.chat.completions.create(
            **ask("one two"), stream=True, stream_options={"include_usage": True}
        )
        assert stream.response.headers["x-tidegate-release"] == BASE_RELEASE
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks[1:-2]] == ["echo: ", "one ", "two"]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 4 + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 4)
    assert {chunk.id for chunk in chunks} == {world.only_record.id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.system_fingerprint for chunk in chunks} == {BASE_RELEASE}


async def test_the_sync_sdk_streams_too(world: World) -> None:
    def use() -> str:
        with world.sync_client() as client:
            stream = client.chat.completions.create(**ask("hi"), stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(use) == "echo: hi"


async def test_the_sdk_stream_helper_accumulates_tool_calls(world: World) -> None:
    world.engine.calls_per_answer = 2
    async with world.client() as client, client.chat.completions.stream(**ask("2+2", tools=[CALCULATOR])) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("call_0_0", "calculator", '{"i": 0}'),
        ("call_1_0", "calculator", '{"i": 1}'),
    ]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_tool_call_deltas_carry_index_id_name_and_arguments(world: World) -> None:
    world.engine.calls_per_answer = 2
    events = await events_of(world, ask("2+2", tools=[CALCULATOR]))
    deltas = [call for e in events[:-1] for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
    assert [delta["index"] for delta in deltas] == [0, 1]
    assert deltas[1] == {
        "index": 1,
        "id": "call_1_0",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"i": 1}'},
    }


async def test_parallel_tool_calls_false_streams_one_call(world: World) -> None:
    world.engine.calls_per_answer = 3
    events = await events_of(world, ask("2+2", tools=[CALCULATOR], parallel_tool_calls=False))
    assert sum(len(c["delta"].get("tool_calls", ())) for e in events[:-1] for c in e["choices"]) == 1


async def test_content_arrives_before_the_answer_is_complete(world: World) -> None:
    world.engine.hold_at = 2
    async with world.client() as client:
        stream = await client.chat.completions.create(**ask("hi"), stream=True)
        iterator = aiter(stream)
        await anext(iterator)
        assert (await anext(iterator)).choices[0].delta.content == "echo: "
        assert not world.recorder.interactions
        world.engine.go.set()
        rest = [chunk async for chunk in iterator]
    assert rest[0].choices[0].delta.content == "hi"


async def test_choices_stream_apart_and_each_one_finishes(world: World) -> None:
    events = await events_of(world, ask("hi", n=2))
    texts = {0: "", 1: ""}
    finished = []
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finished.append((choice["index"], choice["finish_reason"]))
    assert texts == {0: "echo: hi", 1: "echo: hi"}
    assert finished == [(0, "stop"), (1, "stop")]
    assert events[-1] == "[DONE]"


async def test_usage_is_absent_unless_asked_for(world: World) -> None:
    events = await events_of(world, ask("hi"))
    assert all("usage" not in event for event in events[:-1])


async def test_logprobs_and_token_ids_cover_every_token(world: World) -> None:
    events = await events_of(world, ask("hi", logprobs=True, top_logprobs=1, return_token_ids=True))
    assert events[0]["prompt_token_ids"] == [1, token_id("hi")]
    ids = [i for e in events[:-1] for c in e["choices"] for i in c.get("token_ids", ())]
    assert ids == [token_id("echo: "), token_id("hi"), END_TOKEN]
    entries = [p for e in events[:-1] for c in e["choices"] if c["logprobs"] for p in c["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == ["echo: ", "hi", ""]
    assert entries[0]["top_logprobs"] == [{"token": "echo: 0", "logprob": -0.25, "bytes": list(b"echo: 0")}]


async def test_finish_usage_and_done_wait_for_the_record(world: World) -> None:
    world.recorder.hold = asyncio.Event()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{world.url}/v1/chat/completions", json=ask("hi", stream=True)) as response,
    ):
        await until(lambda: world.recorder.waiting == 1)
        seen = b""
        while b'"content":"hi"' not in seen:
            seen += await response.content.readany()
        assert b"[DONE]" not in seen
        assert b'"finish_reason":"stop"' not in seen
        world.recorder.hold.set()
        seen += await response.content.read()
    assert seen.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"stop"' in seen


async def test_a_json_body_waits_for_the_record(world: World) -> None:
    world.recorder.hold = asyncio.Event()
    async with world.client() as client, asyncio.TaskGroup() as tasks:
        request = tasks.create_task(client.chat.completions.create(**ask("hi")))
        await until(lambda: world.recorder.waiting == 1)
        assert not request.done()
        world.recorder.hold.set()
        assert (await request).choices[0].message.content == "echo: hi"
