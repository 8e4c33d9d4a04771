"""Calculator-agent tasks from reasoning-gym's procedural generators.

A task's id is its kind and the hash of its question: the same question has the same id whatever seed it came
from. Within one call questions are distinct; across calls they are when the earlier ids are given as
``exclude``. Small kinds run out (``chain_sum`` has about 200 questions of two one-digit terms, for example, and
drawing goes on with the larger ones): a call that finds no new question in many draws says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tidegate.core.errors import ConfigError
from tidegate.core.types import Messages, Outcome, Task
from tidegate.signals.environments import Calculator
from tidegate.signals.tasks.experts import expert_answer
from tidegate.signals.verifiers import ReasoningGym
from tidegate.signals.verifiers.gym import load_reasoning_gym

SYSTEM_PROMPT = "Use the calculator, then give the number."

TASK_KINDS: Mapping[str, Mapping[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "leg_counting": {"min_animals": 1, "max_animals": 1},
}
"""Kinds that can be generated, with the generator's parameters."""

_DRAWS_WITHOUT_NEWS = 2000  # a kind that yields nothing new for so long is as good as exhausted


def generate_tasks(kind: str, count: int, seed: int, *, exclude: Collection[str] = ()) -> list[Task]:
    """``count`` tasks with distinct questions, reproducible from the seed.

    Args:
        kind: one of :data:`TASK_KINDS`.
        count: how many, >= 0.
        seed: any integer; other seeds draw other questions (some may coincide, see ``exclude``).
        exclude: ids of tasks that must not come again.

    Raises:
        ConfigError: unknown kind, negative count, no more distinct questions, or reasoning-gym not installed.
    """
    return [task for task, _ in _draw(kind, count, seed, exclude, stream="tasks")]


def demonstrations(kind: str, count: int, seed: int, *, exclude: Collection[str] = ()) -> list[tuple[Task, Messages]]:
    """Tasks with the messages that solve them ideally; each passes its own verifier.

    The same seed gives other tasks here than :func:`generate_tasks` gives; use ``exclude`` to be sure.

    Raises:
        ConfigError: as :func:`generate_tasks`.
    """
    return _draw(kind, count, seed, exclude, stream="demonstrations")


def _draw(kind: str, count: int, seed: int, exclude: Collection[str], *, stream: str) -> list[tuple[Task, Messages]]:
    if count < 0:
        raise ConfigError(f"count = {count!r} tasks cannot be generated; give 0 or more")
    verifier = ReasoningGym()
    taken = set(exclude)
    drawn: list[tuple[Task, Messages]] = []
    draws = 0
    entries = _entries(kind, seed, stream)
    while len(drawn) < count:
        draws += 1
        if draws > _DRAWS_WITHOUT_NEWS:
            raise ConfigError(
                f"kind {kind!r} has no {count} distinct questions beyond {len(exclude)} excluded ones: "
                f"{len(drawn)} found; ask for fewer tasks or exclude fewer"
            )
        task = _task(kind, next(entries))
        if task.id in taken:
            continue
        taken.add(task.id)
        messages = expert_answer(task)
        # A question that exact arithmetic answers otherwise than the generator (integer division, say) is no task
        # for this agent.
        if messages is not None and verifier.judge(task, messages).outcome is Outcome.PASS:
            drawn.append((task, messages))
            draws = 0
    return drawn


def _entries(kind: str, seed: int, stream: str) -> Iterator[Mapping[str, Any]]:
    parameters = TASK_KINDS.get(kind)
    if parameters is None:
        raise ConfigError(f"unknown task kind {kind!r}; choose one of {', '.join(map(repr, TASK_KINDS))}")
    # The generators seed item i with seed + i, so that neighbouring seeds would give nearly the same items.
    digest = hashlib.sha256(f"{stream}:{kind}:{seed}".encode()).digest()
    dataset = load_reasoning_gym().create_dataset(kind, seed=int.from_bytes(digest[:8], "big"), **parameters)
    index = 0
    while True:
        yield dataset[index]
        index += 1


def _task(kind: str, entry: Mapping[str, Any]) -> Task:
    question = " ".join(str(entry["question"]).split())
    digest = hashlib.sha256(question.encode()).hexdigest()
    calculator = Calculator()
    return Task(
        id=f"{kind}-{digest[:16]}",
        messages=({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}),
        tools=calculator.tools,
        verifier="reasoning_gym",
        # The scorers of these kinds read nothing of an entry but its answer, and references travel with requests.
        reference={"dataset": kind, "entry": {"answer": str(entry["answer"])}},
        kind=kind,
        environment=calculator.name,
    )
