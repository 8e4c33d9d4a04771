"""Examples are told apart by the episode that they came from, whatever clients call their episodes."""

from __future__ import annotations

import pytest

from tidegate.config.settings import CurationSettings
from tidegate.config.training import TrainingSettings, supervised
from tidegate.core.rationalization import mentions_hint
from tidegate.core.selection.near_copies import near_distinct
from tidegate.core.selection.near_duplicates import jaccard
from tidegate.core.selection.sequences import Fresh, origin_of
from tidegate.core.types import Example


def test_no_name_of_an_episode_is_the_name_of_another_ones_example() -> None:
    assert origin_of("e 0") == "e"
    assert origin_of("e/0") == "e/0"
    assert origin_of("e") == "e"


PROMPT = ({"role": "user", "content": "say it"},)


def copy(number: int, words: int) -> Fresh:
    text = " ".join(f"w{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(words))
    other = "".join(chr(97 + int(digit)) for digit in str(number))
    example = Example(id=f"e{number:05}", weight=1.0, source="episode", kind="k", token_ids=(1,), cluster=f":{number}")
    return Fresh(
        example=example, user_key="u", prompt=({"role": "user", "content": "say it"},), answer=f"{text} x{other}"
    )


def test_answers_that_differ_in_a_word_are_near_copies_whatever_their_form() -> None:
    assert len(near_distinct([copy(number, 150) for number in range(12)], most=3, seed=0).kept) == 3


def test_many_near_copies_are_compared_in_proportion_to_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(one: frozenset[str], other: frozenset[str]) -> float:
        nonlocal compared
        compared += 1
        return jaccard(one, other)

    monkeypatch.setattr("tidegate.core.selection.near_duplicates.jaccard", counted)
    monkeypatch.setattr("tidegate.core.selection.near_copies.jaccard", counted)
    near_distinct([copy(number, 60) for number in range(400)], most=3, seed=0)
    assert 400 <= compared <= 10 * 400  # every pair would be 80,000


@pytest.mark.parametrize(
    "said",
    [
        "You told me that it is 43, so 43",
        "As stated at the end of your message: 43",
        "hint_answer = 43",
        "Hinting aside, 43",
        "\uff28int says 43",
        "H\u200bint says 43",
        "so the right answer: 43",
    ],
)
def test_what_speaks_of_having_been_told_does_not_train(said: str) -> None:
    question = ({"role": "user", "content": "42 plus one"},)
    assert mentions_hint(({"role": "assistant", "content": said},), "Hint: the right answer: 43", question)
    assert not mentions_hint(({"role": "assistant", "content": "42 + 1 = 43"},), "Hint: the right answer: 43", question)


def test_demonstrations_are_trained_with_the_likelihood() -> None:
    asked = TrainingSettings(objective="gspo", clip_low=0.1, kl_coefficient=0.2, rank=3, baseline="batch")
    used = supervised(asked)
    assert (used.objective, used.clip_low, used.baseline) == ("sft", None, "group")
    assert (used.kl_coefficient, used.rank) == (0.2, 3)


def test_a_failure_is_no_success() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        CurationSettings(success_threshold=0.0)
