"""Demonstrations: messages that show the right way, as examples that the trainer renders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.chat import content_text
from tidegate.core.errors import RequestError
from tidegate.core.selection.limits import dropped_example
from tidegate.core.selection.sequences import Fresh, prompt_key
from tidegate.core.selection.sifting import DEMONSTRATION, Sifted, limit
from tidegate.core.types import Example, Messages, Tools


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


def per_kind(
    shown: Sequence[Fresh], *, solved: Mapping[str, int], enough: int, share: float, most: int, seed: int
) -> Sifted[Fresh]:
    """Keep as many demonstrations of each kind as :func:`allowance` gives it.

    Args:
        shown: demonstrations.
        solved: how many fresh successes of each kind train beside them.
        enough: fresh successes from which a kind can be learnt, >= 1.
        share: of a kind's examples that may be demonstrations once it has enough successes, in [0, 1).
        most: demonstrations of a kind that is never solved.
        seed: decides which stay.
    """
    allowed = {
        kind: allowance(solved.get(kind, 0), enough=enough, share=share, most=most)
        for kind in {item.example.kind for item in shown}
    }
    return limit(
        shown,
        identify=lambda item: item.example.id,
        group=lambda item: item.example.kind,
        quota=most,
        seed=seed,
        drop=lambda item: dropped_example(item, "demonstration_share"),
        used={kind: most - count for kind, count in allowed.items()},
    )


def allowance(solved: int, *, enough: int, share: float, most: int) -> int:
    """How many demonstrations of one kind train.

    A kind that is never solved gets ``most``: there is nothing else to learn it from. One with ``enough`` fresh
    successes gets ``share / (1 - share)`` of them, so that demonstrations are that share of its examples. In between
    the number moves in a straight line: one lucky success must not cost a kind its demonstrations.

    Args:
        solved: fresh successes of the kind, >= 0.
        enough: >= 1.
        share: in [0, 1).
        most: of a kind that is never solved.

    Returns:
        A number in [0, most].
    """
    beside = min(float(most), share / (1 - share) * max(solved, enough))
    progress = min(1.0, solved / enough)
    return math.floor(most + (beside - most) * progress + 1e-9)  # 1e-9: 1 / 9 * 9 must not come out below 1
