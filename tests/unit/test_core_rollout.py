"""The agent loop: when it goes on, when it ends, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.rollout import Transcript, assistant_message, run_episode, tool_messages, transcript_of
from tidegate.core.types import Choice, JsonObject, Messages, Task

TASK = Task(id="t", messages=({"role": "user", "content": "2+2"},), verifier="numeric", reference=4)


class Adder:
    """Adds the numbers that it is called with and remembers the calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def execute(self, name: str, arguments: str) -> str:
        self.called.append(name)
        return f"{name}({arguments})"


def call(name: str) -> JsonObject:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def choice(text: str = "", *calls: str, tokens: int = 1, invalid: bool = False) -> Choice:
    return Choice(
        index=0,
        token_ids=(5,) * tokens,
        logprobs=(-1.0,) * tokens,
        text=text,
        tool_calls=tuple(call(name) for name in calls),
        invalid_tool_call=invalid,
    )


class Script:
    """Answers with the given choices in turn and keeps the conversations that it was shown."""

    def __init__(self, *choices: Choice) -> None:
        self.choices = choices
        self.seen: list[Messages] = []

    async def __call__(self, messages: Messages, call_number: int) -> Choice:
        assert call_number == len(self.seen)
        self.seen.append(messages)
        return self.choices[call_number]


async def test_tools_are_executed_until_an_answer_comes() -> None:
    script, adder = Script(choice("", "a", "b"), choice("wait", "c"), choice("4")), Adder()
    transcript = await run_episode(TASK, script, adder)
    assert adder.called == ["a", "b", "c"]
    assert [message["role"] for message in transcript.messages] == [
        "assistant", "tool", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert transcript.messages[1] == {"role": "tool", "tool_call_id": "call_a", "content": "a({})"}
    assert script.seen[1] == (*TASK.messages, *transcript.messages[:3])


async def test_an_answer_without_calls_ends_the_episode() -> None:
    transcript = await run_episode(TASK, Script(choice("4")), Adder())
    assert transcript.messages == ({"role": "assistant", "content": "4"},)


async def test_without_environment_a_call_ends_the_episode() -> None:
    transcript = await run_episode(TASK, Script(choice("", "a")), None)
    assert len(transcript.choices) == 1
    assert transcript.messages[0]["tool_calls"] == [call("a")]


@pytest.mark.parametrize("max_calls", [1, 2, 3])
async def test_the_limit_ends_the_episode_before_its_last_calls_are_executed(max_calls: int) -> None:
    adder = Adder()
    script = Script(*(choice("", f"f{number}") for number in range(9)))
    transcript = await run_episode(TASK, script, adder, max_calls=max_calls)
    assert len(transcript.choices) == max_calls
    assert len(adder.called) == max_calls - 1
    assert transcript.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("choices", "no_reply"),
    [
        ((), True),
        ((choice(" \n"),), True),
        ((choice("4"),), False),
        ((choice("", "a"),), False),
        ((choice("4"), choice("")), True),
    ],
)
def test_no_reply_is_an_empty_last_answer(choices: Sequence[Choice], no_reply: bool) -> None:
    assert Transcript(messages=(), choices=tuple(choices)).no_reply is no_reply


def test_one_invalid_call_marks_the_episode() -> None:
    assert Transcript(messages=(), choices=(choice("x", invalid=True), choice("4"))).invalid_tool_call
    assert not Transcript(messages=(), choices=(choice("4"),)).invalid_tool_call


def test_tokens_are_counted_over_all_calls() -> None:
    assert Transcript(messages=(), choices=(choice(tokens=3), choice(tokens=4))).tokens == 7


def test_results_come_in_the_order_of_the_calls() -> None:
    results = tool_messages(choice("", "b", "a"), Adder())
    assert [message["tool_call_id"] for message in results] == ["call_b", "call_a"]


def test_an_answer_without_calls_names_none() -> None:
    assert "tool_calls" not in assistant_message(choice("4"))


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=2), min_size=1, max_size=4), st.integers(1, 4))
async def test_a_recorded_episode_rebuilds_the_transcript(calls: list[list[str]], max_calls: int) -> None:
    script = Script(*(choice(str(number), *names) for number, names in enumerate([*calls, []])))
    transcript = await run_episode(TASK, script, Adder(), max_calls=max_calls)
    assert transcript_of(TASK, script.seen, transcript.choices) == transcript
