"""What a caller sees of an answer: text, tool calls, finish reasons. The model recites a given text."""

from __future__ import annotations

from pathlib import Path

from engine_fixtures import answer, byte_tokenizer, call, running, write_reciting_model
from tidegate.core.types import FinishReason, TokenDelta

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_tool_calls_are_taken_out_of_the_text_when_tools_were_offered(tmp_path: Path) -> None:
    text = f"Né {CALL}"
    with_tools = call("go", tools=TOOLS, max_tokens=200, request_id="r1")
    without = call("go", max_tokens=200)
    async with running(write_reciting_model(tmp_path / "m", with_tools, without, text=text)) as engine:
        deltas = [event async for event in engine.generate(with_tools) if isinstance(event, TokenDelta)]
        assert byte_tokenizer().decode([token for delta in deltas for token in delta.token_ids]) == f"{text}<|im_end|>"
        assert sum(bool(delta.tool_calls) for delta in deltas) == 1
        _, (choice,) = await answer(engine, with_tools)
        assert (choice.text, choice.finish_reason) == ("Né ", FinishReason.TOOL_CALLS)
        assert [each["function"] for each in choice.tool_calls] == [{"name": "add", "arguments": '{"a": 1}'}]
        _, (again,) = await answer(engine, with_tools)
        assert again.tool_calls == choice.tool_calls
        _, (plain,) = await answer(engine, without)
        assert (plain.text, plain.tool_calls, plain.finish_reason) == (text, (), FinishReason.STOP)
        _, (cut,) = await answer(engine, call("go", tools=TOOLS, max_tokens=20))
        assert (cut.text, cut.tool_calls, cut.invalid_tool_call) == (text[:19], (), True)
        assert cut.finish_reason is FinishReason.LENGTH


async def test_ids_of_tool_calls_differ_between_requests_and_choices(tmp_path: Path) -> None:
    one = call("go", tools=TOOLS, max_tokens=200, request_id="r1", n=2)
    other = call("go", tools=TOOLS, max_tokens=200, request_id="r2")
    async with running(write_reciting_model(tmp_path / "m", one, text=CALL + CALL)) as engine:
        choices = [*(await answer(engine, one))[1], *(await answer(engine, other))[1]]
    ids = [each["id"] for choice in choices for each in choice.tool_calls]
    assert len(ids) == len(set(ids)) == 6


async def test_an_unfinished_character_at_the_limit_is_replaced_once(tmp_path: Path) -> None:
    request = call("go", max_tokens=5)
    async with running(write_reciting_model(tmp_path / "m", request, text="ab😀😀")) as engine:
        deltas = [event async for event in engine.generate(request) if isinstance(event, TokenDelta)]
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "\ufffd"]
    assert [delta.token_texts for delta in deltas][:2] == [("a",), ("b",)]


async def test_a_stop_string_split_over_tokens_is_cut_and_counted(tmp_path: Path) -> None:
    request = call("go", max_tokens=50, stop=("\n\nUser:",))
    text = "one\n\nUser: two"
    async with running(write_reciting_model(tmp_path / "m", request, text=text)) as engine:
        _, (choice,) = await answer(engine, request)
        _, (whole,) = await answer(engine, call("go", max_tokens=50))
    assert (choice.text, choice.finish_reason) == ("one", FinishReason.STOP)
    assert byte_tokenizer().decode(choice.token_ids) == "one\n\nUser:"
    assert (whole.text, whole.token_ids[-1]) == (text, 2)
