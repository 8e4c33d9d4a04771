"""The ``calculator`` environment: one tool, exact arithmetic.

The tool carries no description: its name and parameter say all, and every token of a prompt costs time.
"""

from __future__ import annotations

import json
from typing import Any

from tidegate.core.types import JsonObject
from tidegate.signals.arithmetic import calculate, render

_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


class Calculator:
    """Evaluates ``calculator(expression)``; stateless."""

    name: str = "calculator"
    tools: tuple[JsonObject, ...] = (_TOOL,)

    def execute(self, name: str, arguments: str) -> str:
        """The value of the expression as text, or ``error: ...``."""
        if name != "calculator":
            return f"error: unknown tool {name!r}; the tool is calculator(expression)"
        try:
            return render(calculate(_expression(arguments)))
        except ValueError as error:
            return f"error: {error}"


def _expression(arguments: str) -> str:
    try:
        values: Any = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError("the arguments are not JSON") from error
    if not isinstance(values, dict) or set(values) != {"expression"} or not isinstance(values["expression"], str):
        raise ValueError('the arguments must be {"expression": text}')
    return values["expression"]
