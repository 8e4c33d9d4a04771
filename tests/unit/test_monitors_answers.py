"""What is read from recorded episodes, and every reason for which one is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from store_samples import interaction, verdict
from tidegate.core.monitors import RecordedAnswer, recorded_answers
from tidegate.core.types import Choice, Episode, Interaction, Outcome, Sampling, Split, Task, Verdict

TASK = Task(id="t", messages=({"role": "user", "content": "2+2?"},), verifier="numeric", reference=4, kind="sum")
CHOICE = Choice(index=0, token_ids=(5, 6, 7), logprobs=(-0.5, -1.0, -0.25), text=" Four. ")


def call(identifier: str = "i", **changes: Any) -> Interaction:
    base = interaction(
        identifier, task=TASK, release_id="r1", sampling=Sampling(temperature=0.7), choices=(CHOICE,), tools=()
    )
    return replace(base, **changes)


def episode(*calls: Interaction, split: Split = Split.TRAIN) -> Episode:
    return Episode(id="e1", user_key="u1", split=split, interactions=calls or (call(),))


def read(*episodes: Episode, verdicts: tuple[Verdict, ...] = (verdict(),)) -> tuple[RecordedAnswer, ...]:
    answers, excluded = recorded_answers(episodes, verdicts, {"r1": "r1", "r3": "r1"})
    assert excluded == {}
    return answers


def test_an_answer_carries_what_its_episode_was_like() -> None:
    (answer,) = read(episode())
    assert replace(answer, prompt="") == RecordedAnswer(
        id="e1", release="r1", kind="sum", prompt="", passed=True, strategy=((), "four"), tokens=3, no_reply=False,
        invalid_tool_call=False, refused=False, temperature=0.7, surprisal=1.75,
    )  # fmt: skip


def test_all_main_line_calls_count_and_the_last_text_is_the_answer() -> None:
    asked = ({"id": "c", "type": "function", "function": {"name": "calc", "arguments": "{}"}},)
    first = call("i1", choices=(replace(CHOICE, text="", tool_calls=asked, invalid_tool_call=True),))
    side = call("i2", main_line=False, release_id="r2", sampling=Sampling(top_p=0.5))
    last = call("i3", choices=(replace(CHOICE, text="I'm sorry, but I can't help with that."),))
    (answer,) = read(episode(first, side, last))
    assert (answer.strategy[0], answer.tokens, answer.surprisal) == (("calc",), 6, 3.5)
    assert (answer.invalid_tool_call, answer.no_reply, answer.refused) == (True, False, True)


def test_releases_of_the_same_content_are_one() -> None:
    (answer,) = read(episode(call("i1", release_id="r3"), call("i2", release_id="r1")))
    assert answer.release == "r1"


@pytest.mark.parametrize(("outcome", "passed"), [(Outcome.PASS, True), (Outcome.FAIL, False), (Outcome.ABSTAIN, None)])
def test_the_deciding_verdict_says_whether_it_passed(outcome: Outcome, passed: bool | None) -> None:
    older = verdict(version="0", outcome=Outcome.FAIL, score=0.0, created_at=1.0)
    other = verdict(verifier="other", outcome=Outcome.FAIL, score=0.0, created_at=99.0)
    (answer,) = read(episode(), verdicts=(verdict(outcome=outcome), older, other, verdict("e2")))
    assert answer.passed is passed
    assert read(episode(), verdicts=())[0].passed is None


def test_prompts_are_told_apart_by_messages_and_tools() -> None:
    other = replace(TASK, messages=({"role": "user", "content": "2+3?"},))
    prompts = {
        read(episode(call(task=task, messages=messages)))[0].prompt
        for task, messages in (
            (TASK, TASK.messages),
            (TASK, other.messages),  # the task is what was asked
            (replace(TASK, id="t2", reference=5), TASK.messages),
            (None, TASK.messages),  # without a task the first call's own messages
        )
    }
    assert len(prompts) == 1
    assert read(episode(call(task=other)))[0].prompt not in prompts
    assert read(episode(call(task=replace(TASK, tools=({"type": "function"},)))))[0].prompt not in prompts
    assert read(episode(call(task=None, messages=({"role": "user", "content": "half \ud83d"},))))[0].kind == "default"


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(temperature=0.0)},
        {"sampling": Sampling(top_p=0.9)},
        {"sampling": Sampling(top_k=40)},
        {"sampling": Sampling(presence_penalty=0.5)},
        {"sampling": Sampling(frequency_penalty=-0.5)},
        {"choices": (replace(CHOICE, logprobs=()),)},
        {"choices": (replace(CHOICE, logprobs=(-0.5, float("-inf"), -1.0)),)},
        {"choices": (replace(CHOICE, logprobs=(-0.5, float("nan"), -1.0)),)},
        {"choices": (replace(CHOICE, token_ids=(), logprobs=()),)},
    ],
)
def test_entropy_needs_log_probabilities_of_the_distribution_sampled_from(changes: dict[str, Any]) -> None:
    (answer,) = read(episode(call(**changes)))
    assert (answer.temperature, answer.surprisal) == (None, None)
    mixed = read(episode(call("i1"), call("i2", sampling=Sampling(temperature=1.0))))[0]
    assert (mixed.temperature, mixed.surprisal, mixed.tokens) == (None, None, 6)


NAMELESS = replace(CHOICE, tool_calls=({"id": "c", "type": "function"},))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (episode(split=Split.SEALED), "sealed"),
        (episode(call(split=Split.SEALED)), "sealed"),
        (episode(call(split=Split.SEALED, consent=False)), "sealed"),
        (episode(call("i1"), call("i2", main_line=False, consent=False)), "no_consent"),
        (episode(call(main_line=False)), "no_main_line"),
        (episode(call("i1"), call("i2", release_id="r2")), "mixed_releases"),
        (episode(call("i1"), call("i2", sampling=Sampling(n=2, search="best-of-2"))), "searched"),
        (episode(call(choices=())), "broken"),
        (episode(call(choices=(NAMELESS,))), "broken"),
    ],
)
def test_what_is_left_out_is_counted_by_reason(bad: Episode, reason: str) -> None:
    answers, excluded = recorded_answers([bad, episode(), bad], (), {"r1": "r1"})
    assert (len(answers), excluded) == (1, {reason: 2})


def test_dev_episodes_are_read_too() -> None:
    assert len(read(episode(call(split=Split.DEV), split=Split.DEV))) == 1
