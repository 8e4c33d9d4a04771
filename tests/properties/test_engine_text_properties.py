"""Whatever the chunking, incremental text equals the whole text at once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine_fixtures import byte_tokenizer
from tidegate.core.chat import parse_completion
from tidegate.engines.embedded.text import Detokenizer, StopFilter, TextStream, ToolCallFilter

TOKENIZER = byte_tokenizer()
PARTS = st.sampled_from(
    [
        "a",
        "<",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"x": 1}}',
        '{"name": "f"}',
        "{",
        " ",
        "tool_call>",
        "é",
        "😀",
        '"</tool',
    ]
)
TEXTS = st.lists(PARTS, max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(text=TEXTS, places=st.lists(st.integers(0, 1000), max_size=10))
def test_tool_calls_agree_with_parsing_the_whole(text: str, places: list[int]) -> None:
    machine = ToolCallFilter("seed")
    pieces = [machine.feed(part) for part in cut(text, places)] + [machine.finish()]
    whole = parse_completion(text, call_id_seed="seed")
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(call for piece in pieces for call in piece.tool_calls) == whole.tool_calls
    assert machine.invalid == whole.invalid


@given(text=TEXTS, stops=st.lists(PARTS, max_size=3), places=st.lists(st.integers(0, 1000), max_size=10))
def test_stop_strings_agree_with_cutting_the_whole(text: str, stops: list[str], places: list[int]) -> None:
    machine = StopFilter(stops)
    out = "".join(machine.feed(part) for part in cut(text, places))
    out += "" if machine.stopped else machine.finish()
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert machine.stopped == bool(found)
    assert out == (text[: min(found)[1]] if found else text)


@given(tokens=st.lists(st.integers(3, len(TOKENIZER) - 1), max_size=40))
def test_any_bytes_decode_to_the_same_text_in_steps(tokens: list[int]) -> None:
    machine = Detokenizer(TOKENIZER, frozenset())
    steps = [machine.feed(token) for token in tokens]
    assert "".join(steps) + machine.finish() == TOKENIZER.decode(tokens)
    assert not any(step.endswith("\ufffd") for step in steps)


@given(text=TEXTS.filter(bool))
def test_the_three_machines_in_a_row_agree_with_the_whole(text: str) -> None:
    machine = TextStream(TOKENIZER, hidden=frozenset(), stops=(), call_id_seed="seed")
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = [machine.feed(token, last=index == len(tokens) - 1) for index, token in enumerate(tokens)]
    whole = parse_completion(text, call_id_seed="seed")
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(call for piece in pieces for call in piece.tool_calls) == whole.tool_calls
