"""The right way through a task, as a person would demonstrate it.

Works from what a task says in the open (question, tools, reference), so that it serves generated tasks and
those read from files alike. Tasks that cannot be solved by rule have no expert.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tidegate.core.hashing import content_hash
from tidegate.core.rollout import assistant_message, tool_messages
from tidegate.core.types import Choice, FinishReason, JsonObject, Messages, Task
from tidegate.signals.arithmetic import calculate, render
from tidegate.signals.environments import Calculator
from tidegate.signals.verifiers.findings import text_of
from tidegate.signals.verifiers.gym import load_reasoning_gym
from tidegate.signals.verifiers.tool_call import MAY_BE_LEFT_OUT

_CHAIN_SUM = re.compile(r"problem:(?P<expression>[-+0-9 ]+)=$")
_PRODUCTS = re.compile(r"multiplication:(?P<expression>[-*0-9 ]+)\.")
_BASIC_ARITHMETIC = re.compile(r"^Calculate (?P<expression>[-+*/() 0-9]+)\.$")
_LEG_COUNTING = re.compile(r"if you have (?P<animals>[^?]+)\?")
_ANIMALS = re.compile(r"(?P<count>[0-9]+) (?P<animal>[a-z ]+)")


def expert_answer(task: Task) -> Messages | None:
    """The messages that solve a task, from the assistant's first to its last; None when no rule solves it.

    Raises:
        ConfigError: leg counting needs reasoning-gym's table of animals and it is not installed.
    """
    if task.verifier == "tool_call":
        return (_tool_call_message(task, [_first_accepted_call(call) for call in task.reference]),)
    expression_of = _EXPRESSIONS.get(task.kind)
    if expression_of is None or not task.messages:
        return None
    expression = expression_of(" ".join(text_of(task.messages[-1]).split()))
    return None if expression is None else calculator_transcript(task, expression)


def calculator_transcript(task: Task, expression: str) -> Messages:
    """Tool call, tool result, and the bare number as the answer."""
    call = _tool_call_message(task, [("calculator", {"expression": expression})])
    choice = _choice(tuple(call["tool_calls"]))
    answer: JsonObject = {"role": "assistant", "content": render(calculate(expression))}
    return (call, *tool_messages(choice, Calculator()), answer)


def leg_expression(animals: Mapping[str, int]) -> str:
    """``3*8 + 2*10`` for 3 spiders and 2 crabs."""
    legs = _legs()
    return " + ".join(f"{count}*{legs[animal]}" for animal, count in animals.items())


def _from_pattern(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    def find(question: str) -> str | None:
        match = pattern.search(question)
        return match["expression"].strip() if match else None

    return find


def _from_animals(question: str) -> str | None:
    match = _LEG_COUNTING.search(question)
    if not match:
        return None
    counts: dict[str, int] = {}
    for part in match["animals"].split(", "):
        item = _ANIMALS.fullmatch(part.strip())
        animal = _singular(item["animal"], int(item["count"])) if item else None
        if item is None or animal is None:
            return None
        counts[animal] = int(item["count"])
    return leg_expression(counts)


def _singular(name: str, count: int) -> str | None:
    singular = name.removesuffix("s") if count > 1 else name
    return singular if singular in _legs() else None


def _legs() -> Mapping[str, int]:
    load_reasoning_gym()
    return importlib.import_module("reasoning_gym.arithmetic.leg_counting").ANIMALS


_EXPRESSIONS: dict[str, Callable[[str], str | None]] = {
    "chain_sum": _from_pattern(_CHAIN_SUM),
    "products": _from_pattern(_PRODUCTS),
    "basic_arithmetic": _from_pattern(_BASIC_ARITHMETIC),
    "leg_counting": _from_animals,
}


def _first_accepted_call(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    ((function, arguments),) = call.items()
    return function, _first_accepted(arguments)


def _first_accepted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The first accepted value of each argument that may not be left out."""
    return {name: _plain_value(accepted[0]) for name, accepted in arguments.items() if MAY_BE_LEFT_OUT not in accepted}


def _plain_value(value: Any) -> Any:
    """Objects inside accepted values list accepted values in turn."""
    if isinstance(value, Mapping):
        return _first_accepted(value)
    return [_plain_value(item) for item in value] if isinstance(value, list | tuple) else value


def _tool_call_message(task: Task, calls: list[tuple[str, dict[str, Any]]]) -> JsonObject:
    seed = content_hash({"id": task.id, "calls": calls})
    return assistant_message(
        _choice(
            tuple(
                {
                    "id": f"call_{seed[:20]}{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for index, (name, arguments) in enumerate(calls)
            )
        )
    )


def _choice(tool_calls: tuple[JsonObject, ...]) -> Choice:
    return Choice(
        index=0, token_ids=(), logprobs=(), text="", tool_calls=tool_calls, finish_reason=FinishReason.TOOL_CALLS
    )
