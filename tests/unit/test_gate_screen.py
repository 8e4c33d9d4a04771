"""The free look at the dev set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gate_engine import Pair, Row, columns_of, make_policy
from tidegate.core.gate import (
    Pairs,
    ScreenAbstained,
    ScreenEvidence,
    ScreenFailed,
    ScreenPassed,
    describe,
    reasons_of,
    screen,
)
from tidegate.core.gate.screen import ReferenceKl

PASS, FAIL = Row(passed=True), Row(passed=False)


def rows(better: int, worse: int, both: int) -> list[Pair]:
    outcomes = [(PASS, FAIL)] * better + [(FAIL, PASS)] * worse + [(PASS, PASS)] * both
    return [Pair(task_id=f"d{i:02}", kind="a", challenger=a, champion=b) for i, (a, b) in enumerate(outcomes)]


def pairs(better: int, worse: int, both: int) -> Pairs:
    return columns_of(rows(better, worse, both))


def kl(nats: float) -> ReferenceKl:
    return ReferenceKl(nats_per_token=nats, tokens=200, calls=20, reference_sha256="b" * 64)


GOOD = rows(4, 1, 10)
EVIDENCE = ScreenEvidence(
    challenger_sha256="c" * 64,
    champion_sha256="a" * 64,
    logit_difference=0.5,
    pairs=columns_of(GOOD),
    canary_prompts=(("hello", True),),
    kl=kl(0.01),
)


def test_a_better_challenger_passes() -> None:
    result = screen(EVIDENCE, make_policy(screen__kl_budget=0.1))
    assert isinstance(result, ScreenPassed)
    assert describe(result) == (
        "pass: dev success 14 against the champion's 11 of 15; 1 canary prompts right; "
        "KL 0.01 nats per token over 200 tokens"
    )


def test_what_was_not_measured_is_said() -> None:
    result = screen(replace(EVIDENCE, canary_prompts=(), kl=None), make_policy())
    assert reasons_of(result)[1:] == ("no canary prompts", "KL not measured")


@pytest.mark.parametrize(
    ("changes", "policy", "words"),
    [
        ({"champion_sha256": "c" * 64}, {}, "nothing changed"),
        ({"logit_difference": 0.0}, {}, "training changed nothing"),
        ({"canary_prompts": (("a", True), ("b", False), ("c", False))}, {}, "canary prompts answered wrongly: b, c"),
        (
            {"kl": kl(0.2)},
            {"screen__kl_budget": 0.1},
            "KL to the reference is 0.2 nats per token over 200 tokens > budget 0.1",
        ),
        ({"pairs": pairs(1, 1, 13)}, {}, "dev success 14 of 15; more than the champion's 14 is needed"),
        (
            {"pairs": pairs(1, 2, 12)},
            {"screen__dev_rule": "not_below"},
            "dev success 13 of 15; at least the champion's 14 is needed",
        ),
    ],
)
def test_a_fault_fails(changes: dict[str, Any], policy: dict[str, Any], words: str) -> None:
    result = screen(replace(EVIDENCE, **changes), make_policy(**policy))
    assert isinstance(result, ScreenFailed)
    assert words in describe(result)


def test_equal_success_passes_where_the_policy_says_so() -> None:
    evidence = replace(EVIDENCE, pairs=pairs(1, 1, 13))
    assert isinstance(screen(evidence, make_policy(screen__dev_rule="not_below")), ScreenPassed)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("no_reply", "2 answers without a reply of 15, the champion 0: up by more than 10%"),
        ("invalid_tool_call", "2 answers with an invalid tool call of 15, the champion 0: up by more than 10%"),
    ],
)
def test_more_bad_answers_fail(flag: str, words: str) -> None:
    def flagged(count: int) -> ScreenEvidence:
        bad = Row(passed=True, **{flag: True})
        first, rest = GOOD[:count], GOOD[count:]
        return replace(EVIDENCE, pairs=columns_of([replace(pair, challenger=bad) for pair in first] + rest))

    assert isinstance(screen(flagged(1), make_policy()), ScreenPassed)
    result = screen(flagged(2), make_policy())
    assert isinstance(result, ScreenFailed)
    assert result.reasons == (words,)


@pytest.mark.parametrize(
    ("changes", "policy", "words"),
    [
        ({"pairs": pairs(4, 1, 4)}, {}, "9 of 10 dev tasks"),
        ({"pairs": columns_of([]), "logit_difference": None}, {}, "0 of 10 dev tasks"),
        ({"kl": None}, {"screen__kl_budget": 0.1}, "KL to the reference was not measured and the policy holds it"),
    ],
)
def test_too_little_measured_abstains(changes: dict[str, Any], policy: dict[str, Any], words: str) -> None:
    result = screen(replace(EVIDENCE, **changes), make_policy(**policy))
    assert isinstance(result, ScreenAbstained)
    assert words in describe(result)


def test_engine_errors_abstain() -> None:
    cut = Row(passed=False, engine_error=True)
    evidence = replace(EVIDENCE, pairs=columns_of([replace(GOOD[0], challenger=cut), *GOOD[1:]]))
    result = screen(evidence, make_policy())
    assert isinstance(result, ScreenAbstained)
    assert "1 of 15 answers of the challenger ended in engine errors" in describe(result)


def test_a_certain_fault_fails_even_without_dev_tasks() -> None:
    assert isinstance(
        screen(replace(EVIDENCE, pairs=columns_of([]), champion_sha256="c" * 64), make_policy()), ScreenFailed
    )
