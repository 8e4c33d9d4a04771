"""Drawing tokens: what is recorded, what is filtered, and whose random numbers are used."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from tidegate.core.types import Sampling
from tidegate.engines.embedded.sampling import RowSampler, choice_stream, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]])


def row(seed: int = 0, **settings: object) -> RowSampler:
    return RowSampler(sampling=Sampling(**settings), stream=random.Random(seed))  # type: ignore[arg-type]


def draws(count: int, **settings: object) -> Counter[int]:
    sampler = row(**settings)
    return Counter(sample(LOGITS, [sampler])[0].token_id for _ in range(count))


def test_temperature_zero_takes_the_best_and_records_the_plain_softmax() -> None:
    (drawn,) = sample(LOGITS, [row(temperature=0.0)])
    assert drawn.token_id == 0
    assert drawn.logprob == pytest.approx(float(torch.log_softmax(LOGITS[0], 0)[0]), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_are_at_the_temperature_and_before_the_filters(temperature: float) -> None:
    expected = torch.log_softmax(LOGITS[0] / temperature, 0)
    for seed in range(20):
        (drawn,) = sample(LOGITS, [row(seed, temperature=temperature, top_p=0.5, top_k=2)])
        assert drawn.logprob == pytest.approx(float(expected[drawn.token_id]), abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    count = 4000
    expected = torch.softmax(LOGITS[0], 0).tolist()
    seen = draws(count, temperature=1.0)
    for token, probability in enumerate(expected):
        spread = 4 * math.sqrt(probability * (1 - probability) / count)
        assert abs(seen[token] / count - probability) < spread


def test_top_k_and_top_p_cut_the_support() -> None:
    assert set(draws(300, temperature=2.0, top_k=2)) == {0, 1}
    # softmax: .61 .22 .14 ...: the best alone reaches .6, the two best reach .8
    assert set(draws(300, temperature=1.0, top_p=0.6)) == {0}
    assert set(draws(300, temperature=1.0, top_p=0.8)) == {0, 1}
    assert set(draws(50, temperature=1.0, top_p=1e-9)) == {0}


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        sampler = row(temperature=1.0)
        sampler.stream.random = lambda value=uniform: value  # type: ignore[method-assign]
        assert sample(logits, [sampler])[0].token_id in {1, 3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-4])
def test_a_temperature_close_to_zero_is_greedy_and_finite(temperature: float) -> None:
    (drawn,) = sample(LOGITS * 1000, [row(temperature=temperature)])
    assert (drawn.token_id, drawn.logprob) == (0, 0.0)


def test_penalties_count_what_was_sampled() -> None:
    sampler = row(temperature=0.0, frequency_penalty=0.6, presence_penalty=0.5)
    assert [sample(LOGITS, [sampler])[0].token_id for _ in range(4)] == [0, 1, 0, 2]


def test_rows_draw_what_they_would_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    settings: list[dict[str, object]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "presence_penalty": 1.0},
        {"temperature": 0.9, "top_logprobs": 3},
    ]
    together = sample(logits, [row(index, **each) for index, each in enumerate(settings)])
    alone = [sample(logits[i : i + 1], [row(i, **each)])[0] for i, each in enumerate(settings)]
    assert [t.token_id for t in together] == [a.token_id for a in alone]
    assert [t.logprob for t in together] == pytest.approx([a.logprob for a in alone], abs=1e-6)


def test_top_logprobs_are_best_first() -> None:
    (drawn,) = sample(LOGITS, [row(temperature=0.0, top_logprobs=3)])
    assert [token for token, _ in drawn.top] == [0, 1, 2]
    assert drawn.top[0][1] == drawn.logprob
    assert len(sample(LOGITS, [row(top_logprobs=20)])[0].top) == 5


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    bad = LOGITS.clone()
    bad[0, 1] = math.nan
    both = sample(torch.cat([bad, LOGITS]), [row(temperature=1.0), row(temperature=0.0)])
    assert math.isnan(both[0].logprob)
    assert math.isfinite(both[1].logprob)


def test_choices_of_one_seed_have_streams_of_their_own_that_never_change() -> None:
    first = [choice_stream(7, index).random() for index in range(3)]
    assert len(set(first)) == 3
    assert first == [choice_stream(7, index).random() for index in range(3)]
    assert choice_stream(7, 0).getrandbits(32) == 249266244
