"""Between chat messages and the text that a model reads and writes.

Models whose chat template knows tools get them through the template. For all others the tools are listed in
the system message and calls are written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. The
same two functions serve the gateway's engines and the trainer, so that what is trained is what is served.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate.core.errors import RequestError
from tidegate.core.types import JsonObject, Messages, Tools

TOOL_CALL_OPEN = "<tool_call>"
TOOL_CALL_CLOSE = "</tool_call>"
ANY_TOOL = "*"
"""``Sampling.tool_choice`` for a call of whichever tool; no function has this name."""


class ChatTokenizer(Protocol):
    """The slice of a transformers tokenizer that is used here."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """``invalid`` is True when a tool call was opened but is not a JSON object with a name and arguments."""

    text: str
    tool_calls: tuple[JsonObject, ...]
    invalid: bool


def response_format(schema: str) -> JsonObject:
    """OpenAI's ``response_format`` for a JSON Schema given as JSON text. It wants a name, which nothing here reads."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(schema), "strict": True}}


def tool_choice(wanted: str) -> str | JsonObject:
    """OpenAI's ``tool_choice`` for one of :class:`Sampling`."""
    return "required" if wanted == ANY_TOOL else {"type": "function", "function": {"name": wanted}}


def wanted_tool(choice: object) -> str | None:
    """Inverse of :func:`tool_choice`; None for anything that asks for no call."""
    if choice == "required":
        return ANY_TOOL
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name and name != ANY_TOOL else None


def template_knows_tools(tokenizer: ChatTokenizer) -> bool:
    """Whether the chat template itself renders tools."""
    return "tools" in str(tokenizer.chat_template or "")


def flatten_messages(messages: Messages, tools: Tools) -> list[dict[str, str]]:
    """Rewrite messages for a template that knows only ``role`` and a text ``content``.

    Tools go into the system message (one is added when there is none), tool calls into the assistant's
    text, tool results into ``tool`` messages as text.

    Raises:
        RequestError: a content part is not text.
    """
    flat: list[dict[str, str]] = []
    for message in messages:
        content = content_text(message.get("content"))
        calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        content += "".join(render_tool_call(call) for call in calls)
        flat.append({"role": str(message["role"]), "content": content})
    if tools:
        listing = render_tools(tools)
        if flat and flat[0]["role"] in ("system", "developer"):
            flat[0] = {"role": "system", "content": f"{flat[0]['content']}\n{listing}"}
        else:
            flat.insert(0, {"role": "system", "content": listing})
    return flat


def content_text(content: Any) -> str:
    """The text of a message's ``content``: a string, None, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"message content {content!r} is not supported; send a string or a list of text parts")
    parts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"message content part of type {kind!r} is not supported; send text parts")
        parts.append(str(part.get("text", "")))
    return "".join(parts)


def render_tools(tools: Tools) -> str:
    """One line a tool: a signature short enough for small models.

    ``calculator(expression: string) - evaluates ...``; optional parameters carry a ``?``.
    """
    lines = ["Tools:"]
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        required = set(schema.get("required") or ())
        parameters = ", ".join(
            f"{name}{'' if name in required else '?'}: {_type_name(spec)}"
            for name, spec in (schema.get("properties") or {}).items()
        )
        description = str(function.get("description") or "").strip()
        lines.append(f"{function['name']}({parameters})" + (f" - {description}" if description else ""))
    return "\n".join(lines)


def _type_name(spec: Any) -> str:
    if not isinstance(spec, Mapping):
        return "any"
    options = spec.get("enum")
    if options:
        return "|".join(str(option) for option in options)
    return str(spec.get("type", "any"))


def render_tool_call(call: JsonObject) -> str:
    """The text form of an OpenAI tool call; arguments that are not JSON are kept as one string."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    value = _parsed(arguments)
    if value is _NOT_JSON:
        value = arguments
    body = json.dumps({"name": function["name"], "arguments": value}, ensure_ascii=False)
    # A tag inside a string would end the call early; JSON lets us spell it in another way.
    body = body.replace(TOOL_CALL_CLOSE, "\\u003c" + TOOL_CALL_CLOSE[1:])
    return f"{TOOL_CALL_OPEN}{body}{TOOL_CALL_CLOSE}"


