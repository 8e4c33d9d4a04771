"""The gateway before somebody else's server, through the official client: answers, errors, records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway_world import CALCULATOR, MODEL, World, ask, running_world, until
from tidegate.core.types import FinishReason
from upstream_kit import openai_engine, sglang_engine, vllm_engine
from upstream_server import Faults, UpstreamServer

MESSAGES: Any = [{"role": "user", "content": "what is two plus two?"}]
TOOLS: Any = [CALCULATOR]


@asynccontextmanager
async def before_vllm(**options: Any) -> AsyncGenerator[tuple[World, UpstreamServer]]:
    async with vllm_engine(**options) as (engine, server), running_world(engine=engine) as world:
        yield world, server


@asynccontextmanager
async def before_sglang(**options: Any) -> AsyncGenerator[tuple[World, UpstreamServer]]:
    async with sglang_engine(**options) as (engine, server), running_world(engine=engine) as world:
        yield world, server


@asynccontextmanager
async def before_sglang_parsing(**options: Any) -> AsyncGenerator[tuple[World, UpstreamServer]]:
    async with before_sglang(tool_call_parser="qwen", **options) as found:
        yield found


@asynccontextmanager
async def before_openai(**options: Any) -> AsyncGenerator[tuple[World, UpstreamServer]]:
    async with (
        openai_engine(**options) as (engine, server),
        running_world(engine=engine, passes_fields_on=True) as world,
    ):
        yield world, server


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> tuple[str, list[Any], Any]:
    """Text, chunks and usage of a stream."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, chunks, chunks[-1].usage


@pytest.mark.parametrize("before", [before_vllm, before_sglang, before_sglang_parsing, before_openai])
async def test_a_body_and_a_stream_say_the_same(before: Any) -> None:
    async with before() as (world, _), world.client() as client:
        options = {"max_tokens": 20, "temperature": 1.0, "seed": 3}
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
        text, _, usage = await streamed(client, **options)
        assert text == whole.choices[0].message.content
        assert text
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens > 0
        assert usage.prompt_tokens == whole.usage.prompt_tokens > 0


@pytest.mark.parametrize("before", [before_vllm, before_sglang_parsing, before_openai])
async def test_tools_are_called_through_the_upstream(before: Any) -> None:
    async with before() as (world, server), world.client() as client:
        first = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=200)
        (called,) = first.choices[0].message.tool_calls or ()
        assert (called.function.name, called.function.arguments) == ("calculator", '{"i": 7}')
        assert first.choices[0].finish_reason == "tool_calls"
        _, chunks, _ = await streamed(client, tools=TOOLS, max_tokens=200)
        calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.function.name for call in calls] == ["calculator"]
        turn = [*MESSAGES, first.choices[0].message.model_dump(exclude_none=True)]
        result: Any = {"role": "tool", "tool_call_id": called.id, "content": "49"}
        await client.chat.completions.create(model=MODEL, messages=[*turn, result], tools=TOOLS, max_tokens=5)
        assert server.body["messages"][-1] == result
        record = world.recorder.interactions[first.id]
        exact = before is not before_openai
        assert (record.choices[0].token_exact, bool(record.choices[0].token_ids)) == (exact, exact)
        assert len(record.choices[0].logprobs) == len(record.choices[0].token_ids)


async def test_an_answer_without_token_ids_is_recorded_as_such_and_counted() -> None:
    async with before_openai() as (world, _), world.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9)
        record = world.only_record
        (choice,) = record.choices
        assert choice.text == answer.choices[0].message.content
        assert (choice.token_exact, choice.token_ids, choice.logprobs, record.prompt_token_ids) == (False, (), (), ())
        assert not record.sampling.unfiltered
        assert "tidegate_interactions_without_tokens_total 1.0" in (await world.call("GET", "/metrics"))[2]


async def test_usage_is_left_out_where_nobody_counted() -> None:
    async with before_openai(faults=Faults(usage=False)) as (world, _), world.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9)
        assert answer.usage is None


async def test_a_plain_upstream_gets_the_clients_own_fields_and_nothing_of_who_asks() -> None:
    async with before_openai(strict=False) as (world, server), world.client() as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            max_completion_tokens=5,
            service_tier="flex",
            response_format={"type": "json_object"},
            extra_body={"min_p": 0.1},
            user="alice",
            metadata={"tidegate_episode": "e-1"},
            store=True,
        )
        body = server.body
        passed = {name: body.get(name) for name in ("tool_choice", "max_completion_tokens", "service_tier", "min_p")}
        assert passed == {
            "tool_choice": "required", "max_completion_tokens": 5, "service_tier": "flex", "min_p": 0.1,
        }  # fmt: skip
        assert body["response_format"] == {"type": "json_object"}
        assert body["model"] == "tiny"
        assert not {"user", "metadata", "store", "max_tokens", "temperature", "safety_identifier"} & set(body)
        assert not any("alice" in value for value in server.headers[-1].values())


async def test_vllm_gets_no_field_that_would_change_what_is_sampled_behind_the_record() -> None:
    async with before_vllm() as (world, server), world.client() as client:
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=5, extra_body={"min_p": 0.9, "logit_bias": {"5": 100}}
        )
        assert server.body["min_p"] == 0.0
        assert "logit_bias" not in server.body
        assert world.only_record.sampling.unfiltered
        assert "tool_choice" not in server.body


