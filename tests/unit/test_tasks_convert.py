"""Published task sets in small: the same shapes, every malformed line named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.errors import ConfigError, TaskFileError
from tidegate.core.types import Outcome, Task
from tidegate.signals import builtin_verifiers
from tidegate.signals.tasks import bfcl_demonstrations, convert, expert_answer

QUESTION: dict[str, Any] = {
    "id": "simple_python_7",
    "question": [[{"role": "user", "content": "Book two seats in row 3.5 for the window side."}]],
    "function": [
        {
            "name": "cinema.book",
            "description": "Book seats.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "seats": {"type": "integer", "description": "How many."},
                    "row": {"type": "float"},
                    "corner": {"type": "tuple", "items": {"type": "float"}},
                    "extra": {"type": "any", "description": "Anything."},
                    "where": {"type": "dict", "properties": {"type": {"type": "string"}}},
                },
                "required": ["seats", "row"],
            },
        }
    ],
}
ANSWER: dict[str, Any] = {
    "id": "simple_python_7",
    "ground_truth": [
        {
            "cinema.book": {
                "seats": [2],
                "row": [3.5],
                "corner": ["", [1.0, 2.0]],
                "extra": [""],
                "where": [{"type": ["window", "Window seat"], "floor": ["", 1]}],
            }
        }
    ],
}
PROBLEM = {"id": "gsm8k-0", "question": "Two and two?", "answer": "1,004"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def bfcl(tmp_path: Path, question: Any = QUESTION, answer: Any = ANSWER) -> list[Task]:
    return list(convert("bfcl", [write(tmp_path / "q.jsonl", question), write(tmp_path / "a.jsonl", answer)]))


def test_tasks_bfcl_questions_become_tool_call_tasks(tmp_path: Path) -> None:
    (task,) = bfcl(tmp_path)
    assert (task.id, task.kind, task.verifier, task.environment) == (
        "simple_python_7",
        "simple_python",
        "tool_call",
        None,
    )
    assert task.messages == tuple(QUESTION["question"][0])
    assert task.reference == ANSWER["ground_truth"]
    function = task.tools[0]["function"]
    assert function["name"] == "cinema.book"
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "seats": {"type": "integer", "description": "How many."},
            "row": {"type": "number"},
            "corner": {"type": "array", "items": {"type": "number"}},
            "extra": {"description": "Anything."},
            "where": {"type": "object", "properties": {"type": {"type": "string"}}},
        },
        "required": ["seats", "row"],
    }


def test_tasks_bfcl_demonstrations_take_first_accepted_values_and_leave_out_the_optional(tmp_path: Path) -> None:
    ((task, messages),) = bfcl_demonstrations(bfcl(tmp_path))
    (message,) = messages
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "cinema.book"
    assert json.loads(call["function"]["arguments"]) == {"seats": 2, "row": 3.5, "where": {"type": "window"}}
    assert builtin_verifiers()["tool_call"].judge(task, messages).outcome is Outcome.PASS


def test_tasks_bfcl_demonstrations_refuse_tasks_without_a_known_solution(tmp_path: Path) -> None:
    tasks = list(convert("gsm8k", [write(tmp_path / "g.jsonl", PROBLEM)]))
    assert expert_answer(tasks[0]) is None
    with pytest.raises(ConfigError, match="'gsm8k-0' has no demonstration"):
        bfcl_demonstrations(tasks)


def test_tasks_gsm8k_problems_become_numeric_tasks(tmp_path: Path) -> None:
    (task,) = convert("gsm8k", [write(tmp_path / "g.jsonl", PROBLEM)])
    assert (task.id, task.kind, task.verifier, task.reference, task.tools) == (
        "gsm8k-0",
        "gsm8k",
        "numeric_answer",
        "1,004",
        (),
    )
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert task.messages[1]["content"] == "Two and two?"


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        ({**QUESTION, "id": "x"}, ANSWER, "q.jsonl:1: field 'id' = 'x' has no line in"),
        (QUESTION, {**ANSWER, "ground_truth": {}}, "a.jsonl:1: field 'ground_truth' = {} is not usable; accepted: "),
        ({**QUESTION, "question": []}, ANSWER, "q.jsonl:1: field 'question'"),
        ({**QUESTION, "question": [["hi"]]}, ANSWER, "q.jsonl:1: field 'question'"),
        ({**QUESTION, "function": [{}]}, ANSWER, "q.jsonl:1: field 'function'"),
        ({**QUESTION, "id": None}, ANSWER, "q.jsonl:1: field 'id' = None"),
    ],
)
def test_tasks_bfcl_malformed_lines_are_named(tmp_path: Path, question: Any, answer: Any, message: str) -> None:
    with pytest.raises(TaskFileError) as caught:
        bfcl(tmp_path, question, answer)
    assert message in str(caught.value)


def test_tasks_bfcl_answers_without_question_are_named(tmp_path: Path) -> None:
    answers = write(tmp_path / "a.jsonl", ANSWER, {**ANSWER, "id": "left_over_1"})
    with pytest.raises(TaskFileError, match=r"a\.jsonl:2: field 'id' = 'left_over_1' has no line in"):
        list(convert("bfcl", [write(tmp_path / "q.jsonl", QUESTION), answers]))


def test_tasks_gsm8k_malformed_lines_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", PROBLEM, {**PROBLEM, "answer": "four"})
    with pytest.raises(TaskFileError, match=r"g\.jsonl:2: field 'answer' = 'four' is not usable; accepted: a finite"):
        list(convert("gsm8k", [path]))


def test_tasks_convert_refuses_unknown_formats_and_wrong_numbers_of_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown task format 'csv'; choose one of 'bfcl', 'gsm8k'"):
        convert("csv", [tmp_path])
    with pytest.raises(ConfigError, match=r"takes 2 files \(questions, answers\); 1 given"):
        convert("bfcl", [tmp_path])
