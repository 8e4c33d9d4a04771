"""Laws of the token tree: nothing lost, nothing computed twice, nothing seen that comes later."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.training.packing import Pack, TrainingSequence, micro_batches, pack

Step = tuple[int, int]


@st.composite
def sequences(draw: st.DrawFn) -> TrainingSequence:
    """Few different tokens, so that beginnings are shared often."""
    tokens = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9))
    mask = draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)).filter(lambda m: any(m[1:])))
    weight = draw(st.sampled_from([0.25, 1.0, 2.0]))
    return TrainingSequence(example_id="e", token_ids=tuple(tokens), loss_mask=(0, *mask[1:]), weight=weight)


batches = st.lists(sequences(), min_size=1, max_size=7)


def histories(row: Pack) -> list[tuple[int, ...]]:
    """The tokens that each node sees, itself included."""
    found: list[tuple[int, ...]] = []
    for segment in row.segments:
        above = [
            token
            for index in segment.ancestors
            for token in row.token_ids[row.segments[index].start : row.segments[index].stop]
        ]
        found.extend((*above, *row.token_ids[segment.start : stop + 1]) for stop in range(segment.start, segment.stop))
    return found


def predictions(row: Pack) -> Counter[tuple[tuple[int, ...], int]]:
    """Weight by what is seen and what is to be predicted."""
    seen = histories(row)
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for node, target, weight in zip(row.predicted_at, row.targets, row.weights, strict=True):
        found[seen[node], target] += weight  # type: ignore[assignment]
    return found


@given(batches)
def test_the_tree_predicts_what_the_sequences_predict(batch: list[TrainingSequence]) -> None:
    expected: Counter[tuple[tuple[int, ...], int]] = Counter()
    for sequence in batch:
        for index, trained in enumerate(sequence.loss_mask):
            if trained:
                expected[sequence.token_ids[:index], sequence.token_ids[index]] += sequence.weight  # type: ignore[assignment]
    assert predictions(pack(batch)) == expected


@given(batches)
def test_each_beginning_is_computed_once(batch: list[TrainingSequence]) -> None:
    row = pack(batch)
    seen = histories(row)
    wanted = {s.token_ids[:stop] for s in batch for stop in range(1, s.input_length + 1)}
    assert len(seen) == len(set(seen)) == len(row.token_ids) == len(wanted)
    assert set(seen) == wanted
    assert [len(history) - 1 for history in seen] == list(row.positions)


@given(batches)
def test_segments_cover_the_row_and_ancestors_come_first(batch: list[TrainingSequence]) -> None:
    row = pack(batch)
    assert [segment.start for segment in row.segments] == [0, *(segment.stop for segment in row.segments[:-1])]
    assert row.segments[-1].stop == len(row.token_ids)
    assert all(segment.start < segment.stop for segment in row.segments)
    assert all(max(s.ancestors, default=-1) < index for index, s in enumerate(row.segments))
    assert list(row.predicted_at) == sorted(row.predicted_at)


@given(batches, st.integers(1, 20))
def test_parts_keep_every_sequence_and_the_budget(batch: list[TrainingSequence], budget: int) -> None:
    parts = micro_batches(batch, max_nodes=budget)
    assert Counter(s for part in parts for s in part) == Counter(batch)
    for part in parts:
        assert len(pack(part).token_ids) <= budget or len(part) == 1
    assert all(part for part in parts)


def test_a_shared_beginning_of_two_answers() -> None:
    def answer(*tokens: int) -> TrainingSequence:
        return TrainingSequence(example_id="e", token_ids=(1, 2, 3, *tokens), loss_mask=(0, 0, 0, 1, 1), weight=1.0)

    row = pack([answer(4, 5), answer(6, 5)])
    assert row.token_ids == (1, 2, 3, 4, 6)
    assert row.positions == (0, 1, 2, 3, 3)
    assert [segment.ancestors for segment in row.segments] == [(), (0,), (0,)]
    assert (row.predicted_at, row.targets, row.weights) == ((2, 2, 3, 4), (4, 6, 5, 5), (1.0, 1.0, 1.0, 1.0))


def test_nothing_to_train_is_refused() -> None:
    untrained = TrainingSequence(example_id="e", token_ids=(1, 2), loss_mask=(0, 0), weight=1.0)
    for batch in ([], [untrained]):
        with pytest.raises(ValueError, match="at least one"):
            pack(batch)
