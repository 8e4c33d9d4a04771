"""Which replies count as refusals, and which the rule can't see."""

from __future__ import annotations

import pytest

from tidegate.core.refusals import OPENING, is_refusal


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m sorry, but I can\u2019t assist with that request.",
        "I cannot provide instructions for this.",
        "Sorry, I'm unable to do that.",
        "**I won't answer** that question.",
        "We are sorry.\nI am not able to comply.",
        "As an AI language model, I cannot have opinions.",
        "I must respectfully decline.",
        "I refuse to do this.",
        "Unfortunately, I\ncannot\nhelp you here.",
        "I can't really share that.",
    ],
)
def test_customary_refusals_are_seen(text: str) -> None:
    assert is_refusal(text)
    assert is_refusal(text.upper())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "The number 7 can't be divided by 2, so the answer is no.",
        "I can't find a shorter way than 3 steps: left, left, up.",
        "You cannot help it: entropy rises.",
        "Sorry for the delay! The answer is 12.",
        "He said that he would refuse to pay, so the total is 30.",
        "I can help with that. The answer is 5.",
    ],
)
def test_answers_are_no_refusals(text: str) -> None:
    assert not is_refusal(text)


def test_what_the_rule_cannot_see_is_as_documented() -> None:
    assert not is_refusal("Dabei kann ich leider nicht helfen.")
    assert not is_refusal("x" * OPENING + " I can't help with that.")
    assert not is_refusal("That is a fascinating topic with a long history.")
    assert is_refusal("I can't give the exact date, but it was in May 1901.")
