"""From the chunks of a stream to generation events, with a server's own token ids or without any.

Tokens are kept only when the server gave the id and the log-probability of every one of them, and its own count at the
end agrees: of an answer that breaks off none are kept. The events say so; nothing is made up from text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from tidegate.core.chat import TOOL_CALL_OPEN
from tidegate.core.errors import EngineError
from tidegate.core.types import (
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    JsonObject,
    PromptTokens,
    TokenCounts,
    TokenDelta,
)
from tidegate.engines.remote.texts import HalfCharacter, shown, whole_text

_TOKEN_LIMIT = 1 << 31
_COUNT_LIMIT = 1 << 53
"""Above it a JSON number is no exact integer for everybody."""
_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
}


@dataclass(slots=True, kw_only=True)
class _PartialCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class _Choice:
    calls: dict[int, _PartialCall] = field(default_factory=dict[int, _PartialCall])
    text: str = ""
    half: HalfCharacter = field(default_factory=HalfCharacter)
    tokens: int = 0
    exact: bool = True
    finish_reason: FinishReason | None = None
    invalid_tool_call: bool = False


class AnswerReader:
    """The events of one call. Feed it chunks; then :meth:`finish` it.

    Args:
        request: what was asked.
        distribution_known: whether the settings of the request and the server's log-probabilities describe the
            distribution that is sampled from.
    """

    def __init__(self, request: GenerationRequest, *, distribution_known: bool) -> None:
        self._request = request
        self._distribution_known = distribution_known
        self._prompt: tuple[int, ...] | None = None
        self._choices = [_Choice() for _ in range(request.sampling.n)]
        self._counts: TokenCounts | None = None

    def read(self, chunk: JsonObject) -> Iterator[GenerationEvent]:
        """What a chunk says: ``PromptTokens`` with the first one, then deltas.

        Raises:
            EngineError: it is an error, or no chunk of a chat completion.
        """
        if chunk.get("error"):
            raise EngineError(f"the upstream failed while it answered: {_message_of(chunk['error'])}")
        parts = chunk.get("choices")
        if not isinstance(parts, list):
            raise EngineError(
                f"the upstream sent a chunk with the fields {shown(sorted(chunk))}; 'choices' is expected"
            )
        if self._prompt is None:
            self._prompt = _token_ids(chunk.get("prompt_token_ids")) or ()
            yield PromptTokens(
                token_ids=self._prompt, distribution_known=self._distribution_known, confirmed_at_end=True
            )
        self._counts = _counts_of(chunk.get("usage")) or self._counts
        for part in parts:
            yield from self._part(part)

    def finish(self) -> Iterator[GenerationEvent]:
        """What is known only at the end: whether the tokens are all there, the counts, how each choice ended.

        Raises:
            EngineError: not every choice has ended.
        """
        ended = sum(choice.finish_reason is not None for choice in self._choices)
        if ended != len(self._choices):
            raise EngineError(f"the upstream ended its stream after {ended} of {len(self._choices)} choices")
        if not self._all_there():
            for index in range(len(self._choices)):
                yield TokenDelta(choice=index, token_ids=(), logprobs=(), token_exact=False)
            if self._counts is not None:
                yield self._counts
        for index, choice in enumerate(self._choices):
            assert choice.finish_reason is not None  # noqa: S101 - counted above
            yield ChoiceEnd(
                choice=index, finish_reason=choice.finish_reason, invalid_tool_call=choice.invalid_tool_call
            )

    def _all_there(self) -> bool:
        """Some servers lose chunks of tool calls: their own count tells."""
        counts = self._counts
        if counts is None or not all(choice.exact for choice in self._choices):
            return False
        said = (len(self._prompt or ()), sum(choice.tokens for choice in self._choices))
        return said == (counts.prompt, counts.completion)

    def _part(self, part: Any) -> Iterator[GenerationEvent]:
        index = part.get("index", 0) if isinstance(part, dict) else None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self._choices):
            raise EngineError(f"the upstream sent a part of choice {shown(index)} of {len(self._choices)}")
        choice = self._choices[index]
        delta = part.get("delta") or {}
        given = delta.get("content") or "" if isinstance(delta, dict) else None
        calls = delta.get("tool_calls") or [] if isinstance(delta, dict) else None
        if not isinstance(given, str) or not isinstance(calls, list):
            raise EngineError(f"the upstream sent a delta of choice {index} that is no chat message")
        reason = part.get("finish_reason")
        text = choice.half.take(given, last=reason is not None or choice.finish_reason is not None)
        if self._request.tools:
            choice.text += text
        for call in calls:
            _grow(choice.calls, call)
        yield from self._delta(index, choice, part, text, hidden=bool(given or calls))
        if reason is not None:
            yield from self._end(index, choice, reason)

    def _delta(
        self, index: int, choice: _Choice, part: JsonObject, text: str, *, hidden: bool
    ) -> Iterator[GenerationEvent]:
        """Text and tokens of a part; nothing for one that only names the role."""
        entries = _entries(part.get("logprobs"))
        ids = _token_ids(part.get("token_ids"))
        logprobs = tuple(_logprob(entry) for entry in entries)
        if ids is None:
            choice.exact = choice.exact and not (text or hidden or entries)
        elif len(ids) != len(entries) or not all(map(math.isfinite, logprobs)):
            choice.exact = False
        choice.exact = choice.exact and bool(self._prompt)
        choice.tokens += len(ids or ())
        if not (text or entries or ids):
            return
        wanted = self._request.sampling.top_logprobs
        alternatives = tuple(_alternatives(entry)[:wanted] for entry in entries) if wanted else ()
        yield TokenDelta(
            choice=index,
            token_ids=ids or () if choice.exact else (),
            logprobs=logprobs,
            text=text,
            token_texts=tuple(whole_text(str(entry.get("token", ""))) for entry in entries),
            top_logprobs=alternatives,
            token_exact=choice.exact,
        )

    def _end(self, index: int, choice: _Choice, reason: Any) -> Iterator[GenerationEvent]:
        if not isinstance(reason, str) or reason not in _FINISH_REASONS:
            raise EngineError(f"the upstream ended choice {index} with finish_reason {shown(reason)}: no whole answer")
        choice.finish_reason = _FINISH_REASONS[reason]
        named = [call for _, call in sorted(choice.calls.items()) if call.name]
        choice.invalid_tool_call = (
            len(named) != len(choice.calls)
            or not all(_is_json_object(call.arguments) for call in named)
            or TOOL_CALL_OPEN in choice.text
        )
        choice.calls = {}
        if named:
            calls = tuple(self._whole(index, position, call) for position, call in enumerate(named))
            yield TokenDelta(choice=index, token_ids=(), logprobs=(), tool_calls=calls, token_exact=choice.exact)

    def _whole(self, index: int, position: int, call: _PartialCall) -> JsonObject:
        made = hashlib.sha256(f"{self._request.request_id}:{index}:{position}".encode()).hexdigest()[:24]
        return {
            "id": whole_text(call.id) or f"call_{made}",
            "type": "function",
            "function": {"name": whole_text(call.name), "arguments": whole_text(call.arguments) or "{}"},
        }


def _grow(calls: dict[int, _PartialCall], part: Any) -> None:
    """Take a part of a tool call; parts without an index continue the last call unless they name another id."""
    function = part.get("function") if isinstance(part, dict) else None
    if not isinstance(function, dict):
        raise EngineError(f"the upstream sent a part of a tool call of type {type(part).__name__}")
    index = part.get("index")
    if isinstance(index, bool) or not isinstance(index, int):
        index = len(calls) if part.get("id") or not calls else max(calls)
    call = calls.setdefault(index, _PartialCall())
    call.id = call.id or str(part.get("id") or "")
    call.name += str(function.get("name") or "")
    call.arguments += str(function.get("arguments") or "")


def _token_ids(value: Any) -> tuple[int, ...] | None:
    """Token ids, or None for anything else."""
    if not isinstance(value, list):
        return None
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < _TOKEN_LIMIT for one in value):
        return None
    return tuple(value)


def _entries(value: Any) -> Sequence[Mapping[str, Any]]:
    content = value.get("content") if isinstance(value, dict) else None
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _logprob(entry: Mapping[str, Any]) -> float:
    value = entry.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def _alternatives(entry: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    others = entry.get("top_logprobs")
    known = [other for other in others if isinstance(other, dict)] if isinstance(others, list) else []
    return tuple((whole_text(str(other.get("token", ""))), _logprob(other)) for other in known)


def _counts_of(usage: Any) -> TokenCounts | None:
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not _is_count(prompt) or not _is_count(completion):
        return None
    return TokenCounts(prompt=prompt, completion=completion)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _COUNT_LIMIT


def _is_json_object(text: str) -> bool:
    if not text:
        return True  # a call without arguments
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _message_of(error: Any) -> str:
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message)[:300]
