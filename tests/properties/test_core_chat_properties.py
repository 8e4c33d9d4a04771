"""What is rendered is read back, whatever the names and arguments hold."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.chat import TOOL_CALL_CLOSE, TOOL_CALL_OPEN, parse_completion, render_tool_call

# Text that likes to collide with the tags.
texts = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from([TOOL_CALL_OPEN, TOOL_CALL_CLOSE, "<", "/", '"', "\\", "u003c", "{", "}"])).map("".join),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
calls = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": json.dumps(arguments)}},
    texts,
    st.dictionaries(texts, values, max_size=4),
)
plain = st.text(max_size=30).filter(lambda text: "<" not in text)


@given(plain, st.lists(st.tuples(calls, plain), max_size=3))
def test_rendered_calls_are_parsed_back(before: str, parts: list[tuple[dict[str, dict[str, str]], str]]) -> None:
    text = before + "".join(render_tool_call(call) + after for call, after in parts)
    parsed = parse_completion(text, call_id_seed="seed")
    assert not parsed.invalid
    assert parsed.text == before + "".join(after for _, after in parts)
    got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.tool_calls]
    assert got == [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c, _ in parts]


@given(st.lists(st.sampled_from([TOOL_CALL_OPEN, TOOL_CALL_CLOSE, '{"name": "f"', "}", "x", " "])).map("".join))
def test_any_completion_is_either_clean_or_marked_invalid(text: str) -> None:
    parsed = parse_completion(text, call_id_seed="seed")
    assert parsed.invalid == (TOOL_CALL_OPEN in parsed.text)
    for call in parsed.tool_calls:
        json.loads(call["function"]["arguments"]).items()  # an object, in JSON that anyone can read
