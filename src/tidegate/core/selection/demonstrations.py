"""Demonstrations: messages that show the right way, as examples that the trainer renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.chat import content_text
from tidegate.core.errors import RequestError
from tidegate.core.hashing import content_hash
from tidegate.core.selection.limits import dropped_example
from tidegate.core.selection.sequences import Fresh
from tidegate.core.selection.sifting import DEMONSTRATION, Sifted, limit
from tidegate.core.types import Example, Messages, Task, Tools


def demonstration_example(
    identifier: str,
    *,
    opening: Messages,
    tools: Tools,
    answer: Messages,
    kind: str,
    source: str = DEMONSTRATION,
    weight: float = 1.0,
) -> Example:
    """The example that trains every assistant message of ``answer``, given ``opening``."""
    messages = (*opening, *answer)
    trained = tuple(
        index for index, message in enumerate(messages) if index >= len(opening) and message.get("role") == "assistant"
    )
    return Example(
        id=identifier,
        weight=weight,
        source=source,
        kind=kind,
        messages=messages,
        tools=tools,
        trained_messages=trained,
    )


def task_demonstration(task: Task, answer: Messages) -> Example:
    """The example of a task and the messages that solve it; its id is the task's with ``demonstration/``."""
    return demonstration_example(
        f"demonstration/{task.id}", opening=task.messages, tools=task.tools, answer=answer, kind=task.kind
    )


def read_demonstration(value: Any) -> Messages | None:
    """The messages of a ``demonstration`` feedback, or None when a trainer could not render them.

    Accepted is a list of assistant, tool and user messages that begins and ends with the assistant's, contents
    being text and tool calls having a name and a JSON object of arguments.
    """
    if not isinstance(value, list | tuple) or not value or not all(map(_is_message, value)):
        return None
    messages: Messages = tuple(value)
    if messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
        return None
    return messages


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or message.get("role") not in ("assistant", "tool", "user"):
        return False
    content, calls = message.get("content"), message.get("tool_calls") or []
    if not (content is None or isinstance(content, str | list)) or not isinstance(calls, list | tuple):
        return False
    try:
        text = content_text(content)
    except RequestError:
        return False
    return all(map(_is_tool_call, calls)) and (bool(text) or bool(calls) or message["role"] != "assistant")


def _is_tool_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False
    try:
        return isinstance(json.loads(function.get("arguments") or "{}"), dict)
    except (TypeError, ValueError):
        return False


def prompt_key(example: Example) -> str:
    """Equal for examples that answer the same prompt."""
    if example.token_ids:
        first = next((index for index, trained in enumerate(example.loss_mask) if trained), len(example.token_ids))
        return content_hash({"tokens": list(example.token_ids[:first])})
    first = example.trained_messages[0] if example.trained_messages else len(example.messages)
    return content_hash({"messages": list(example.messages[:first]), "tools": list(example.tools)})


def per_prompt(
    examples: Sequence[Fresh], *, most: int, seed: int, used: Mapping[str, int] | None = None
) -> Sifted[Fresh]:
    """Keep at most ``most`` (>= 1) demonstrations of one prompt, those that ``used`` counts included."""
    return limit(
        examples,
        identify=lambda item: item.example.id,
        group=lambda item: prompt_key(item.example),
        quota=most,
        seed=seed,
        drop=lambda item: dropped_example(item, "prompt_cap"),
        used=used,
    )
