"""One chat completion over HTTP through the official OpenAI client, plain or streamed, never retried.

A request that fails is an observation, not an exception to hide: it is recorded with its reason and ends the
episode.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tidegate.core.chat import TOOL_CALL_OPEN
from tidegate.core.errors import ConfigError
from tidegate.core.types import Choice, FinishReason, JsonObject, Messages
from tidegate.simulate.results import CallRecord

try:
    import openai
except ImportError as _error:
    raise ConfigError(
        "simulated users need the package 'openai', which is not installed here; "
        "install it with: pip install 'tidegate[tasks]'"
    ) from _error

RELEASE_HEADER = "x-tidegate-release"


class RequestFailedError(Exception):
    """A request got no usable answer; ``record`` says why."""

    def __init__(self, record: CallRecord) -> None:
        super().__init__(record.failure)
        self.record = record


def open_client(base_url: str, *, api_key: str, timeout_s: float) -> openai.AsyncOpenAI:
    """A client without retries; ``/v1`` is added to a base URL that lacks it.

    Raises:
        ConfigError: the URL is not an http or https one.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base URL {base_url!r} is not usable; accepted: 'http://host:port/v1' or https")
    url = base_url.rstrip("/")
    # A proxy that the environment names cannot reach this machine's own loopback addresses.
    http_client = openai.DefaultAsyncHttpxClient(trust_env=not _is_loopback(parts.hostname))
    return openai.AsyncOpenAI(
        base_url=url if url.endswith("/v1") else f"{url}/v1",
        api_key=api_key,
        timeout=timeout_s,
        max_retries=0,
        http_client=http_client,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """Everything that one request carries. ``parameters`` are the API's (temperature, tools, ...)."""

    number: int
    model: str
    messages: Messages
    parameters: Mapping[str, Any]
    headers: Mapping[str, str]
    stream: bool


async def complete(
    client: openai.AsyncOpenAI, call: ChatCall, *, clock: Callable[[], float]
) -> tuple[Choice, CallRecord]:
    """Ask for one completion.

    Args:
        client: see :func:`open_client`.
        call: the request.
        clock: seconds; only differences are used.

    Raises:
        RequestFailedError: no usable answer.
    """
    started = clock()
    try:
        answer = await _exchange(client, call)
    except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestFailedError(
            CallRecord(
                number=call.number,
                latency_s=clock() - started,
                streamed=call.stream,
                failure=_failure(error),
                error=f"{type(error).__name__}: {error}",
            )
        ) from error
    return answer.choice(), CallRecord(
        number=call.number,
        latency_s=clock() - started,
        streamed=call.stream,
        release=answer.release,
        interaction_id=answer.interaction_id,
        completion_tokens=answer.completion_tokens,
    )


@dataclass(slots=True)
class _Answer:
    """The parts of an answer, in the order in which they came."""

    release: str | None
    interaction_id: str | None = None
    completion_tokens: int = 0
    finish_reason: str | None = None
    text: list[str] = field(default_factory=list[str])
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    def add_message(self, message: Mapping[str, Any]) -> None:
        """Take a whole message, or the delta of one."""
        if message.get("content"):
            self.text.append(message["content"])
        for position, part in enumerate(message.get("tool_calls") or ()):
            index = part.get("index", position)
            call = self.tool_calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
            function = part.get("function") or {}
            call["id"] += part.get("id") or ""
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def choice(self) -> Choice:
        text = "".join(self.text)
        calls: list[JsonObject] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for _, call in sorted(self.tool_calls.items())
        ]
        return Choice(
            index=0,
            token_ids=(),
            logprobs=(),
            text=text,
            tool_calls=tuple(calls),
            finish_reason=_finish_reason(self.finish_reason),
            invalid_tool_call=TOOL_CALL_OPEN in text,
        )


class _IncompleteStreamError(ValueError):
    """The stream ended without a finish reason."""


async def _exchange(client: openai.AsyncOpenAI, call: ChatCall) -> _Answer:
    request: dict[str, Any] = {
        "model": call.model,
        "messages": [dict(message) for message in call.messages],
        "extra_headers": dict(call.headers),
        **call.parameters,
    }
    if call.stream:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    response: Any = await client.chat.completions.with_raw_response.create(**request)
    answer = _Answer(release=response.headers.get(RELEASE_HEADER))
    if call.stream:
        await _read_stream(response.parse(), answer)
    else:
        body = response.parse().to_dict(warnings=False)
        answer.interaction_id = body["id"]
        answer.completion_tokens = _completion_tokens(body)
        answer.finish_reason = body["choices"][0].get("finish_reason")
        answer.add_message(body["choices"][0]["message"])
    return answer


async def _read_stream(stream: Any, answer: _Answer) -> None:
    async for chunk in stream:
        body = chunk.to_dict(warnings=False)
        answer.interaction_id = body.get("id") or answer.interaction_id
        answer.completion_tokens = _completion_tokens(body) or answer.completion_tokens
        for choice in body.get("choices") or ():
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.add_message(choice.get("delta") or {})
    if answer.finish_reason is None:
        raise _IncompleteStreamError("the stream ended without a finish reason")


def _completion_tokens(body: Mapping[str, Any]) -> int:
    return int((body.get("usage") or {}).get("completion_tokens") or 0)


def _finish_reason(reason: str | None) -> FinishReason:
    return FinishReason(reason) if reason in set(FinishReason) else FinishReason.STOP


_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (openai.APITimeoutError, "timeout"),
    (openai.APIConnectionError, "connection"),
    (openai.APIResponseValidationError, "malformed_response"),
    (openai.OpenAIError, "stream_error"),
    (_IncompleteStreamError, "incomplete_stream"),
)


def _failure(error: Exception) -> str:
    if isinstance(error, openai.APIStatusError):
        return f"http_{error.status_code}"
    return next((name for kind, name in _FAILURES if isinstance(error, kind)), "malformed_response")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def post_feedback(client: openai.AsyncOpenAI, body: JsonObject) -> str | None:
    """Send feedback; None when it was taken, else the failure in the words of :class:`CallRecord`."""
    try:
        await client.post("/feedback", body=dict(body), cast_to=object)
    except (openai.OpenAIError, ValueError) as error:
        return _failure(error)
    return None
