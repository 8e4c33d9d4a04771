"""``tool_call``: the agent's first message calls the right functions with accepted arguments.

The reference is a list with one ``{function: {argument: [accepted values]}}`` per expected call, as in the
Berkeley Function Calling Leaderboard. Calls match in any order. ``""`` among the accepted values means that
the argument may be left out; an argument that the reference does not know fails. Values compare as follows:

- numbers by value (5 and 5.0 are equal); true and false only with themselves;
- texts without case, blanks and the signs ``, . / - _ * ^``, both kinds of quotes being the same;
- lists element by element in order; objects by key, each key with its own list of accepted values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.types import Json, JsonObject, Task
from tidegate.ports.signals import Judgement
from tidegate.signals.verifiers.findings import (
    NO_REPLY,
    NO_TOOL_CALL,
    WRONG,
    call_arguments,
    failed,
    invalid_tool_call,
    right,
    shown,
    text_of,
    tool_calls_of,
)

MAY_BE_LEFT_OUT = ""
_IGNORED_IN_TEXTS = re.compile(r"[\s,./\-_*^]")


class ToolCall:
    """Compares the calls of the first assistant message with accepted ones."""

    name: str = "tool_call"
    version: str = "1"
    graded: bool = False

    def check_reference(self, reference: Json) -> None:
        """Accept a list of ``{function: {argument: [accepted values]}}``.

        Raises:
            ValueError: it is something else.
        """
        if not (isinstance(reference, list | tuple) and reference and all(map(_is_expected_call, reference))):
            raise ValueError("a list with one {function: {argument: [accepted value, ...]}} per expected call")

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        """Judge the first message."""
        if not transcript or transcript[0].get("role") != "assistant":
            return failed(NO_REPLY, "the first message is not the assistant's")
        invalid = invalid_tool_call(transcript[:1])
        if invalid is not None:
            return invalid
        calls = tool_calls_of(transcript[0])
        if not calls:
            text = text_of(transcript[0])
            return failed(NO_TOOL_CALL, shown(text)) if text else failed(NO_REPLY)
        return _judge_calls(task.reference, calls)


def _judge_calls(reference: Sequence[Mapping[str, Any]], calls: list[Mapping[str, Any]]) -> Judgement:
    if len(calls) != len(reference):
        return failed(WRONG, f"{len(calls)} tool calls where {len(reference)} are expected")
    left = list(calls)
    for expected in reference:
        problems = [_problem(expected, call) for call in left]
        if None not in problems:
            return failed(WRONG, str(problems[0]))
        left.pop(problems.index(None))
    return right()


def _problem(expected: Mapping[str, Any], call: Mapping[str, Any]) -> str | None:
    """What is wrong with one call, None when it matches."""
    ((function, accepted),) = expected.items()
    called = call["function"].get("name")
    if called != function:
        return f"function {called!r} where {function!r} is expected"
    arguments = call_arguments(call) or {}
    for argument, value in arguments.items():
        if argument not in accepted:
            return f"argument {argument!r} is not expected"
        if not _is_accepted(value, accepted[argument]):
            return f"argument {argument!r} = {shown(value)}"
    missing = [name for name, values in accepted.items() if name not in arguments and MAY_BE_LEFT_OUT not in values]
    return f"argument {missing[0]!r} is missing" if missing else None


def _is_accepted(value: Any, accepted: Any) -> bool:
    options: Sequence[Any] = accepted if isinstance(accepted, list | tuple) else (accepted,)
    return any(_equal(value, option) for option in options)


def _equal(value: Any, option: Any) -> bool:
    if isinstance(option, bool) or isinstance(value, bool) or option is None:
        return value is option
    if isinstance(option, int | float):
        return isinstance(value, int | float) and value == option
    if isinstance(option, str):
        return isinstance(value, str) and _plain(value) == _plain(option)
    if isinstance(option, Mapping):
        return isinstance(value, Mapping) and _equal_objects(value, option)
    return (
        isinstance(value, list | tuple)
        and len(value) == len(option)
        and all(_equal(mine, theirs) for mine, theirs in zip(value, option, strict=True))
    )


def _equal_objects(value: Mapping[str, Any], option: Mapping[str, Any]) -> bool:
    return all(key in option and _is_accepted(item, option[key]) for key, item in value.items()) and all(
        key in value or MAY_BE_LEFT_OUT in accepted for key, accepted in option.items()
    )


def _plain(text: str) -> str:
    return _IGNORED_IN_TEXTS.sub("", text).lower().replace("'", '"')


def _is_expected_call(value: Any) -> bool:
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    ((function, arguments),) = value.items()
    return (
        isinstance(function, str)
        and isinstance(arguments, Mapping)
        and all(isinstance(accepted, list | tuple) and len(accepted) > 0 for accepted in arguments.values())
    )
