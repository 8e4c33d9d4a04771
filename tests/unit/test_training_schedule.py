"""Order and rate of the steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.training.schedule import Step, plan_steps


def steps(count: int, **changes: Any) -> tuple[Step, ...]:
    options: dict[str, Any] = {
        "batch_size": 8,
        "epochs": 2,
        "learning_rate": 1.0,
        "warmup_fraction": 0.1,
        "seed": 0,
    }
    return plan_steps(count, **{**options, **changes})


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.integers(0, 5))
def test_every_sequence_trains_once_an_epoch_in_even_batches(count: int, size: int, epochs: int, seed: int) -> None:
    planned = steps(count, batch_size=size, epochs=epochs, seed=seed)
    for epoch in range(epochs):
        members = [step.members for step in planned if step.epoch == epoch]
        assert Counter(index for batch in members for index in batch) == Counter(range(count))
        lengths = {len(batch) for batch in members}
        assert max(lengths) <= size
        assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 60), st.integers(1, 4), st.floats(0, 1))
def test_the_peak_rate_is_reached_and_never_passed(count: int, epochs: int, warmup: float) -> None:
    rates = [step.learning_rate for step in steps(count, epochs=epochs, warmup_fraction=warmup, learning_rate=0.25)]
    assert max(rates) == 0.25
    assert min(rates) > 0
    peak = rates.index(0.25)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_rate_rises_linearly_and_falls_to_a_tenth() -> None:
    rates = [step.learning_rate for step in steps(10, batch_size=1, epochs=1, warmup_fraction=0.4)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4] == 1.0


def test_the_seed_decides_the_order_and_epochs_differ() -> None:
    first = [step.members for step in steps(30)]
    assert first == [step.members for step in steps(30)]
    assert first != [step.members for step in steps(30, seed=1)]
    assert first[:4] != first[4:]
