"""Token sequences come from the engine's own tokens, and train exactly what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tidegate.core.selection.sequences import token_sequences
from tidegate.core.types import Choice, Episode, Interaction, Sampling, Split

EOS = 2


def call(prompt: Sequence[int], completion: Sequence[int], number: int = 0) -> Interaction:
    choice = Choice(index=0, token_ids=tuple(completion), logprobs=tuple(-0.1 for _ in completion), text="x")
    return Interaction(
        id=f"i{number}",
        episode_id="e",
        user_key="u",
        split=Split.TRAIN,
        created_at=float(number),
        messages=({"role": "user", "content": "?"},),
        tools=(),
        sampling=Sampling(),
        prompt_token_ids=tuple(prompt),
        choices=(choice,),
        release_id="r0",
        engine_replica="e0",
        latency_s=0.1,
    )


def episode(*calls: Interaction) -> Episode:
    return Episode(id="e", user_key="u", split=Split.TRAIN, interactions=calls)


def test_selection_calls_that_continue_each_other_are_one_sequence() -> None:
    sifted = token_sequences([episode(call([5, 6], [7, EOS]), call([5, 6, 7, EOS, 8, 9], [10, EOS], 1))])
    (fresh,) = sifted.kept
    assert fresh.example.id == "e"
    assert fresh.example.token_ids == (5, 6, 7, EOS, 8, 9, 10, EOS)
    assert fresh.example.loss_mask == (0, 0, 1, 1, 0, 0, 1, 1)
    assert sifted.dropped == ()


def test_selection_calls_whose_prompt_was_tokenised_otherwise_are_a_sequence_each() -> None:
    # The second prompt spells the first completion with other tokens.
    sifted = token_sequences([episode(call([5, 6], [7, EOS]), call([5, 6, 77, EOS, 8], [10, EOS], 1))])
    assert [(item.example.id, item.example.token_ids, item.example.loss_mask) for item in sifted.kept] == [
        ("e/0", (5, 6, 7, EOS), (0, 0, 1, 1)),
        ("e/1", (5, 6, 77, EOS, 8, 10, EOS), (0, 0, 0, 0, 0, 1, 1)),
    ]


def test_selection_a_prompt_that_lacks_the_end_of_turn_does_not_continue() -> None:
    sifted = token_sequences([episode(call([5], [7, EOS]), call([5, 7], [10, EOS], 1))])
    assert [item.example.id for item in sifted.kept] == ["e/0", "e/1"]


@pytest.mark.parametrize(
    "broken",
    [
        replace(call([5], [7, EOS]), prompt_token_ids=()),
        replace(call([5], [7, EOS]), choices=()),
        call([5], []),
        replace(call([5], [7]), choices=(replace(call([5], [7]).choices[0], logprobs=()),)),
        replace(call([5], [7]), choices=(replace(call([5], [7]).choices[0], logprobs=(-0.1, -0.2)),)),
    ],
)
def test_selection_an_episode_without_all_its_tokens_is_dropped(broken: Interaction) -> None:
    sifted = token_sequences([episode(call([4], [5, EOS]), broken)])
    assert sifted.kept == ()
    assert [(item.id, item.reason) for item in sifted.dropped] == [("e", "no_token_ids")]