def parse_completion(text: str, *, call_id_seed: str) -> ParsedCompletion:
    """Split a completion into visible text and tool calls.

    Args:
        text: the decoded completion without special tokens.
        call_id_seed: makes the ids of the calls (``call_...``) reproducible and unique per answer.
    """
    visible: list[str] = []
    calls: list[JsonObject] = []
    invalid = False
    rest = text
    while True:
        before, opened, after = rest.partition(TOOL_CALL_OPEN)
        visible.append(before)
        if not opened:
            break
        body, rest = split_tool_call(after, whole=True) or (after, "")
        call = parse_tool_call(body, call_id=f"{call_id_seed}:{len(calls)}")
        if call is None:
            invalid = True
            visible.append(f"{TOOL_CALL_OPEN}{body}")
        else:
            calls.append(call)
    return ParsedCompletion(text="".join(visible), tool_calls=tuple(calls), invalid=invalid)


def split_tool_call(text: str, *, whole: bool) -> tuple[str, str] | None:
    """The body of the call whose opening tag stands before ``text``, and what follows its closing tag.

    A closing tag inside a string of the call's JSON ends nothing: while the body up to a tag is no call and leaves a
    string open, the next tag is looked at. Where none of them fits, the first one ends the call, which is then invalid.

    Args:
        text: what follows the opening tag, as far as it is known.
        whole: whether nothing more will come.

    Returns:
        None where more text may decide, and where ``whole`` text has no closing tag.
    """
    first = at = text.find(TOOL_CALL_CLOSE)
    while at >= 0:
        body = text[:at]
        if parse_tool_call(body, call_id="") is not None:
            return body, text[at + len(TOOL_CALL_CLOSE) :]
        if not _leaves_a_string_open(body):
            break
        at = text.find(TOOL_CALL_CLOSE, at + 1)
    if first < 0 or (at < 0 and not whole):
        return None
    return text[:first], text[first + len(TOOL_CALL_CLOSE) :]


def _leaves_a_string_open(json_text: str) -> bool:
    return json_text.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1


def parse_tool_call(body: str, *, call_id: str) -> JsonObject | None:
    """One ``{"name", "arguments"}`` object as an OpenAI tool call, or None when it is not one."""
    value = _parsed(body)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    digest = hashlib.sha256(call_id.encode()).hexdigest()[:24]
    return {
        "id": f"call_{digest}",
        "type": "function",
        "function": {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


_NOT_JSON = object()


def _parsed(text: str) -> Any:
    """The value of strict JSON text, or ``_NOT_JSON``.

    What Python's parser lets through and no client could read counts as no JSON: NaN and infinities, half a
    surrogate pair. So does what it gives up on: nesting deeper than the stack, integers of thousands of digits.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return _NOT_JSON
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def encode_prompt(
    tokenizer: ChatTokenizer, messages: Messages, tools: Tools, *, add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """Token ids (T,) of a conversation, ready for the assistant's turn when asked so.

    Raises:
        RequestError: the tokenizer has no chat template, the template refuses the messages, or they hold half
            a surrogate pair.
    """
    if not tokenizer.chat_template:
        raise RequestError("this model has no chat template; serve one that has, or add chat_template.jinja")
    kwargs: dict[str, Any] = {}
    if template_knows_tools(tokenizer):
        conversation: Any = [_with_parsed_arguments(message) for message in messages]
        if tools:
            kwargs["tools"] = [dict(tool) for tool in tools]
    else:
        conversation = flatten_messages(messages, tools)
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    except Exception as error:  # jinja templates raise anything; all of it is the request's fault
        raise RequestError(f"the model's chat template refuses these messages: {error}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the messages hold half a surrogate pair at {error.start}; send valid Unicode") from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _with_parsed_arguments(message: JsonObject) -> dict[str, Any]:
    """Templates that know tools expect arguments as objects, the OpenAI API sends them as JSON text."""
    result = dict(message)
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object_or_text(call["function"])}} for call in calls
        ]
    return result


def _object_or_text(function: JsonObject) -> Any:
    value = _parsed(function.get("arguments") or "{}")
    return function.get("arguments") if value is _NOT_JSON else value
