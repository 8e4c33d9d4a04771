"""Calls that must be made: whatever the weights would rather say, the answer is a valid call of an offered tool."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from engine_fixtures import answer, byte_tokenizer, call, running, write_reciting_model, write_tiny_model
from gateway_world import MODEL, running_world
from tidegate.core.chat import ANY_TOOL, TOOL_CALL_CLOSE, TOOL_CALL_OPEN, parse_completion, render_tool_call
from tidegate.core.errors import RequestError
from tidegate.core.types import FinishReason
from tidegate.engines.embedded.engine import EmbeddedEngine
from tidegate.engines.embedded.text import TextStream, ToolCallFilter


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/small"}, "side": {"enum": ["left", "right"]}},
    "required": ["x", "side"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = (tool("move", POINT), tool("files/read-2"), tool("wait", {"properties": {}, "additionalProperties": False}))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(model_dir: Path) -> AsyncGenerator[EmbeddedEngine]:
    async with running(model_dir) as ready:
        yield ready


def must(wanted: str, tools: Any = TOOLS, **options: Any) -> Any:
    return call("go", tools=tools, **{"max_tokens": 200, "tool_choice": wanted, "temperature": 1.0, **options})


def fits(called: Any) -> bool:
    arguments = json.loads(called["function"]["arguments"])
    if called["function"]["name"] != "move":
        return arguments == {}
    return set(arguments) == {"x", "side"} and type(arguments["x"]) is int and arguments["side"] in ("left", "right")


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("wanted", [ANY_TOOL, "move", "files/read-2"])
async def test_every_answer_is_one_valid_call(engine: EmbeddedEngine, wanted: str, temperature: float) -> None:
    request = must(wanted, n=4, seed=3, temperature=temperature, parallel_tool_calls=False)
    _, choices = await answer(engine, request)
    for choice in choices:
        (called,) = choice.tool_calls
        assert fits(called), choice
        assert wanted in (ANY_TOOL, called["function"]["name"])
        assert (choice.finish_reason, choice.text, choice.invalid_tool_call) == (FinishReason.TOOL_CALLS, "", False)


async def test_a_call_is_spelled_as_the_history_spells_it(engine: EmbeddedEngine) -> None:
    _, (choice,) = await answer(engine, must("move", seed=2))
    decoded = byte_tokenizer().decode(list(choice.token_ids), skip_special_tokens=True)
    assert decoded == render_tool_call(choice.tool_calls[0])


async def test_a_limit_cuts_a_call_and_says_so(engine: EmbeddedEngine) -> None:
    _, (choice,) = await answer(engine, must("move", max_tokens=20))
    assert (choice.finish_reason, choice.invalid_tool_call) == (FinishReason.LENGTH, True)
    assert choice.tool_calls == ()


async def test_other_rows_of_the_batch_are_not_held(engine: EmbeddedEngine) -> None:
    free = call("go", max_tokens=30, tools=TOOLS)
    _, (alone,) = await answer(engine, free)
    _, (held,) = await answer(engine, must("wait"))
    _, (again,) = await answer(engine, free)
    assert held.tool_calls
    assert again.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("tools", "wanted", "words", "param"),
    [
        (TOOLS, "gone", "asks for 'gone' and the tools are", "tool_choice"),
        ((), ANY_TOOL, "offer what must be called", "tool_choice"),
        ((tool("f", {"type": "array"}),), "f", "have type 'array'; arguments are an 'object'", "tools"),
        ((tool("f", {"properties": {"x": {"multipleOf": 999983}}}),), "f", "parameters of 'tools' can't be", "tools"),
        ((tool("f", {"properties": {"<|im_end|>": {}}}),), "f", "a token of the model's own", "tools"),
        ((tool("f", {"x-guidance": {}}),), "f", "'x-guidance' is not accepted", "tools"),
    ],
)
async def test_a_call_that_cannot_be_held_to_is_refused(
    engine: EmbeddedEngine, tools: Any, wanted: str, words: str, param: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        await answer(engine, must(wanted, tools))
    assert refused.value.param == param


async def test_an_answer_that_may_call_once_ends_after_its_call(tmp_path: Path) -> None:
    tools = (tool("wait", {"properties": {"n": {"type": "integer"}}}), *TOOLS[:2])
    text = "".join(f'<tool_call>{{"name": "wait", "arguments": {{"n": {n}}}}}</tool_call>' for n in (1, 2))
    free, wanted = call("go", tools=tools, max_tokens=200), must(ANY_TOOL, tools, temperature=0.0)
    model = write_reciting_model(tmp_path / "model", free, text=text)
    async with running(model) as reciting:
        for request in (free, wanted):
            _, (both,) = await answer(reciting, request)
            assert [called["function"]["arguments"] for called in both.tool_calls] == ['{"n": 1}', '{"n": 2}']
            sampling = replace(request.sampling, parallel_tool_calls=False)
            _, (one,) = await answer(reciting, replace(request, sampling=sampling))
            assert one.tool_calls == both.tool_calls[:1]
            assert one.finish_reason is FinishReason.TOOL_CALLS
            named = replace(request.sampling, tool_choice="wait")  # which is one call, whatever else may be
            _, (alone,) = await answer(reciting, replace(request, sampling=named))
            assert alone.tool_calls == one.tool_calls
            said = byte_tokenizer().decode(list(one.token_ids), skip_special_tokens=True)
            assert said == text[: len(text) // 2]  # no token that the client never saw


async def test_the_official_client_gets_what_it_asks_for(engine: EmbeddedEngine) -> None:
    async with running_world(engine=engine) as world, world.client() as client:
        for choice in ("required", {"type": "function", "function": {"name": "move"}}):
            named, arguments, reason = await streamed_call(client, choice)
            assert reason == "tool_calls"
            assert fits({"function": {"name": named, "arguments": arguments}})
            assert choice == "required" or named == "move"
        records = list(world.recorder.interactions.values())
    assert [record.sampling.tool_choice for record in records] == [ANY_TOOL, "move"]
    for record in records:
        assert not record.sampling.unfiltered  # drawn from what was allowed, not from the policy
        assert record.choices[0].token_exact
        assert len(record.choices[0].token_ids) == len(record.choices[0].logprobs) > 0


async def streamed_call(client: AsyncOpenAI, choice: Any) -> tuple[str, str, str | None]:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "go"}],
        tools=list(TOOLS),  # type: ignore[arg-type]
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
        seed=5,
        stream=True,
    )
    chunks = [chunk async for chunk in stream]
    (called,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert called.function is not None
    return called.function.name or "", called.function.arguments or "", chunks[-1].choices[0].finish_reason


# --- a closing tag inside a string ends no call ----------------------------------------------------------------

TAGGED = f'a {TOOL_CALL_CLOSE} and \\" {TOOL_CALL_OPEN} b'


def test_a_closing_tag_inside_an_argument_ends_no_call() -> None:
    body = f'{{"name": "write", "arguments": {{"text": "{TAGGED}"}}}}'
    parsed = parse_completion(f"x{TOOL_CALL_OPEN}{body}{TOOL_CALL_CLOSE}y", call_id_seed="s")
    assert (parsed.text, parsed.invalid) == ("xy", False)
    assert json.loads(parsed.tool_calls[0]["function"]["arguments"]) == {"text": TAGGED.replace('\\"', '"')}


PIECES = [
    TOOL_CALL_OPEN,
    TOOL_CALL_CLOSE,
    '{"name": "f", "arguments": {"a": "',
    '"}}',
    '"',
    "\\",
    "\\\\",
    "x",
    "<",
    "}",
]


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.integers(1, 9), max_size=6))
def test_text_in_pieces_is_parsed_as_the_whole(pieces: list[str], sizes: list[int]) -> None:
    whole = "".join(pieces)
    filtered = ToolCallFilter("s")
    text, calls, left = "", [], whole
    for size in sizes:
        piece = filtered.feed(left[:size])
        left = left[size:]
        text, calls = text + piece.text, calls + list(piece.tool_calls)
    for piece in (filtered.feed(left), filtered.finish()):
        text, calls = text + piece.text, calls + list(piece.tool_calls)
    parsed = parse_completion(whole, call_id_seed="s")
    assert (text, tuple(calls), filtered.invalid) == (parsed.text, parsed.tool_calls, parsed.invalid)


def test_one_token_that_closes_a_call_and_begins_another_gives_one() -> None:
    class Words:
        def decode(self, token_ids: Any, **_: bool) -> str:
            body = '{"name": "f", "arguments": {}}'
            words = [f"{TOOL_CALL_OPEN}{body}", f"{TOOL_CALL_CLOSE}{TOOL_CALL_OPEN}{body}{TOOL_CALL_CLOSE}"]
            return "".join(words[one] for one in token_ids)

    stream = TextStream(Words(), hidden=(), stops=(), call_id_seed="s", one_call=True)
    assert not stream.feed(0).stopped
    piece = stream.feed(1)
    assert (len(piece.tool_calls), piece.stopped) == (1, True)
