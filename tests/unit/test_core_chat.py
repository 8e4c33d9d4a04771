"""Messages to prompt text and completions to tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.chat import (
    content_text,
    encode_prompt,
    flatten_messages,
    parse_completion,
    parse_tool_call,
    render_tool_call,
    render_tools,
    template_knows_tools,
)
from tidegate.core.errors import RequestError

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "evaluates an expression",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string"},
                "mode": {"enum": ["exact", "float"]},
                "digits": True,
            },
            "required": ["expression"],
        },
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}
CALL_TEXT = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


class Tokenizer:
    """A tokenizer of one token a character whose template is a Python function."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template
        self.seen: dict[str, Any] = {}

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        self.seen = {"conversation": conversation, **kwargs}
        if any(message["role"] == "forbidden" for message in conversation):
            raise ValueError("roles must alternate")
        return "".join(f"{m['role']}:{m.get('content') or ''};" for m in conversation)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        assert kwargs == {"add_special_tokens": False}  # the template has written them already
        return [ord(character) for character in text]


def decode(token_ids: tuple[int, ...]) -> str:
    return "".join(map(chr, token_ids))


def test_tools_are_listed_as_signatures() -> None:
    assert render_tools((CALCULATOR,)) == (
        "Tools:\ncalculator(expression: string, mode?: exact|float, digits?: any) - evaluates an expression"
    )


def test_a_tool_without_parameters_and_description_is_a_name() -> None:
    assert render_tools(({"function": {"name": "now"}},)) == "Tools:\nnow()"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_join_the_system_message(role: str) -> None:
    flat = flatten_messages(({"role": role, "content": "Be brief."}, {"role": "user", "content": "2+2"}), (CALCULATOR,))
    assert [message["role"] for message in flat] == ["system", "user"]
    assert flat[0]["content"].startswith("Be brief.\nTools:\ncalculator(")


def test_a_system_message_is_added_for_tools_only() -> None:
    user = {"role": "user", "content": "2+2"}
    assert flatten_messages((user,), ()) == [user]
    assert flatten_messages((user,), (CALCULATOR,))[0]["role"] == "system"


def test_calls_and_results_become_text() -> None:
    flat = flatten_messages(
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
        ),
        (),
    )
    assert flat == [{"role": "assistant", "content": CALL_TEXT}, {"role": "tool", "content": "2"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image_url", "image_url": {}}], "'image_url'"),
        (["text"], "'str'"),
        ({"type": "text"}, "string or a list"),
        (7, "7"),
    ],
)
def test_content_that_is_no_text_is_refused(content: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        content_text(content)


def test_text_parts_are_joined() -> None:
    assert content_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert content_text(None) == ""


def test_a_completion_is_split_into_text_and_calls() -> None:
    parsed = parse_completion(f"Let me see. {CALL_TEXT} and {CALL_TEXT}.", call_id_seed="x")
    assert parsed.text == "Let me see.  and ."
    assert [call["function"]["name"] for call in parsed.tool_calls] == ["calculator", "calculator"]
    assert len({call["id"] for call in parsed.tool_calls}) == 2
    assert not parsed.invalid


def test_call_ids_are_reproducible_and_differ_between_answers() -> None:
    one, again, other = (parse_completion(CALL_TEXT, call_id_seed=seed).tool_calls[0]["id"] for seed in "aab")
    assert one == again != other
    assert one.startswith("call_")


def test_a_call_that_was_never_closed_counts_when_it_parses() -> None:
    parsed = parse_completion(CALL_TEXT.removesuffix("</tool_call>"), call_id_seed="x")
    assert len(parsed.tool_calls) == 1
    assert not parsed.invalid


@pytest.mark.parametrize(
    "body",
    [
        "",
        "calculator(1+1)",
        "[]",
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": "1+1"}',
        '{"name": "f", "arguments": []}',
        pytest.param('{"name": "f", "arguments": {"x": NaN}}', id="NaN"),
        pytest.param('{"name": "f", "arguments": {"x": -Infinity}}', id="infinity"),
        pytest.param('{"name": "f", "arguments": {"x": 1e999}}', id="overflow"),
        pytest.param('{"name": "f", "arguments": {"x": "\\ud800"}}', id="half a surrogate pair"),
        pytest.param('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", id="integer too long to read"),
        pytest.param('{"name": "f", "arguments": ' + "[" * 20_000, id="deeper than the stack"),
    ],
)
def test_what_is_no_call_is_invalid_and_stays_visible(body: str) -> None:
    assert parse_tool_call(body, call_id="x") is None
    parsed = parse_completion(f"a<tool_call>{body}</tool_call>b", call_id_seed="x")
    assert parsed.invalid
    assert parsed.tool_calls == ()
    assert parsed.text == f"a<tool_call>{body}b"


def test_missing_arguments_are_none_at_all() -> None:
    call = parse_tool_call('{"name": "now"}', call_id="x")
    assert call is not None
    assert call["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("arguments", ["1+1", "{", "NaN"])
def test_arguments_that_are_no_json_are_rendered_as_a_string(arguments: str) -> None:
    text = render_tool_call({"function": {"name": "f", "arguments": arguments}})
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert json.loads(body) == {"name": "f", "arguments": arguments}


def test_a_template_that_knows_tools_gets_them_with_arguments_as_objects() -> None:
    tokenizer = Tokenizer("{{ tools }}")
    messages = (
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    )
    encode_prompt(tokenizer, messages, (CALCULATOR,))
    assert tokenizer.seen["tools"] == [CALCULATOR]
    sent = tokenizer.seen["conversation"][1]["tool_calls"][0]["function"]["arguments"]
    assert sent == {"expression": "1+1"}
    assert CALL["function"]["arguments"] == '{"expression": "1+1"}'  # type: ignore[index]  # ours is untouched


def test_a_template_that_knows_tools_gets_unparsable_arguments_as_text() -> None:
    tokenizer = Tokenizer("{{ tools }}")
    broken = {"function": {"name": "f", "arguments": "{"}}
    encode_prompt(tokenizer, ({"role": "assistant", "tool_calls": [broken]},), ())
    assert tokenizer.seen["conversation"][0]["tool_calls"][0]["function"]["arguments"] == "{"
    assert "tools" not in tokenizer.seen


def test_other_templates_get_flat_text() -> None:
    tokenizer = Tokenizer("{{ messages }}")
    assert not template_knows_tools(tokenizer)
    text = decode(encode_prompt(tokenizer, ({"role": "user", "content": "2+2"},), (CALCULATOR,)))
    assert text.startswith("system:Tools:\ncalculator(")
    assert text.endswith("user:2+2;")
    assert tokenizer.seen["add_generation_prompt"] is True


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_template_is_a_clear_error(template: str | None) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        encode_prompt(Tokenizer(template), (), ())


def test_what_the_template_refuses_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        encode_prompt(Tokenizer("x"), ({"role": "forbidden", "content": ""},), ())


def test_half_a_surrogate_pair_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        encode_prompt(Tokenizer("x"), ({"role": "user", "content": "\ud800"},), ())
