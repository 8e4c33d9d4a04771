"""Whatever is asked, hinted and said: no training token holds the hint, and all that was sampled after it is kept."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gate_engine import make_grading
from rollout_world import CharacterEngine, as_text, prompt_text, sum_task
from tidegate.core.selection.exploring import Asked
from tidegate.core.types import GenerationRequest, Sampling, Task
from tidegate.cycle.rationalize import Rationalized, rationalize
from tidegate.cycle.rollouts import Sampler
from tidegate.gate import Arm
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.signals.environments import Calculator
from tidegate.signals.hints import hint_for

WORDS = st.sampled_from(
    ["Hint:", "hint", "the", "right", "answer:", "4", "14", "is", "<user>", "\n", '"', "\\", "half", "1 + 1", "</>"]
)
TEXTS = st.lists(WORDS, max_size=8).map(" ".join)
LEAKS = st.tuples(TEXTS, TEXTS).map("Hint: the right answer: 4".join)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 2"}}</tool_call>'


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    turns = draw(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXTS), max_size=3))
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
    changes: dict[str, Any] = {"messages": (*messages, {"role": "user", "content": draw(TEXTS)}), "reference": 4}
    if draw(st.booleans()):
        changes |= {"tools": Calculator.tools, "environment": "calculator"}
    return sum_task(0, **changes)


async def rationalized(task: Task, answers: list[str]) -> Rationalized:
    def say(request: GenerationRequest) -> str:
        results = sum(message["role"] == "tool" for message in request.messages[len(task.messages) :])
        return answers[min(results, len(answers) - 1)]

    engine = CharacterEngine(say=say)
    sampler = Sampler(
        engine=engine,
        arm=Arm.of(None, base_sha256=engine.base_sha256),
        grading=make_grading(verifiers=builtin_verifiers(), environments=builtin_environments()),
        decoding=Sampling(),
        seed=0,
        release_id="r0",
        time=1.0,
        on_answer=lambda: None,
    )
    unhinted = tuple(map(ord, prompt_text(task.messages, task.tools)))
    asked = Asked(task=task, user_key="u", solved=0, judged=1)
    return await rationalize(sampler, [asked], {task.id: unhinted}, threshold=1.0)


@settings(deadline=None, max_examples=150)
@given(tasks(), st.lists(st.one_of(TEXTS, LEAKS, st.just(CALL)), max_size=2), st.one_of(st.just("4"), LEAKS, TEXTS))
def test_no_training_token_holds_the_hint(task: Task, calls: list[str], last: str) -> None:
    hint = hint_for(task)
    assert hint is not None
    prompt = prompt_text(task.messages, task.tools)
    assume(hint not in prompt)
    result = asyncio.run(rationalized(task, [*calls, last]))
    assert len(result.items) == 1
    for item in result.examples:
        example, text = item.example, as_text(item.example.token_ids)
        assert hint not in text
        assert text.startswith(prompt)
        assert not any(example.loss_mask[: len(prompt)])
        after = text[len(prompt) :]
        trained = "".join(sign for sign, mask in zip(text, example.loss_mask, strict=True) if mask)
        said = [*calls, last]
        assert trained in {"".join(f"{answer}</>" for answer in said[: count + 1]) for count in range(len(said))}
        assert after.endswith(trained[-4:])
        assert (example.logprobs, example.group) == ((), None)


def test_the_property_is_not_empty() -> None:
    """Answers in one and in two calls do come through."""
    plain = asyncio.run(rationalized(sum_task(0, reference=4), ["it is 4"]))
    with_tool = sum_task(0, reference=4, tools=Calculator.tools, environment="calculator")
    called = asyncio.run(rationalized(with_tool, [CALL, "4"]))
    assert [len(result.examples) for result in (plain, called)] == [1, 1]
