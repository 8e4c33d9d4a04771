"""The body of ``POST /v1/chat/completions``: what is accepted, and its meaning for an engine.

Fields that are not named here are ignored, as OpenAI's own servers treat fields of a newer client. A field
that is named here and cannot be honoured is refused, never dropped silently. Before an engine that passes fields on,
both go to the server behind it, which decides.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from tidegate.core.chat import ANY_TOOL, wanted_tool
from tidegate.core.hashing import ordered_json
from tidegate.core.json_schemas import check_schema
from tidegate.core.types import JsonObject, Sampling
from tidegate.gateway.body import shown

MAX_STOPS = 16
MAX_CHOICES = 128
_MAX_TOKENS = 1 << 20
_SEED_LIMIT = 1 << 63
_NOT_HONOURED = "is not supported by this engine"
_ANY_OBJECT = ordered_json({"type": "object"})


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _check_content(value: Any) -> Any:
    """A string, nothing, or text parts; pictures and sound are refused here, not inside an engine."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("content is a string or a list of parts {'type': 'text', 'text': ...}")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"part {shown(part)} {_NOT_HONOURED}; send parts {{'type': 'text', 'text': ...}}")
    return value


class CalledFunction(_Body):
    """Name and arguments (JSON text) of a call that the model made."""

    name: str = Field(min_length=1)
    arguments: str


class ToolCall(_Body):
    """A call that an assistant turn holds."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_check_content)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role!r} message has no content; send a string or text parts")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a 'tool' message has no tool_call_id; send the id of the call that it answers")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a {self.role!r} message has tool_calls; only 'assistant' messages have")
        return self


def _check_properties(value: dict[str, Any] | None) -> dict[str, Any] | None:
    for name, schema in (value or {}).items():
        if isinstance(schema, dict) and not isinstance(schema.get("enum", []), list):
            raise ValueError(f"the enum of {name!r} is {shown(schema['enum'])}; it is a list of values")
    return value


class Parameters(_Body):
    """The parts of a tool's JSON schema that prompts are rendered from."""

    properties: Annotated[dict[str, Any] | None, AfterValidator(_check_properties)] = None
    required: list[str] | None = None


class Function(_Body):
    """A function that the model may call; dots and slashes in names are accepted beyond OpenAI's rule."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    description: str | None = None
    parameters: Parameters | None = None


class Tool(_Body):
    """A tool of the request."""

    type: Literal["function"]
    function: Function


class StreamOptions(_Body):
    """``include_usage`` adds one chunk with token counts before ``[DONE]``."""

    include_usage: bool = False


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop is a non-empty string or a list of up to {MAX_STOPS} non-empty strings")
    return stops


PASSES_FIELDS_ON = "passes_fields_on"
"""Validation context for engines that pass on what the gateway cannot honour itself."""

_NOT_PASSED_ON = frozenset(
    {"model", "messages", "tools", "stream", "stream_options", "return_token_ids", "metadata", "user", "store"}
    | {"safety_identifier"}
)
"""What the engine says in its own words, and who asks and what for, which is nobody's business behind the gateway."""


def passed_fields(raw: JsonObject) -> JsonObject:
    """The fields of a body that go to the server behind the gateway as the client wrote them."""
    return {name: value for name, value in raw.items() if name not in _NOT_PASSED_ON}


def _is_passed_on(info: ValidationInfo) -> bool:
    return info.context == PASSES_FIELDS_ON


def _tool_choice(value: Any, info: ValidationInfo) -> Any:
    if value in (None, "auto", "none") or wanted_tool(value) is not None or _is_passed_on(info):
        return value
    raise ValueError(
        f"tool_choice {shown(value)} {_NOT_HONOURED}; choose 'auto', 'none', 'required' or "
        "{'type': 'function', 'function': {'name': ...}}"
    )


class JsonSchema(_Body):
    """A schema that the answer must match, under a name; ``strict`` false is held to all the same."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """Free text, any JSON object, or what a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                f"type {self.type!r} {'without' if self.json_schema is None else 'with'} a 'json_schema'; the two "
                "belong together: {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}"
            )
        if self.json_schema is not None:
            check_schema(self.json_schema.schema_)
        return self

    def schema_text(self) -> str | None:
        """The JSON Schema as JSON text, None for free text."""
        if self.json_schema is not None:
            return ordered_json(self.json_schema.schema_)
        return _ANY_OBJECT if self.type == "json_object" else None


def _unless_passed_on(value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    return value if _is_passed_on(info) else check(value)


class ChatRequest(_Body):
    """A validated request; :attr:`messages` and :attr:`tools` are checked copies, the raw ones are kept."""

    model: str = Field(min_length=1)
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, AfterValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list[str])
    seed: int | None = Field(default=None, ge=-_SEED_LIMIT, lt=_SEED_LIMIT)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=_MAX_TOKENS)
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[ResponseFormat | None, WrapValidator(_unless_passed_on)] = None
    return_token_ids: bool | None = None
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"'top_logprobs' is {self.top_logprobs}, which needs 'logprobs': true")
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"'tools' names the function {twice!r} twice; names must differ")
        self._check_wanted_tool(names)
        if names and self.tool_choice != "none" and self._schema_text() is not None:
            raise ValueError(
                f"response_format beside 'tools' {_NOT_HONOURED}, which would have to "
                "choose between a call and an answer; leave one out, or send 'tool_choice': 'none'"
            )
        return self

    def _check_wanted_tool(self, names: list[str]) -> None:
        wanted = wanted_tool(self.tool_choice)
        if wanted is not None and (not names if wanted == ANY_TOOL else wanted not in names):
            raise ValueError(
                f"'tool_choice' is {shown(self.tool_choice)} and 'tools' names {names}; offer what must be called"
            )

    def _schema_text(self) -> str | None:
        """The schema to hold to here, None for free text and for what the server behind the gateway holds to."""
        return self.response_format.schema_text() if isinstance(self.response_format, ResponseFormat) else None

    def sampling(self) -> Sampling:
        """The decoding settings; what the client left out takes the defaults of :class:`Sampling`."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1 is vLLM's word for off
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "n": self.n,
            "seed": self.seed,
            "stop": tuple(self.stop),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_logprobs": self.top_logprobs,
            "json_schema": self._schema_text(),
            "tool_choice": wanted_tool(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return Sampling(**{name: value for name, value in given.items() if value is not None})

    def offered_tools(self, raw: JsonObject) -> tuple[JsonObject, ...]:
        """The tools as the client wrote them, or none when ``tool_choice`` hides them."""
        return () if self.tool_choice == "none" else tuple(raw.get("tools") or ())
