"""Task files: JSON lines with ``id``, ``messages``, ``verifier``, ``reference`` and, at will, ``tools``, ``kind``,
``environment``, ``json_schema`` (which the answer is held to) and ``tool_choice`` (what its first answer must call).

A line that cannot be used stops the reading with its place, field, value and what is accepted: a task set that
silently lost lines would be another task set. A task that names an environment and no tools gets its tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tidegate.artifacts import write_atomically
from tidegate.core.chat import ANY_TOOL, content_text, tool_choice, wanted_tool
from tidegate.core.errors import RequestError, TaskFileError
from tidegate.core.hashing import ordered_json
from tidegate.core.json_schemas import check_schema
from tidegate.core.types import JsonObject, Task, Tools
from tidegate.ports import Environment, Verifier

_REQUIRED = ("id", "messages", "verifier", "reference")
_FIELDS = frozenset({*_REQUIRED, "tools", "kind", "environment", "json_schema", "tool_choice"})
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHOWN = 120  # characters of a value that an error message repeats


def read_tasks(path: Path, *, verifiers: Mapping[str, Verifier], environments: Mapping[str, Environment]) -> list[Task]:
    """Read and check a whole task file; blank lines are skipped.

    Raises:
        TaskFileError: the file cannot be read or holds no task, or a line is malformed or repeats an id.
        ConfigError: a verifier lacks a package that it needs.
    """
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for line, values in read_json_lines(path):
        task = _LineReader(path, line, verifiers, environments).task(values)
        if task.id in lines:
            place = f"{path}:{line}"
            raise TaskFileError(f"{place}: field 'id' = {task.id!r} is taken by line {lines[task.id]}; ids are unique")
        lines[task.id] = line
        tasks.append(task)
    if not tasks:
        raise TaskFileError(f"{path}: the file holds no task; one JSON object a line is expected")
    return tasks


def write_tasks(path: Path, tasks: Iterable[Task]) -> int:
    """Write a task file in one piece; returns the number of tasks."""
    lines = [ordered_json(task_object(task)) for task in tasks]
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
    return len(lines)


def task_object(task: Task) -> JsonObject:
    """A task as a line of a task file, defaults left out."""
    values: dict[str, Any] = {
        "id": task.id,
        "messages": list(task.messages),
        "verifier": task.verifier,
        "reference": task.reference,
        "kind": task.kind,
    }
    if task.tools:
        values["tools"] = list(task.tools)
    if task.environment is not None:
        values["environment"] = task.environment
    if task.json_schema is not None:
        values["json_schema"] = json.loads(task.json_schema)
    if task.tool_choice is not None:
        values["tool_choice"] = tool_choice(task.tool_choice)
    return values


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line that is not blank.

    Raises:
        TaskFileError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise TaskFileError(f"task file {str(path)!r} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"task file {str(path)!r} cannot be read as UTF-8 text: {error}") from error
    # Only "\n" ends a line: splitlines() would also cut at separators that JSON texts may hold.
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            value = json.loads(content, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise TaskFileError(f"{path}:{line}: not JSON ({error}): {_shown(content)}") from error
        if not isinstance(value, dict):
            raise TaskFileError(f"{path}:{line}: {_shown(value)} is not a JSON object")
        yield line, value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _LineReader:
    """Turns one object into a task, or says where it fails."""

    def __init__(
        self, path: Path, line: int, verifiers: Mapping[str, Verifier], environments: Mapping[str, Environment]
    ) -> None:
        self._place = f"{path}:{line}"
        self._verifiers = verifiers
        self._environments = environments

    def task(self, values: Mapping[str, Any]) -> Task:
        for name in values:
            if name not in _FIELDS:
                raise TaskFileError(
                    f"{self._place}: unknown field {name!r} = {_shown(values[name])}; accepted: {sorted(_FIELDS)}"
                )
        for name in _REQUIRED:
            if name not in values:
                raise TaskFileError(f"{self._place}: field {name!r} is missing; required: {list(_REQUIRED)}")
        environment = self._environment(values)
        tools = self._tools(values)
        if environment and "tools" not in values:
            tools = self._environments[environment].tools
        return Task(
            id=self._text(values, "id"),
            messages=self._messages(values),
            tools=tools,
            verifier=self._verifier(values),
            reference=values["reference"],
            kind=self._text(values, "kind") if "kind" in values else "default",
            environment=environment,
            json_schema=self._json_schema(values),
            tool_choice=self._tool_choice(values, tools),
        )

    def _refuse(self, field: str, value: Any, accepted: str) -> NoReturn:
        raise TaskFileError(f"{self._place}: field {field!r} = {_shown(value)} is not usable; accepted: {accepted}")

    def _text(self, values: Mapping[str, Any], name: str) -> str:
        value = values[name]
        if not isinstance(value, str) or not value.strip():
            self._refuse(name, value, "a text that is not blank")
        return value

    def _verifier(self, values: Mapping[str, Any]) -> str:
        name = values["verifier"]
        verifier = self._verifiers.get(name) if isinstance(name, str) else None
        if verifier is None:
            self._refuse("verifier", name, f"one of {sorted(self._verifiers)}")
        try:
            verifier.check_reference(values["reference"])
        except ValueError as error:
            self._refuse("reference", values["reference"], f"for verifier {name!r}: {error}")
        return verifier.name

    def _environment(self, values: Mapping[str, Any]) -> str | None:
        name = values.get("environment")
        if name is not None and (not isinstance(name, str) or name not in self._environments):
            self._refuse("environment", name, f"null or one of {sorted(self._environments)}")
        return name

    def _json_schema(self, values: Mapping[str, Any]) -> str | None:
        schema = values.get("json_schema")
        if schema is None:
            return None
        if not isinstance(schema, dict) or values.get("tools") or values.get("environment"):
            self._refuse("json_schema", schema, "a JSON Schema as an object, for a task without tools and environment")
        try:
            check_schema(schema)
        except ValueError as error:
            self._refuse("json_schema", schema, f"a JSON Schema within bounds; {error}")
        return ordered_json(schema)

    def _tool_choice(self, values: Mapping[str, Any], tools: Tools) -> str | None:
        choice = values.get("tool_choice")
        if choice is None or choice == "auto":
            return None
        wanted, names = wanted_tool(choice), [tool["function"]["name"] for tool in tools]
        if wanted is None or (not names if wanted == ANY_TOOL else wanted not in names):
            accepted = f'"auto", "required" or {{"type": "function", "function": {{"name": one of {names}}}}}'
            self._refuse("tool_choice", choice, accepted)
        return wanted

    def _messages(self, values: Mapping[str, Any]) -> tuple[JsonObject, ...]:
        messages = values["messages"]
        if not isinstance(messages, list) or not messages:
            self._refuse("messages", messages, "a list of one or more messages")
        for index, message in enumerate(messages):
            self._check_message(f"messages[{index}]", message)
        return tuple(messages)

    def _check_message(self, field: str, message: Any) -> None:
        if not isinstance(message, dict):
            self._refuse(field, message, 'an object with "role" and "content"')
        if message.get("role") not in _ROLES:
            self._refuse(f"{field}.role", message.get("role"), f"one of {list(_ROLES)}")
        content = message.get("content")
        if not (isinstance(content, str | list) or (content is None and message.get("tool_calls"))):
            self._refuse(f"{field}.content", content, "a text or a list of text parts")
        try:
            content_text(content)
        except RequestError:
            self._refuse(f"{field}.content", content, "a text or a list of text parts")

    def _tools(self, values: Mapping[str, Any]) -> tuple[JsonObject, ...]:
        tools = values.get("tools", [])
        if not isinstance(tools, list):
            self._refuse("tools", tools, "a list of OpenAI tools")
        for index, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, dict) else None
            if (
                not isinstance(function, dict)
                or tool.get("type") != "function"
                or not isinstance(function.get("name"), str)
                or not isinstance(function.get("parameters", {}), dict)
            ):
                accepted = '{"type": "function", "function": {"name": text, "parameters"?: JSON schema}}'
                self._refuse(f"tools[{index}]", tool, accepted)
        return tuple(tools)