NAMED: Any = {"type": "function", "function": {"name": "calculator"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("before", [before_vllm, before_sglang, before_openai])
async def test_a_call_that_must_be_made_is_asked_of_the_upstream(before: Any, choice: Any) -> None:
    async with before() as (world, server), world.client() as client:
        asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
        await client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        assert (server.body["tool_choice"], server.body["parallel_tool_calls"]) == (choice, False)
        assert not world.only_record.sampling.unfiltered  # no sample of the policy
        await client.chat.completions.create(**asked)
        assert not {"tool_choice", "parallel_tool_calls"} & set(server.body)
        with pytest.raises(openai.BadRequestError, match="offer what must be called"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, tool_choice=choice)


async def test_token_ids_and_logprobs_reach_the_client_that_asks() -> None:
    async with before_vllm() as (world, _):
        status, _, body = await world.post(
            ask(max_tokens=4, temperature=1.0, seed=1, logprobs=True, top_logprobs=2, return_token_ids=True)
        )
        assert status == 200
        choice = body["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 4
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 4
        assert tuple(choice["token_ids"]) == world.only_record.choices[0].token_ids
        assert tuple(body["prompt_token_ids"]) == world.only_record.prompt_token_ids


async def test_logprobs_of_a_plain_upstream_reach_the_client_that_asks() -> None:
    async with before_openai() as (world, _):
        _, _, body = await world.post(ask(max_tokens=4, logprobs=True, top_logprobs=1))
        entries = body["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [1] * 4
        assert world.only_record.choices[0].logprobs == ()


@pytest.mark.parametrize(
    ("status", "seen", "code"),
    [
        (429, 429, "engine_busy"),
        (503, 503, "engine_unavailable"),
        (500, 502, "engine_failed"),
        (400, 400, "invalid_request"),
    ],
)
async def test_a_refusal_reaches_the_client_in_openais_shape(status: int, seen: int, code: str) -> None:
    faults = Faults(status=status, headers={"Retry-After": "17"}, message="because")
    for stream in (False, True):
        async with before_vllm(faults=faults) as (world, _):
            got, headers, body = await world.post(ask(stream=stream))
            assert (got, body["error"]["code"]) == (seen, code)
            assert "because" in body["error"]["message"]
            assert headers.get("retry-after") == ("17" if status in (429, 503) else None)
            assert world.recorder.interactions == {}


async def test_an_upstream_that_hangs_is_504() -> None:
    async with before_vllm(limits={"read_timeout_s": 0.2}, faults=Faults(hold_after=0)) as (world, _):
        status, _, body = await world.post(ask())
        assert (status, body["error"]["code"]) == (504, "engine_timeout")


@pytest.mark.parametrize("fault", [{"reset_after": 4}, {"end_after": 4}, {"garbage_after": 4}, {"error_after": 4}])
async def test_an_answer_that_breaks_is_recorded_in_part_and_told(fault: dict[str, int]) -> None:
    async with before_vllm(faults=Faults(**fault)) as (world, _):
        status, _, body = await world.post(ask(max_tokens=20, temperature=1.0, seed=5))
        assert (status, body["error"]["code"]) == (502, "engine_failed")
        (choice,) = world.only_record.choices
        assert (choice.finish_reason, len(choice.text)) == (FinishReason.CANCELLED, 4)
        assert (choice.token_exact, choice.token_ids) == (False, ())
        _, _, text = await world.post(ask(max_tokens=20, temperature=1.0, seed=5, stream=True))
        assert "engine_failed" in text
        assert "data: [DONE]" not in text


@pytest.mark.parametrize("before", [before_vllm, before_openai])
@pytest.mark.parametrize("stream", [False, True])
async def test_halves_of_characters_are_answered_and_recorded_alike(before: Any, stream: bool) -> None:
    faults = Faults(contents=["a", "\ud83d", "\ude00", "b", "\ude00"])
    async with before(faults=faults) as (world, _), world.client() as client:
        options = {"max_tokens": 5, "temperature": 1.0, "seed": 5}
        if stream:
            text, _, _ = await streamed(client, **options)
        else:
            whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
            text = whole.choices[0].message.content or ""
        assert text == world.only_record.choices[0].text == "a\U0001f600b\ufffd"


@pytest.mark.parametrize("before", [before_vllm, before_openai])
async def test_a_client_that_goes_away_cancels_the_call_behind_us(before: Any) -> None:
    async with before(faults=Faults(hold_after=3)) as (world, server), world.client() as client:
        for stream in (False, True):
            asked = asyncio.create_task(
                client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, stream=stream)
            )
            await until(lambda: server.holding == 1)
            if stream:
                await (await asked).close()
            else:
                asked.cancel()
            await until(lambda wanted=1 + stream: server.cancelled == wanted)
        await until(lambda: len(world.recorder.interactions) == 2)
        for record in world.recorder.interactions.values():
            assert record.choices[0].finish_reason is FinishReason.CANCELLED
            assert len(record.choices[0].text) == 3
            assert (record.choices[0].token_exact, record.choices[0].token_ids) == (False, ())


async def test_the_record_is_durable_before_the_last_byte() -> None:
    async with before_vllm() as (world, server), world.client() as client:
        world.recorder.hold = asyncio.Event()
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, stream=True)
        heard: list[Any] = []

        async def listen() -> None:
            heard.extend([chunk async for chunk in stream])

        listening = asyncio.create_task(listen())
        await until(lambda: world.recorder.waiting == 1)
        assert server.answered == 1
        assert not listening.done()
        world.recorder.hold.set()
        await listening
        assert heard[-1].choices[0].finish_reason is not None
        assert world.only_record.choices[0].token_exact
