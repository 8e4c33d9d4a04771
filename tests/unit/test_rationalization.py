"""Hints: what they say for each verifier, where they stand, when they leaked, and how they go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidegate.core.rationalization import HINT_LEAKED, NOT_ONE_SEQUENCE, mentions_hint, with_hint, without_hint
from tidegate.core.types import Example, JsonObject, Messages, Task
from tidegate.signals.hints import hint_for

HINT = "Hint: the right answer: 4"
QUESTION: Messages = ({"role": "user", "content": "2+2?"},)


def task(verifier: str, reference: Any) -> Task:
    return Task(id="t", messages=QUESTION, verifier=verifier, reference=reference)


@pytest.mark.parametrize(
    ("verifier", "reference", "hint"),
    [
        ("numeric_answer", 4, "Hint: the right answer: 4"),
        ("numeric_answer", "3/4", "Hint: the right answer: 3/4"),
        ("numeric_answer", {"answer": 2.5, "tolerance": 0.1}, "Hint: the right answer: 2.5"),
        ("exact_text", " yes ", "Hint: the right answer: yes"),
        ("exact_text", "x" * 500, f"Hint: the right answer: {'x' * 500}"),
        ("exact_text", "x" * 501, None),
        ("reasoning_gym", {"dataset": "d", "entry": {"answer": "east"}}, "Hint: the right answer: east"),
        ("reasoning_gym", {"dataset": "d", "entry": {"answer": 7}}, "Hint: the right answer: 7"),
        ("reasoning_gym", {"dataset": "d", "entry": {"answer": None}}, None),
        ("reasoning_gym", {"dataset": "d", "entry": {"answer": [[1], [2]]}}, None),
        ("tool_call", [{"sum": {"a": [1, 2], "b": ["", 3]}}], 'Hint: the right calls: sum({"a": 1})'),
        ("tool_call", [{"f": {}}, {"g": {"x": ["ü"]}}], 'Hint: the right calls: f({}), g({"x": "ü"})'),
        ("gut_feeling", 4, None),
    ],
)
def test_a_hint_gives_away_what_the_verifier_accepts(verifier: str, reference: Any, hint: str | None) -> None:
    assert hint_for(task(verifier, reference)) == hint


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("2+2?", f"2+2?\n{HINT}"),
        ([{"type": "text", "text": "2+2?"}], [{"type": "text", "text": "2+2?"}, {"type": "text", "text": f"\n{HINT}"}]),
        (None, f"\n{HINT}"),
    ],
)
def test_the_hint_ends_the_last_message_of_the_user(content: Any, expected: Any) -> None:
    system: JsonObject = {"role": "system", "content": "be brief"}
    first: JsonObject = {"role": "user", "content": "hello"}
    reply: JsonObject = {"role": "assistant", "content": "hi"}
    messages: Messages = (system, first, reply, {"role": "user", "content": content, "name": "kim"}, reply)
    last = {"role": "user", "content": expected, "name": "kim"}
    assert with_hint(messages, HINT) == (system, first, reply, last, reply)


def test_where_no_user_speaks_there_is_no_place_for_a_hint() -> None:
    assert with_hint(({"role": "system", "content": "2+2?"},), HINT) is None


def said(content: str, arguments: str | None = None) -> Messages:
    calls = [] if arguments is None else [{"function": {"name": "search", "arguments": arguments}}]
    return ({"role": "assistant", "content": content, "tool_calls": calls},)


@pytest.mark.parametrize(
    ("messages", "leaked"),
    [
        (said("It is 4."), False),
        (said("the right answer is 4"), False),
        (said("chinted glass"), False),
        (said(f"You said: {HINT}"), True),
        (said("hint:  the RIGHT\nanswer: 4"), True),
        (said("The Hint tells me so."), True),
        (said("as hinted, 4"), True),
        (said("", '{"query": "Hint: the right answer: 4"}'), True),
        ((*said("It is 4."), {"role": "tool", "content": HINT}), True),
    ],
)
def test_an_answer_that_speaks_of_the_hint_leaks_it(messages: Messages, leaked: bool) -> None:
    assert mentions_hint(messages, HINT, QUESTION) is leaked


def test_quotes_that_json_escaped_hide_no_hint() -> None:
    hint = 'Hint: the right calls: sum({"a": 1})'
    question: Messages = ({"role": "user", "content": "a hint?"},)
    assert mentions_hint(said("", '{"q": "Hint: the right calls: sum({\\"a\\": 1})"}'), hint, question)


def test_a_question_about_hints_may_be_answered_with_the_word() -> None:
    question: Messages = ({"role": "user", "content": "Give me a hint for 2+2."},)
    assert not mentions_hint(said("My hint: count."), HINT, question)
    assert mentions_hint(said(HINT), HINT, question)


EXAMPLE = Example(
    id="r", weight=1.0, source="episode", kind="sums",
    token_ids=(1, 2, 8, 9, 3, 20, 21, 30, 22), loss_mask=(0, 0, 0, 0, 0, 1, 1, 0, 1),
    logprobs=(0.0, 0.0, 0.0, 0.0, 0.0, -0.1, -0.2, 0.0, -0.3), group="g", reward=1.0,
)  # fmt: skip


def test_what_came_after_the_hinted_prompt_stands_after_the_prompt_without() -> None:
    result = without_hint(EXAMPLE, hinted_prompt=(1, 2, 8, 9, 3), prompt=(1, 2, 3))
    assert result == replace(
        EXAMPLE, source="rationalized", token_ids=(1, 2, 3, 20, 21, 30, 22), loss_mask=(0, 0, 0, 1, 1, 0, 1),
        logprobs=(), group=None,
    )  # fmt: skip


def test_tokens_that_do_not_begin_with_the_hinted_prompt_are_not_one_sequence() -> None:
    assert without_hint(EXAMPLE, hinted_prompt=(1, 2, 8, 9, 4), prompt=(1, 2, 4)) == NOT_ONE_SEQUENCE


@pytest.mark.parametrize("after", [(8, 9), (20, 8, 9), (8, 8, 9, 20)])
def test_the_hints_own_tokens_may_not_come_again(after: tuple[int, ...]) -> None:
    example = replace(EXAMPLE, token_ids=(1, 2, 8, 9, 3, *after), loss_mask=(0,) * 5 + (1,) * len(after), logprobs=())
    assert without_hint(example, hinted_prompt=(1, 2, 8, 9, 3), prompt=(1, 2, 3)) == HINT_LEAKED
