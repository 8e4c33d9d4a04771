"""Chat completions as one JSON body, through the official SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError
from pydantic import BaseModel

from fake_engine import END_TOKEN, token_id
from gateway_world import BASE_RELEASE, CALCULATOR, MODEL, NEXT_RELEASE, NOW, World, ask, running_world
from tidegate.core.chat import ANY_TOOL
from tidegate.core.hashing import ordered_json
from tidegate.core.types import FinishReason, Split


async def test_answers_the_async_sdk_and_says_which_release_did(world: World) -> None:
    async with world.client() as client:
        raw = await client.chat.completions.with_raw_response.create(**ask("hello there"))
    completion = raw.parse()
    assert completion.choices[0].message.content == "echo: hello there"
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].logprobs is None
    assert completion.id.startswith("chatcmpl-")
    assert completion.object == "chat.completion"
    assert completion.created == int(NOW)
    assert completion.model == MODEL
    assert completion.system_fingerprint == BASE_RELEASE
    assert raw.headers["x-tidegate-release"] == BASE_RELEASE
    assert raw.headers["x-tidegate-episode"] == completion.id
    assert raw.headers["x-request-id"]


async def test_answers_the_sync_sdk(world: World) -> None:
    def use() -> str | None:
        with world.sync_client() as client:
            return client.chat.completions.create(**ask("hello")).choices[0].message.content

    assert await asyncio.to_thread(use) == "echo: hello"


async def test_usage_counts_token_ids(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("one two three"))
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 4  # a start token and three words
    assert completion.usage.completion_tokens == 5  # four words and the end of turn
    assert completion.usage.total_tokens == 9


async def test_record_is_token_exact(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("hi", temperature=0.5, seed=3))
    record = world.only_record
    assert record.id == completion.id
    assert record.prompt_token_ids == (1, token_id("hi"))
    (choice,) = record.choices
    assert choice.token_ids == (token_id("echo: "), token_id("hi"), END_TOKEN)
    assert choice.logprobs == (-0.25, -0.25, -0.125)
    assert choice.text == "echo: hi"
    assert choice.finish_reason is FinishReason.STOP
    assert record.messages == ({"role": "user", "content": "hi"},)
    assert record.release_id == BASE_RELEASE
    assert record.engine_replica == "fake-0"  # or the replica that says that it answers
    world.engine.answers_as = "fake-0/2"
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("hi"))
    assert world.recorder.interactions[completion.id].engine_replica == "fake-0/2"
    assert record.created_at == NOW
    assert record.split is Split.TRAIN
    assert record.main_line
    assert record.consent


async def test_latency_is_measured_on_the_monotonic_clock(world: World) -> None:
    world.engine.hold_at = 1
    async with world.client() as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(client.chat.completions.create(**ask()))
        while not world.engine.holding:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        world.now += 7.5
        world.engine.go.set()
    assert world.only_record.latency_s == 7.5
    assert world.only_record.created_at == NOW


async def test_every_sampling_field_reaches_the_engine(world: World) -> None:
    async with world.client() as client:
        await client.chat.completions.create(
            **ask(
                temperature=0.25,
                top_p=0.5,
                max_completion_tokens=7,
                max_tokens=99,
                n=2,
                seed=11,
                stop=["END", "STOP"],
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                logprobs=True,
                top_logprobs=3,
                extra_body={"top_k": 40},
            )
        )
    sampling = world.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 40)
    assert (sampling.max_tokens, sampling.n, sampling.seed) == (7, 2, 11)
    assert sampling.stop == ("END", "STOP")
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.top_logprobs) == (0.5, -0.5, 3)
    assert world.only_record.sampling == sampling


async def test_stop_may_be_one_string_and_top_k_may_be_off_in_vllm_words(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("a b c", stop=" b", extra_body={"top_k": -1}))
    assert completion.choices[0].message.content == "echo: a"
    assert world.engine.requests[0].sampling.top_k == 0


async def test_max_tokens_cuts_with_finish_reason_length(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("a b c", max_tokens=2))
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.content == "echo: a "
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2


async def test_n_choices_come_by_index(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("hi", n=3))
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert {choice.message.content for choice in completion.choices} == {"echo: hi"}
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 9
    assert len(world.only_record.choices) == 3


async def test_logprobs_have_openai_shape(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("hi", logprobs=True, top_logprobs=2))
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["echo: ", "hi", ""]
    assert [entry.logprob for entry in logprobs.content] == [-0.25, -0.25, -0.125]
    assert logprobs.content[1].bytes == list(b"hi")
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [
        ("echo: 0", -0.25),
        ("echo: 1", -1.25),
    ]


async def test_token_ids_in_vllm_words(world: World) -> None:
    _, _, body = await world.post(ask("hi", return_token_ids=True))
    assert body["prompt_token_ids"] == [1, token_id("hi")]
    assert body["choices"][0]["token_ids"] == [token_id("echo: "), token_id("hi"), END_TOKEN]
    _, _, plain = await world.post(ask("hi"))
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_tool_call_and_its_result(world: World) -> None:
    async with world.client() as client:
        first = await client.chat.completions.create(**ask("2+2", tools=[CALCULATOR], tool_choice="auto"))
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert message.tool_calls is not None
        call = message.tool_calls[0]
        assert call.type == "function"
        assert call.function.name == "calculator"
        assert json.loads(call.function.arguments) == {"i": 0}
        messages = [
            {"role": "user", "content": "2+2"},
            message.model_dump(),  # all the nulls of the SDK's model come back to us
            {"role": "tool", "tool_call_id": call.id, "content": "4"},
        ]
        second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[CALCULATOR])
    assert second.choices[0].message.content == "echo: 4"
    assert world.engine.requests[0].tools == (CALCULATOR,)


async def test_tool_choice_none_hides_the_tools(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**ask("2+2", tools=[CALCULATOR], tool_choice="none"))
    assert completion.choices[0].message.content == "echo: 2+2"
    assert world.engine.requests[0].tools == ()
    assert world.only_record.tools == ()


async def test_parallel_tool_calls_false_gives_one_call(world: World) -> None:
    world.engine.calls_per_answer = 3
    async with world.client() as client:
        many = await client.chat.completions.create(**ask("2+2", tools=[CALCULATOR]))
        one = await client.chat.completions.create(**ask("2+2", tools=[CALCULATOR], parallel_tool_calls=False))
    assert [len(c.choices[0].message.tool_calls or ()) for c in (many, one)] == [3, 1]
    kept = [record.choices[0] for record in world.recorder.interactions.values()]
    assert [len(choice.tool_calls) for choice in kept] == [3, 1]
    assert [choice.token_exact for choice in kept] == [True, False]  # two calls were sampled that nobody got
    assert kept[1].token_ids == ()
    assert one.usage is not None
    assert one.usage.completion_tokens == many.usage.completion_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "always", "tools": [CALCULATOR]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [CALCULATOR]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "*"}}, "tools": [CALCULATOR]}, "tool_choice"),
        ({"response_format": {"type": "json_object"}, "tools": [CALCULATOR]}, None),
    ],
)
async def test_what_cannot_be_honoured_is_refused(world: World, fields: dict[str, object], param: str) -> None:
    async with world.client() as client:
        with pytest.raises(BadRequestError, match="is not supported by this engine") as caught:
            await client.chat.completions.create(**ask(**fields))
    assert caught.value.param == param
    assert not world.engine.requests


@pytest.mark.parametrize(
    ("tool_choice", "wanted"),
    [("required", ANY_TOOL), ({"type": "function", "function": {"name": "calculator"}}, "calculator"), ("auto", None)],
)
async def test_a_call_that_must_be_made_reaches_the_engine_and_the_record(
    world: World, tool_choice: Any, wanted: str | None
) -> None:
    async with world.client() as client:
        metadata = {"tidegate_verifier": "numeric", "tidegate_reference": "4"}
        fields = {"tools": [CALCULATOR], "tool_choice": tool_choice, "metadata": metadata}
        await client.chat.completions.create(**ask(**fields))
        await client.chat.completions.create(**ask(**fields, store=False))
    assert [request.sampling.tool_choice for request in world.engine.requests] == [wanted, wanted]
    kept, unkept = world.recorder.interactions.values()
    assert (kept.sampling.tool_choice, unkept.sampling.tool_choice) == (wanted, None)
    assert kept.sampling.unfiltered is (wanted is None)
    assert kept.task is not None
    assert kept.task.tool_choice == wanted  # asked again, its first answer must call too


@pytest.mark.parametrize("tools", [[], [CALCULATOR]])
async def test_a_call_of_what_is_not_offered_is_refused(world: World, tools: list[Any]) -> None:
    named = {"type": "function", "function": {"name": "search"}}
    async with world.client() as client:
        for choice in ("required", named) if not tools else (named,):
            with pytest.raises(BadRequestError, match="offer what must be called"):
                await client.chat.completions.create(**ask(tools=tools or None, tool_choice=choice))
    assert not world.engine.requests


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "\u00e9"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "point", "schema": SCHEMA, "strict": True}}, SCHEMA),
    ],
)
async def test_a_schema_reaches_the_engine_and_the_record(
    world: World, response_format: dict[str, object], schema: dict[str, object]
) -> None:
    async with world.client() as client:
        await client.chat.completions.create(**ask(response_format=response_format))
        await client.chat.completions.create(**ask(response_format=response_format, store=False))
        await client.chat.completions.create(
            **ask(response_format=response_format, tools=[CALCULATOR], tool_choice="none")
        )
    assert [request.sampling.json_schema for request in world.engine.requests] == [ordered_json(schema)] * 3
    kept = sorted(
        (record.consent, record.sampling.json_schema or "") for record in world.recorder.interactions.values()
    )
    assert kept == [(False, ""), (True, ordered_json(schema)), (True, ordered_json(schema))]
    assert not any(record.sampling.unfiltered for record in world.recorder.interactions.values() if record.consent)


async def test_a_pydantic_model_is_parsed_back(world: World) -> None:
    class Point(BaseModel):
        x: int

    world.engine.answer = '{"x": 3}'
    async with world.client() as client:
        completion = await client.chat.completions.parse(**ask(), response_format=Point)
    assert completion.choices[0].message.parsed == Point(x=3)
    (request,) = world.engine.requests
    assert json.loads(request.sampling.json_schema or "")["properties"]["x"]["type"] == "integer"


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        ({"type": "json_schema"}, "'json_schema' without a 'json_schema'"),
        ({"type": "text", "json_schema": {"name": "a", "schema": {}}}, "'text' with a 'json_schema'"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "name"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": [1]}}, "schema"),
        ({"type": "yaml"}, "json_object"),
        ("json_object", "response_format"),
    ],
)
async def test_a_malformed_response_format_is_refused(world: World, response_format: object, words: str) -> None:
    async with world.client() as client:
        with pytest.raises(BadRequestError, match=words):
            await client.chat.completions.create(**ask(response_format=response_format))
    assert not world.engine.requests


async def test_a_declared_task_keeps_its_schema(world: World) -> None:
    declared = {"tidegate_verifier": "numeric", "tidegate_reference": "3"}
    formats: list[dict[str, object]] = [{"type": "text"}, {"type": "json_object"}]
    async with world.client() as client:
        for response_format in formats:
            await client.chat.completions.create(**ask(metadata=declared, response_format=response_format))
    tasks = [record.task for record in world.recorder.interactions.values()]
    assert [task and task.json_schema for task in tasks] == [None, ordered_json({"type": "object"})]
    assert len({task and task.id for task in tasks}) == 2


async def test_text_format_unknown_fields_and_text_parts_are_accepted(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}
            ],
            response_format={"type": "text"},
            extra_body={"some_new_field": {"x": 1}},
        )
    assert completion.choices[0].message.content == "echo: in parts"
    assert world.only_record.messages[0]["content"] == [
        {"type": "text", "text": "in "},
        {"type": "text", "text": "parts"},
    ]


@pytest.mark.parametrize("name", [MODEL, "champion"])
async def test_served_names_mean_the_champion(world: World, name: str) -> None:
    world.router.point_champion_at(NEXT_RELEASE)
    async with world.client() as client:
        completion = await client.chat.completions.create(**{**ask(), "model": name})
    assert completion.system_fingerprint == NEXT_RELEASE
    assert world.engine.requests[0].adapter == NEXT_RELEASE


async def test_a_release_id_names_that_release(world: World) -> None:
    async with world.client() as client:
        completion = await client.chat.completions.create(**{**ask(), "model": NEXT_RELEASE})
        assert completion.system_fingerprint == NEXT_RELEASE
        with pytest.raises(NotFoundError, match="'gpt-9' is not served here; choose one of 'tiny'") as caught:
            await client.chat.completions.create(**{**ask(), "model": "gpt-9"})
    assert caught.value.param == "model"


async def test_models_are_listed_and_shown(world: World) -> None:
    async with world.client() as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == [MODEL, "champion", BASE_RELEASE, NEXT_RELEASE]
        shown = await client.models.retrieve(NEXT_RELEASE)
        assert (shown.id, shown.created, shown.object) == (NEXT_RELEASE, int(NOW) + 1, "model")
        with pytest.raises(NotFoundError, match="'nope' is not served"):
            await client.models.retrieve("nope")


async def test_a_release_is_leased_while_it_answers(world: World) -> None:
    world.engine.hold_at = 1
    async with world.client() as client, asyncio.TaskGroup() as tasks:
        request = tasks.create_task(client.chat.completions.create(**{**ask(), "model": NEXT_RELEASE}))
        while not world.engine.holding:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert world.router.in_use(NEXT_RELEASE)
        world.engine.go.set()
        await request
    assert not world.router.in_use(NEXT_RELEASE)


async def test_many_concurrent_requests_get_their_own_answers() -> None:
    async with running_world() as world, world.client() as client:
        texts = [f"question {i}" for i in range(40)]
        answers = await asyncio.gather(*(client.chat.completions.create(**ask(text)) for text in texts))
        assert [a.choices[0].message.content for a in answers] == [f"echo: {text}" for text in texts]
        assert len(world.recorder.interactions) == 40
