"""What all verifiers share: reading the end of a transcript, and the words that results begin with.

A judgement's ``detail`` begins with one of the reasons below, followed by ``": "`` and an explanation where
there is one, so that results can be counted without parsing prose. A missing answer and an invalid tool call
are failures, never abstentions: otherwise a policy could dodge its penalty by breaking its own calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidegate.core.chat import TOOL_CALL_OPEN, content_text
from tidegate.core.errors import RequestError, TidegateError
from tidegate.core.types import JsonObject, Outcome
from tidegate.ports.signals import VERIFIER_ERROR, Judgement

RIGHT = "right"
WRONG = "wrong"
NO_REPLY = "no_reply"
NO_TOOL_CALL = "no_tool_call"
INVALID_TOOL_CALL = "invalid_tool_call"

_SHOWN = 80  # characters of a model's answer that are worth keeping in a verdict


def right(score: float = 1.0) -> Judgement:
    """A pass."""
    return Judgement(outcome=Outcome.PASS, score=score, detail=RIGHT)


def failed(reason: str, explanation: str = "", *, score: float = 0.0) -> Judgement:
    """A failure with its reason."""
    return Judgement(outcome=Outcome.FAIL, score=score, detail=f"{reason}: {explanation}" if explanation else reason)


def reason_of(detail: str) -> str:
    """The reason that a judgement's detail begins with."""
    return detail.partition(":")[0]


def shown(value: object) -> str:
    """``repr`` of a value, cut to what a verdict should hold."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def text_of(message: JsonObject) -> str:
    """A message's visible text, stripped; empty when it holds none."""
    try:
        return content_text(message.get("content")).strip()
    except RequestError:
        return ""


def tool_calls_of(message: JsonObject) -> list[Mapping[str, Any]]:
    """A message's tool calls."""
    return list(message.get("tool_calls") or ())


def call_arguments(call: JsonObject) -> Mapping[str, Any] | None:
    """The arguments of a tool call as an object, or None when they are not one."""
    try:
        arguments = json.loads(call["function"].get("arguments") or "{}")
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    return arguments if isinstance(arguments, dict) else None


def invalid_tool_call(transcript: Sequence[JsonObject]) -> Judgement | None:
    """The failure of a transcript in which some assistant message holds a tool call that does not parse."""
    for message in transcript:
        if message.get("role") != "assistant":
            continue
        if TOOL_CALL_OPEN in text_of(message):
            return failed(INVALID_TOOL_CALL, shown(text_of(message)))
        for call in tool_calls_of(message):
            if call_arguments(call) is None:
                return failed(INVALID_TOOL_CALL, shown(call))
    return None


def final_text(transcript: Sequence[JsonObject]) -> str | Judgement:
    """The text that the agent ended with, or the failure of having ended without one."""
    invalid = invalid_tool_call(transcript)
    if invalid is not None:
        return invalid
    if not transcript or transcript[-1].get("role") != "assistant":
        return failed(NO_REPLY, "the last message is not the assistant's")
    if tool_calls_of(transcript[-1]):
        return failed(NO_REPLY, "the episode ends with a tool call")
    text = text_of(transcript[-1])
    return text or failed(NO_REPLY, "the last message is empty")


def boundary(judge: Callable[[], Judgement]) -> Judgement:
    """Run code of others on a model's answer; whatever it raises is a failed answer, marked for counting.

    Raises:
        TidegateError: ``judge`` says on purpose that it cannot work here, whatever the answer.
    """
    try:
        return judge()
    except TidegateError:
        raise
    except Exception as error:  # noqa: BLE001 - scorers raise anything on odd answers
        return failed(VERIFIER_ERROR, f"{type(error).__name__}: {shown(str(error))}")
