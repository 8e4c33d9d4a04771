"""Task files: what is written is read back, and every malformed line says where, what, and what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.chat import ANY_TOOL
from tidegate.core.errors import TaskFileError
from tidegate.core.types import Task
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.signals.tasks import read_tasks, write_tasks

GOOD: dict[str, Any] = {
    "id": "a",
    "messages": [{"role": "user", "content": "What is 1 + 1?"}],
    "verifier": "numeric_answer",
    "reference": "2",
}


def read(path: Path) -> list[Task]:
    return read_tasks(path, verifiers=builtin_verifiers(), environments=builtin_environments())


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "tasks.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_tasks_file_fills_in_the_defaults(tmp_path: Path) -> None:
    (task,) = read(write(tmp_path, "", GOOD, ""))
    assert task == Task(
        id="a", messages=tuple(GOOD["messages"]), verifier="numeric_answer", reference="2", kind="default"
    )


def test_tasks_file_an_environment_brings_its_tools(tmp_path: Path) -> None:
    (task,) = read(write(tmp_path, GOOD | {"environment": "calculator"}))
    assert task.tools == builtin_environments()["calculator"].tools
    (task,) = read(write(tmp_path, GOOD | {"environment": "calculator", "tools": []}))
    assert task.tools == ()


def test_tasks_file_reads_back_what_was_written(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tasks = [
        Task(
            id="a",
            messages=({"role": "user", "content": "line\u2028separator \u00e9"},),
            tools=(tool,),
            verifier="tool_call",
            reference=[{"f": {"x": [1, ""]}}],
            kind="k",
            environment="calculator",
            tool_choice="f",
        ),
        Task(id="b", messages=({"role": "user", "content": "?"},), verifier="exact_text", reference="yes"),
        Task(
            id="c",
            messages=({"role": "user", "content": "?"},),
            verifier="exact_text",
            reference="yes",
            json_schema='{"type":"object","properties":{"z":{"const":"\u00e9"},"a":{}}}',
        ),
        Task(
            id="d",
            messages=({"role": "user", "content": "?"},),
            tools=(tool,),
            verifier="exact_text",
            reference="yes",
            tool_choice=ANY_TOOL,
        ),
    ]
    path = tmp_path / "tasks.jsonl"
    assert write_tasks(path, tasks) == 4
    assert read(path) == tasks


@pytest.mark.parametrize(
    ("line", "field", "value", "accepted"),
    [
        ("{", "", "'{'", "not JSON"),
        ("[1]", "", "[1]", "JSON object"),
        (json.dumps(GOOD)[:-1] + ', "kind": NaN}', "", "NaN", "not JSON"),
        ({"id": "a"}, "'messages'", "missing", "required"),
        (GOOD | {"environmnt": "x"}, "'environmnt'", "'x'", "'environment'"),
        (GOOD | {"id": ""}, "'id'", "''", "not blank"),
        (GOOD | {"id": 3}, "'id'", "3", "a text"),
        (GOOD | {"kind": None}, "'kind'", "None", "a text"),
        (GOOD | {"verifier": "numeric"}, "'verifier'", "'numeric'", "'numeric_answer'"),
        (GOOD | {"verifier": ["x"]}, "'verifier'", "['x']", "'numeric_answer'"),
        (GOOD | {"reference": "two"}, "'reference'", "'two'", "a finite number"),
        (GOOD | {"environment": "shell"}, "'environment'", "'shell'", "'calculator'"),
        (GOOD | {"environment": ["shell"]}, "'environment'", "['shell']", "'calculator'"),
        (GOOD | {"json_schema": "{}"}, "'json_schema'", "'{}'", "an object"),
        (GOOD | {"json_schema": {}, "environment": "calculator"}, "'json_schema'", "{}", "without tools"),
        (GOOD | {"tool_choice": "required"}, "'tool_choice'", "'required'", "one of []"),
        (GOOD | {"tool_choice": "f", "environment": "calculator"}, "'tool_choice'", "'f'", "['calculator']"),
        (GOOD | {"messages": []}, "'messages'", "[]", "one or more"),
        (GOOD | {"messages": "hi"}, "'messages'", "'hi'", "one or more"),
        (GOOD | {"messages": ["hi"]}, "'messages[0]'", "'hi'", '"role"'),
        (GOOD | {"messages": [{"role": "bot", "content": ""}]}, "'messages[0].role'", "'bot'", "'user'"),
        (GOOD | {"messages": [{"role": "user", "content": 3}]}, "'messages[0].content'", "3", "a text"),
        (GOOD | {"messages": [{"role": "user"}]}, "'messages[0].content'", "None", "a text"),
        (GOOD | {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "content'", "'x'", "text parts"),
        (GOOD | {"tools": {}}, "'tools'", "{}", "a list"),
        (GOOD | {"tools": [{"type": "function"}]}, "'tools[0]'", "{'type': 'function'}", '"function"'),
        (GOOD | {"tools": [{"type": "function", "function": {"name": 1}}]}, "'tools[0]'", "1", '"name"'),
        (GOOD | {"id": "good"}, "'id'", "'good'", "line 1"),
    ],
)  # fmt: skip
def test_tasks_file_a_malformed_line_says_where_what_and_what_is_accepted(
    tmp_path: Path, line: Any, field: str, value: str, accepted: str
) -> None:
    path = write(tmp_path, GOOD | {"id": "good"}, line)
    with pytest.raises(TaskFileError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    for part in (field, value, accepted):
        assert part in message


def test_tasks_file_missing_empty_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"none\.jsonl' does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(TaskFileError, match="holds no task"):
        read(write(tmp_path, "", ""))
    with pytest.raises(TaskFileError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}")
    with pytest.raises(TaskFileError, match="UTF-8"):
        read(tmp_path / "binary")


def test_tasks_file_accepts_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert [task.id for task in read(path)] == ["a"]
