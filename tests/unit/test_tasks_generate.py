"""Generated calculator tasks: distinct, reproducible, solvable with the calculator; experts solve every one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tidegate.core.errors import ConfigError
from tidegate.core.types import Outcome
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.signals.tasks import SYSTEM_PROMPT, TASK_KINDS, demonstrations, expert_answer, generate_tasks
from tidegate.signals.tasks.experts import leg_expression

KINDS = list(TASK_KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_generated_are_distinct_and_reproducible(kind: str) -> None:
    tasks = generate_tasks(kind, 200, 5)
    questions = [task.messages[-1]["content"] for task in tasks]
    assert len(set(questions)) == len({task.id for task in tasks}) == 200
    assert tasks == generate_tasks(kind, 200, 5)
    assert tasks[:20] == generate_tasks(kind, 20, 5)
    assert all(question == " ".join(question.split()) for question in questions)


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_generated_from_neighbouring_seeds_differ(kind: str) -> None:
    ids = [{task.id for task in generate_tasks(kind, 100, seed)} for seed in (1, 2)]
    assert len(ids[0] & ids[1]) < 30


def test_tasks_generated_never_repeat_excluded_ones() -> None:
    first = generate_tasks("chain_sum", 300, 1)
    second = generate_tasks("chain_sum", 300, 1, exclude=[task.id for task in first])
    assert not {task.id for task in first} & {task.id for task in second}


def test_tasks_generated_have_the_calculator_and_a_short_prompt() -> None:
    (task,) = generate_tasks("products", 1, 0)
    assert task.messages[0] == {"role": "system", "content": SYSTEM_PROMPT}
    assert task.messages[1]["content"].startswith("Solve the following multiplication: ")
    assert (task.kind, task.environment, task.verifier) == ("products", "calculator", "reasoning_gym")
    assert task.tools == builtin_environments()["calculator"].tools
    builtin_verifiers()[task.verifier].check_reference(task.reference)
    assert len(json.dumps(task.reference)) < 100


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_demonstrations_pass_their_own_verifier(kind: str) -> None:
    shown = demonstrations(kind, 50, 3)
    assert len({task.id for task, _ in shown}) == 50
    verifier = builtin_verifiers()["reasoning_gym"]
    for task, messages in shown:
        assert verifier.judge(task, messages).outcome is Outcome.PASS
        call, result, answer = messages
        (made,) = call["tool_calls"]
        assert made["function"]["name"] == "calculator"
        assert result["tool_call_id"] == made["id"]
        assert result["content"] == answer["content"] == task.reference["entry"]["answer"]
        assert expert_answer(task) == messages


def test_tasks_demonstrations_call_the_calculator_with_the_expression_of_the_question() -> None:
    for kind in ("chain_sum", "products", "basic_arithmetic"):
        ((task, messages),) = demonstrations(kind, 1, 0)
        expression = json.loads(messages[0]["tool_calls"][0]["function"]["arguments"])["expression"]
        assert expression in task.messages[-1]["content"]
    assert leg_expression({"spider": 3, "crab": 2}) == "3*8 + 2*10"


def test_tasks_an_expert_says_nothing_about_what_no_rule_solves() -> None:
    (task,) = generate_tasks("leg_counting", 1, 0)
    assert expert_answer(replace(task, kind="default")) is None
    for question in ("How many legs?", "if you have 3 unicorns?", "if you have many spiders?"):
        assert expert_answer(replace(task, messages=({"role": "user", "content": question},))) is None
    assert expert_answer(replace(task, messages=())) is None


def test_tasks_generated_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ConfigError, match="unknown task kind 'chainsum'; choose one of 'chain_sum'"):
        generate_tasks("chainsum", 1, 0)
    with pytest.raises(ConfigError, match="count = -1"):
        generate_tasks("chain_sum", -1, 0)


def test_tasks_generated_say_when_a_kind_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    monkeypatch.setattr("tidegate.signals.tasks.generate.TASK_KINDS", {"products": tiny})
    assert len(generate_tasks("products", 100, 0)) == 100
    with pytest.raises(ConfigError, match="100 found; ask for fewer"):
        generate_tasks("products", 101, 0)
