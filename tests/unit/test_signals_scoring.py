"""Recorded episodes become verdicts once; whatever cannot be judged is counted, and never stops the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tidegate.core.errors import ConfigError
from tidegate.core.rollout import assistant_message, tool_messages
from tidegate.core.types import (
    Choice,
    Episode,
    Interaction,
    Json,
    JsonObject,
    Messages,
    Outcome,
    Sampling,
    Split,
    Task,
    Verdict,
)
from tidegate.ports import Verifier
from tidegate.ports.signals import Judgement
from tidegate.signals import Scoring, builtin_environments, builtin_verifiers, score_episodes, verdict_key

NOW = 10_000.0
CALCULATOR = builtin_environments()["calculator"]
TASK = Task(
    id="t",
    messages=({"role": "user", "content": "What is 40 + 2?"},),
    tools=CALCULATOR.tools,
    verifier="numeric_answer",
    reference=42,
    environment="calculator",
)
CALL: JsonObject = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "40 + 2"}'},
}


def choice(text: str = "", *, calls: tuple[JsonObject, ...] = (), invalid: bool = False) -> Choice:
    return Choice(index=0, token_ids=(1,), logprobs=(-0.1,), text=text, tool_calls=calls, invalid_tool_call=invalid)


def interaction(messages: Messages, answer: Choice, *, number: int = 0, **changes: Any) -> Interaction:
    base = Interaction(
        id=f"i{number}",
        episode_id="e",
        user_key="u",
        split=Split.TRAIN,
        created_at=NOW - 10 + number,
        messages=messages,
        tools=TASK.tools,
        sampling=Sampling(),
        prompt_token_ids=(1,),
        choices=(answer,),
        release_id="r0",
        engine_replica="e0",
        latency_s=0.1,
        task=TASK if number == 0 else None,
    )
    return replace(base, **changes)


def episode(*interactions: Interaction, identifier: str = "e") -> Episode:
    return Episode(id=identifier, user_key="u", split=Split.TRAIN, interactions=interactions)


def two_calls(answer: Choice, identifier: str = "e") -> Episode:
    first = choice(calls=(CALL,))
    follow_up = (*TASK.messages, assistant_message(first), *tool_messages(first, CALCULATOR))
    return episode(interaction(TASK.messages, first), interaction(follow_up, answer, number=1), identifier=identifier)


def score(*episodes: Episode, known: Sequence[tuple[str, str, str]] = (), **options: Any) -> Scoring:
    return score_episodes(episodes, options.pop("verifiers", builtin_verifiers()), known, lambda: NOW, **options)


def test_signals_scoring_judges_the_rebuilt_transcript() -> None:
    scoring = score(two_calls(choice("42"), "right"), two_calls(choice("41"), "wrong"), two_calls(choice(""), "mute"))
    assert scoring.counts == {"right": 1, "wrong": 1, "no_reply": 1}
    assert scoring.verdicts[0] == Verdict(
        episode_id="right",
        verifier="numeric_answer",
        version="1",
        outcome=Outcome.PASS,
        score=1.0,
        detail="right",
        seconds=0.0,
        created_at=NOW,
    )
    assert [verdict.outcome for verdict in scoring.verdicts] == [Outcome.PASS, Outcome.FAIL, Outcome.FAIL]


def test_signals_scoring_leaves_known_verdicts_alone() -> None:
    first = score(two_calls(choice("42")))
    again = score(two_calls(choice("42")), known=[verdict_key(verdict) for verdict in first.verdicts])
    assert (again.verdicts, again.counts) == ([], {"known": 1})


def test_signals_scoring_waits_for_an_episode_under_way_but_not_for_ever() -> None:
    waiting = episode(interaction(TASK.messages, choice(calls=(CALL,))))
    assert score(waiting).counts == {"open": 1}
    assert score(waiting, open_ttl_s=5).counts == {"no_reply": 1}
    assert score(waiting, max_calls=1).counts == {"no_reply": 1}


def test_signals_scoring_a_task_without_environment_ends_with_its_tool_call() -> None:
    task = replace(TASK, environment=None, verifier="tool_call", reference=[{"calculator": {"expression": ["40 + 2"]}}])
    assert score(episode(interaction(TASK.messages, choice(calls=(CALL,)), task=task))).counts == {"right": 1}


def test_signals_scoring_ignores_side_calls() -> None:
    main = interaction(TASK.messages, choice("42"))
    side = interaction(({"role": "user", "content": "a title"},), choice("7"), number=1, main_line=False)
    assert score(episode(main, side)).counts == {"right": 1}
    assert score(episode(replace(side, task=TASK))).counts == {"no_task": 1}


def test_signals_scoring_fails_an_answer_that_the_engine_marked_invalid() -> None:
    assert score(episode(interaction(TASK.messages, choice("42", invalid=True)))).counts == {"invalid_tool_call": 1}


def test_signals_scoring_counts_what_cannot_be_judged() -> None:
    plain = interaction(TASK.messages, choice("42"))
    other = ({"role": "user", "content": "another question"},)
    scoring = score(
        episode(replace(plain, task=None), identifier="a"),
        episode(replace(plain, choices=()), identifier="b"),
        episode(plain, interaction(other, choice("42"), number=1), identifier="c"),
        episode(replace(plain, task=replace(TASK, verifier="nobody")), identifier="d"),
        episode(replace(plain, task=replace(TASK, reference="?")), identifier="e"),
        two_calls(choice("42"), "f"),
    )
    assert scoring.counts == {"no_task": 1, "broken": 2, "unknown_verifier": 1, "bad_reference": 1, "right": 1}
    assert [verdict.episode_id for verdict in scoring.verdicts] == ["f"]


class _Raises:
    def __init__(self, error: Exception) -> None:
        self.name = "numeric_answer"
        self.version = "9"
        self._error = error

    def check_reference(self, reference: Json) -> None:
        del reference

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        raise self._error


@pytest.mark.parametrize(
    ("error", "counts"),
    [(KeyError("x"), {"verifier_error": 1}), (ConfigError("not installed"), {"verifier_unavailable": 1})],
)
def test_signals_scoring_survives_a_verifier_that_raises(error: Exception, counts: dict[str, int]) -> None:
    verifiers: dict[str, Verifier] = {"numeric_answer": _Raises(error)}
    assert score(two_calls(choice("42")), verifiers=verifiers).counts == counts
