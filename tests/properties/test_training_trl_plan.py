"""However steps are cut, each trains what was planned, in the same number of parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.training.packing import TrainingSequence
from tidegate.training.schedule import plan_steps
from tidegate.training.trl_plan import cut_steps
from tidegate.training.updates import Unit


def unit(number: int, lengths: list[int]) -> Unit:
    """Sequences of so many tokens, the last of which trains."""
    return tuple(
        TrainingSequence(
            example_id=f"{number}.{place}",
            token_ids=(1,) * length,
            loss_mask=(*[0] * (length - 1), 1),
            weight=1.0,
        )
        for place, length in enumerate(lengths)
    )


@given(
    lengths=st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=2), min_size=1, max_size=17),
    batch_size=st.integers(1, 6),
    max_tokens=st.integers(1, 300),
)
def test_parts_hold_what_their_step_trains(lengths: list[list[int]], batch_size: int, max_tokens: int) -> None:
    units = [unit(number, members) for number, members in enumerate(lengths)]
    steps = plan_steps(len(units), batch_size=batch_size, epochs=2, learning_rate=1.0, warmup_fraction=0.0, seed=0)
    parts = cut_steps(units, steps, max_tokens=max_tokens)
    assert len(parts.members) == len(parts.tokens) == parts.a_step * len(steps)
    for number, step in enumerate(steps):
        own = parts.members[number * parts.a_step : (number + 1) * parts.a_step]
        assert all(own)
        assert sorted(index for part in own for index in part) == sorted(step.members)
        assert parts.tokens_of_step(number) >= sum(
            len(sequence.token_ids) for index in step.members for sequence in units[index]
        )
    for part, tokens in zip(parts.members, parts.tokens, strict=True):
        rows = [sequence for index in part for sequence in units[index]]
        assert tokens == len(rows) * max(len(sequence.token_ids) for sequence in rows)
    fewest = min(len(step.members) for step in steps)
    assert parts.widest <= max_tokens or parts.a_step == fewest


def test_the_smallest_number_of_parts_is_taken() -> None:
    units = [unit(number, [10]) for number in range(8)]
    steps = plan_steps(8, batch_size=4, epochs=1, learning_rate=1.0, warmup_fraction=0.0, seed=0)
    assert [cut_steps(units, steps, max_tokens=most).a_step for most in (40, 39, 20, 19, 1)] == [1, 2, 2, 4, 4]
