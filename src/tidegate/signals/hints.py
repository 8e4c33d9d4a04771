"""What a task's reference tells about the right answer, in one sentence.

A hint is for the model's eyes while it tries again; :mod:`tidegate.core.rationalization` keeps it out of what trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tidegate.core.types import Json, Task
from tidegate.signals.tasks.experts import expert_answer

_LONGEST = 500  # characters of an answer; what is longer would be copied rather than understood


def hint_for(task: Task) -> str | None:
    """A sentence that gives the right answer away; None where the reference names none, or a very long one.

    Args:
        task: its reference has passed the check of its verifier.
    """
    if task.verifier == "tool_call":
        return _told("calls", _tool_calls(task))
    answer_of = _ANSWERS.get(task.verifier)
    return None if answer_of is None else _told("answer", answer_of(task.reference))


def _told(what: str, answer: str) -> str | None:
    if not answer or len(answer) > _LONGEST:
        return None
    return f"Hint: the right {what}: {answer}"


def _number(reference: Json) -> str:
    return _text(reference["answer"] if isinstance(reference, Mapping) else reference)


def _gym_answer(reference: Mapping[str, Any]) -> str:
    return _text(reference["entry"]["answer"])


def _text(value: Any) -> str:
    """A text or a number as text; other answers have no one spelling."""
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _tool_calls(task: Task) -> str:
    calls = [call["function"] for message in expert_answer(task) or () for call in message["tool_calls"]]
    return ", ".join(f"{call['name']}({call['arguments']})" for call in calls)


_ANSWERS: Mapping[str, Callable[[Any], str]] = {
    "exact_text": _text,
    "numeric_answer": _number,
    "reasoning_gym": _gym_answer,
}
