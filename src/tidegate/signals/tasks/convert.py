"""Task sets that others published, as tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.core.errors import ConfigError, TaskFileError
from tidegate.core.types import JsonObject, Messages, Outcome, Task
from tidegate.signals.tasks.experts import expert_answer
from tidegate.signals.tasks.file import read_json_lines
from tidegate.signals.verifiers import NumericAnswer, ToolCall

GSM8K_SYSTEM_PROMPT = "Solve the problem. End with the number."

_JSON_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def convert(format: str, paths: Sequence[Path]) -> Iterator[Task]:  # noqa: A002 - the option's name
    """Tasks of a published set.

    Args:
        format: ``bfcl`` (two files: questions, answers) or ``gsm8k`` (one file).
        paths: the files.

    Raises:
        ConfigError: unknown format or another number of files.
        TaskFileError: a line is not in the format.
    """
    if format not in _FORMATS:
        raise ConfigError(f"unknown task format {format!r}; choose one of {', '.join(map(repr, _FORMATS))}")
    names, read = _FORMATS[format]
    if len(paths) != len(names):
        raise ConfigError(f"format {format!r} takes {len(names)} files ({', '.join(names)}); {len(paths)} given")
    return read(*paths)


def bfcl_tasks(questions: Path, answers: Path) -> Iterator[Task]:
    """Single-turn function-calling tasks of the Berkeley Function Calling Leaderboard.

    Verifier ``tool_call``, no environment: the episode ends at the tool call. Function names keep their dots;
    the parameter types become JSON Schema's.

    Raises:
        TaskFileError: a line is malformed, or questions and answers do not match one to one.
    """
    accepted = {
        _text(answers, line, row, "id"): (line, row.get("ground_truth")) for line, row in read_json_lines(answers)
    }
    for line, row in read_json_lines(questions):
        identifier = _text(questions, line, row, "id")
        if identifier not in accepted:
            raise TaskFileError(f"{questions}:{line}: field 'id' = {identifier!r} has no line in {str(answers)!r}")
        answer_line, reference = accepted.pop(identifier)
        try:
            ToolCall().check_reference(reference)
        except ValueError as error:
            raise TaskFileError(
                f"{answers}:{answer_line}: field 'ground_truth' = {reference!r} is not usable; accepted: {error}"
            ) from error
        yield Task(
            id=identifier,
            messages=_bfcl_messages(questions, line, row),
            tools=_bfcl_tools(questions, line, row),
            verifier="tool_call",
            reference=reference,
            kind=identifier.rpartition("_")[0] or "default",
        )
    if accepted:
        identifier, (line, _) = next(iter(accepted.items()))
        raise TaskFileError(f"{answers}:{line}: field 'id' = {identifier!r} has no line in {str(questions)!r}")


def bfcl_demonstrations(tasks: Iterable[Task]) -> list[tuple[Task, Messages]]:
    """Tasks with the call that solves them: the first accepted value of each argument that is required.

    Raises:
        ConfigError: a task's own verifier refuses its demonstration.
    """
    solved: list[tuple[Task, Messages]] = []
    for task in tasks:
        messages = expert_answer(task)
        if messages is None or ToolCall().judge(task, messages).outcome is not Outcome.PASS:
            raise ConfigError(f"task {task.id!r} has no demonstration that its verifier {task.verifier!r} accepts")
        solved.append((task, messages))
    return solved


def gsm8k_tasks(path: Path) -> Iterator[Task]:
    """Grade-school problems with ``id``, ``question`` and ``answer`` (the number as text).

    Raises:
        TaskFileError: a line is malformed.
    """
    for line, row in read_json_lines(path):
        answer = row.get("answer")
        try:
            NumericAnswer().check_reference(answer)
        except ValueError as error:
            raise TaskFileError(
                f"{path}:{line}: field 'answer' = {answer!r} is not usable; accepted: {error}"
            ) from error
        yield Task(
            id=_text(path, line, row, "id"),
            messages=(
                {"role": "system", "content": GSM8K_SYSTEM_PROMPT},
                {"role": "user", "content": _text(path, line, row, "question")},
            ),
            verifier="numeric_answer",
            reference=answer,
            kind="gsm8k",
        )


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[..., Iterator[Task]]]] = {
    "bfcl": (("questions", "answers"), bfcl_tasks),
    "gsm8k": (("problems",), gsm8k_tasks),
}


def _text(path: Path, line: int, row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise TaskFileError(f"{path}:{line}: field {field!r} = {value!r} is not usable; accepted: a text")
    return value


def _bfcl_messages(path: Path, line: int, row: Mapping[str, Any]) -> Messages:
    turns = row.get("question")
    if isinstance(turns, list) and len(turns) == 1 and isinstance(turns[0], list) and turns[0]:
        messages = turns[0]
        if all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages):
            return tuple(messages)
    raise TaskFileError(
        f"{path}:{line}: field 'question' = {str(turns)[:120]!r} is not usable; accepted: one turn, a list of messages"
    )


def _bfcl_tools(path: Path, line: int, row: Mapping[str, Any]) -> tuple[JsonObject, ...]:
    functions = row.get("function")
    if not isinstance(functions, list) or not all(isinstance(f, dict) and "name" in f for f in functions):
        raise TaskFileError(
            f"{path}:{line}: field 'function' = {str(functions)[:120]!r} is not usable; accepted: a list of functions"
        )
    return tuple(
        {"type": "function", "function": {**function, "parameters": _schema(function.get("parameters") or {})}}
        for function in functions
    )


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema from Python type names; ``any`` is the schema without a type."""
    result = dict(schema)
    if result.get("type") == "any":
        del result["type"]
    elif isinstance(result.get("type"), str):
        result["type"] = _JSON_SCHEMA_TYPES.get(result["type"], result["type"])
    if isinstance(schema.get("properties"), Mapping):
        result["properties"] = {name: _schema(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        result["items"] = _schema(schema["items"])
    return result
