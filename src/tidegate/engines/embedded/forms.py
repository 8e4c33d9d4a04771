"""What an answer can be held to: a JSON Schema, or a call of the tools that were offered. No torch in here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidegate.core.chat import ANY_TOOL, TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from tidegate.core.errors import RequestError
from tidegate.core.hashing import ordered_json
from tidegate.core.types import GenerationRequest, JsonObject, Tools

_AS_RENDERED: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spaces of :func:`tidegate.core.chat.render_tool_call`, which is what the model reads in its history."""
_NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
"""What OpenAI takes missing parameters for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form that answers are held to; equal forms are compiled once.

    ``what`` and ``source`` name it in errors, ``param`` the field of the request that it comes from. ``schemas`` are
    the JSON Schemas (JSON text) that a client wrote for it. ``grammar`` joins them, in llguidance's Lark; None where
    the one schema is all.
    """

    what: str
    source: str
    param: str
    schemas: tuple[str, ...]
    grammar: str | None = None


def form_of(request: GenerationRequest) -> Form | None:
    """What the answers to a request are held to, None for free text.

    Raises:
        RequestError: the tool that must be called is not offered, or its parameters are those of no object.
    """
    sampling = request.sampling
    if sampling.json_schema is not None:
        return schema_form(sampling.json_schema)
    if sampling.tool_choice is not None:
        return call_form(request.tools, sampling.tool_choice, one_call=not sampling.parallel_tool_calls)
    return None


def schema_form(schema: str) -> Form:
    """A JSON value that matches ``schema`` (JSON text)."""
    return Form(
        what="its JSON schema",
        source="the JSON schema of response_format",
        param="response_format",
        schemas=(schema,),
    )


def call_form(tools: Tools, wanted: str, *, one_call: bool) -> Form:
    """Calls in the form that :func:`tidegate.core.chat.parse_completion` reads, and nothing around them.

    Args:
        tools: those offered.
        wanted: the name of the one to call, once, or ``ANY_TOOL``.
        one_call: whether one call of any tool is all.

    Raises:
        RequestError: see :func:`form_of`.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [function for function in functions if wanted in (ANY_TOOL, function["name"])]
    if not chosen:
        raise RequestError(
            f"tool_choice asks for {wanted!r} and the tools are {[function['name'] for function in functions]}; "
            "offer what must be called",
            param="tool_choice",
        )
    schemas = [_parameters(function) for function in chosen]
    calls = " | ".join(f"call_{number}" for number in range(len(chosen)))
    rules = [f"start: call{'' if one_call or wanted != ANY_TOOL else '+'}", f"call: {calls}"]
    for number, (function, schema) in enumerate(zip(chosen, schemas, strict=True)):
        opening = f'{TOOL_CALL_OPEN}{{"name": {json.dumps(function["name"])}, "arguments": '
        arguments = ordered_json({**schema, "x-guidance": _AS_RENDERED})
        rules += [
            f"call_{number}: {json.dumps(opening)} arguments_{number} {json.dumps('}' + TOOL_CALL_CLOSE)}",
            f"arguments_{number}: %json {arguments}",
        ]
    return Form(
        what="the parameters of its tools",
        source="the parameters of 'tools'",
        param="tools",
        schemas=tuple(map(ordered_json, schemas)),
        grammar="\n".join(rules),
    )


def _parameters(function: JsonObject) -> JsonObject:
    schema = function.get("parameters")
    if schema is None:
        return _NO_ARGUMENTS
    kind = schema.get("type", "object")
    if kind != "object":
        raise RequestError(
            f"the parameters of tool {function['name']!r} have type {kind!r}; arguments are an 'object'", param="tools"
        )
    return {**schema, "type": "object"}
