"""Incremental text: whole characters, stop strings, tool calls."""

from __future__ import annotations

import json

import pytest

from engine_fixtures import byte_tokenizer
from tidegate.core.chat import parse_completion
from tidegate.core.types import JsonObject
from tidegate.engines.embedded.text import Detokenizer, StopFilter, TextStream, ToolCallFilter

TOKENIZER = byte_tokenizer()
END = frozenset({TOKENIZER.convert_tokens_to_ids("<|im_end|>")})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def stream(text: str, *, stops: tuple[str, ...] = (), tools: bool = False) -> tuple[list[str], list[JsonObject], bool]:
    machine = TextStream(TOKENIZER, hidden=END, stops=stops, call_id_seed="s" if tools else None)
    pieces: list[str] = []
    calls: list[JsonObject] = []
    tokens = ids(text)
    for index, token in enumerate(tokens):
        piece = machine.feed(token, last=index == len(tokens) - 1)
        pieces.append(piece.text)
        calls += piece.tool_calls
        if piece.stopped:
            break
    return pieces, calls, machine.invalid_tool_call


def test_a_character_of_four_tokens_comes_out_whole() -> None:
    machine = Detokenizer(TOKENIZER, END)
    assert [machine.feed(token) for token in ids("a😀b")] == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    machine = Detokenizer(TOKENIZER, END)
    assert [machine.feed(token) for token in ids("ok😀")[:-1]] == ["o", "k", "", "", ""]
    assert machine.finish() == "\ufffd"


def test_special_and_end_tokens_do_not_show() -> None:
    machine = Detokenizer(TOKENIZER, END)
    assert "".join(machine.feed(token) for token in ids("a<|im_start|>b<|im_end|>")) == "ab"


def test_text_is_cut_before_the_first_stop_string() -> None:
    pieces, _, _ = stream("one STOP two", stops=("STOP", "two"))
    assert "".join(pieces) == "one "


def test_text_that_may_become_a_stop_string_is_held_back_and_given_when_it_does_not() -> None:
    machine = StopFilter(("\n\nUser:",))
    assert [machine.feed(part) for part in ("a", "\n", "\n", "U", "x")] == ["a", "", "", "", "\n\nUx"]
    assert machine.feed("\n") == ""
    assert machine.finish() == "\n"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopFilter(("late", "early")).feed("x early late") == "x "
    assert StopFilter(("abcd", "bc")).feed("abcd") == "a"


def test_a_tool_call_never_shows_and_comes_out_whole() -> None:
    pieces, calls, invalid = stream(f"Let me see. {CALL} done", tools=True)
    assert "".join(pieces) == "Let me see.  done"
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"a": 1}]
    assert not invalid


def test_without_tools_the_tag_is_text() -> None:
    pieces, calls, invalid = stream(f"x{CALL}")
    assert ("".join(pieces), calls, invalid) == (f"x{CALL}", [], False)


@pytest.mark.parametrize("body", ["{", "[1]", '{"name": 3}', '{"name": "f", "arguments": 3}', "<tool_call>"])
def test_a_call_that_does_not_parse_becomes_text_and_is_reported(body: str) -> None:
    pieces, calls, invalid = stream(f"a<tool_call>{body}</tool_call>b", tools=True)
    whole = parse_completion(f"a<tool_call>{body}</tool_call>b", call_id_seed="s")
    assert ("".join(pieces), tuple(calls), invalid) == (whole.text, whole.tool_calls, True)


def test_an_open_tag_alone_is_held_back_until_the_end() -> None:
    machine = ToolCallFilter("s")
    assert machine.feed("a<tool").text == "a"
    assert machine.finish().text == "<tool"


def test_a_stop_string_inside_a_call_ends_it() -> None:
    pieces, calls, invalid = stream(f"a{CALL}", stops=("arguments",), tools=True)
    assert ("".join(pieces), calls, invalid) == ('a<tool_call>{"name": "add", "', [], True)
