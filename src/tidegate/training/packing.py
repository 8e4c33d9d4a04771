"""Several sequences in one row in which every shared beginning is computed once.

The sequences of a batch form a tree of tokens: all start with the same system message and tools, and
answers to one prompt share it whole. In a causal model the states of a shared beginning are the same in every
sequence, so one computation serves all and the gradients of all flow into it: the sum is exactly that of
separate sequences. There is no padding. Tokens from the last trained one on are not computed: nothing that
is trained depends on them. Pure: no tensors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """Tokens (T,) with ``loss_mask`` (T,) of 0/1, 1 where the token is to be predicted; ``weight`` > 0.

    The first token is predicted from nothing: its mask must be 0. ``logprobs`` (T,) are those recorded at sampling,
    empty when they are unknown.
    """

    example_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    weight: float
    logprobs: tuple[float, ...] = ()

    @property
    def input_length(self) -> int:
        """Tokens that have to be computed: all before the last trained one."""
        return max((index for index, trained in enumerate(self.loss_mask) if trained), default=0)

    @property
    def trained(self) -> int:
        """Tokens that are predicted."""
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the row without a branch: nodes ``start`` to ``stop``, below the segments ``ancestors``."""

    start: int
    stop: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One row of N nodes and K predictions.

    ``token_ids`` and ``positions`` (N,); the segments cover the row in order and an ancestor comes before its
    descendants. Prediction k is made at node ``predicted_at[k]`` (ascending) for token ``targets[k]`` with
    the summed weight ``weights[k]`` of the sequences that hold it. ``sequences`` are those of the row;
    ``occurrences[s]`` holds, for each trained token of sequence s in order, the prediction that is made for it.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    segments: tuple[Segment, ...]
    predicted_at: tuple[int, ...]
    targets: tuple[int, ...]
    weights: tuple[float, ...]
    sequences: tuple[TrainingSequence, ...]
    occurrences: tuple[tuple[int, ...], ...]


def pack(sequences: Sequence[TrainingSequence]) -> Pack:
    """Lay sequences out as one token tree.

    Args:
        sequences: at least one, each with a trained token after its first.

    Raises:
        ValueError: there is no sequence, or one trains nothing.
    """
    ordered = sorted(sequences, key=_inputs)
    if not ordered or any(sequence.input_length == 0 for sequence in ordered):
        raise ValueError("packing needs at least one sequence, each with a trained token after its first")
    tokens: list[int] = []
    positions: list[int] = []
    paths: list[list[int]] = []
    before: tuple[int, ...] = ()
    for sequence in ordered:
        row = _inputs(sequence)
        shared = _common_length(before, row)
        first = len(tokens)
        tokens.extend(row[shared:])
        positions.extend(range(shared, len(row)))
        paths.append([*(paths[-1][:shared] if paths else ()), *range(first, len(tokens))])
        before = row
    predictions: dict[tuple[int, int], float] = {}
    made: list[list[tuple[int, int]]] = []
    for sequence, path in zip(ordered, paths, strict=True):
        steps = zip(path, sequence.token_ids[1:], sequence.loss_mask[1:], strict=False)
        made.append([(node, token) for node, token, trained in steps if trained])
        for key in made[-1]:
            predictions[key] = predictions.get(key, 0.0) + sequence.weight
    keys = sorted(predictions)
    number = {key: index for index, key in enumerate(keys)}
    return Pack(
        token_ids=tuple(tokens),
        positions=tuple(positions),
        segments=_segments(paths),
        predicted_at=tuple(node for node, _ in keys),
        targets=tuple(target for _, target in keys),
        weights=tuple(predictions[key] for key in keys),
        sequences=tuple(ordered),
        occurrences=tuple(tuple(number[key] for key in keys_of) for keys_of in made),
    )


def micro_batches(sequences: Sequence[TrainingSequence], *, max_nodes: int) -> list[list[TrainingSequence]]:
    """Cut a batch into parts of at most ``max_nodes`` nodes each, relatives together; memory bounds the budget.

    A sequence that is longer by itself gets a part of its own.
    """
    parts: list[list[TrainingSequence]] = []
    nodes = 0
    for sequence in sorted(sequences, key=_inputs):
        row = _inputs(sequence)
        if parts:
            added = len(row) - _common_length(_inputs(parts[-1][-1]), row)
            if nodes + added <= max_nodes:
                parts[-1].append(sequence)
                nodes += added
                continue
        parts.append([sequence])
        nodes = len(row)
    return parts


def _inputs(sequence: TrainingSequence) -> tuple[int, ...]:
    return sequence.token_ids[: sequence.input_length]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def _segments(paths: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    """Cut the row wherever a path jumps, leaves another, or ends."""
    parent: dict[int, int] = {}
    for path in paths:
        for index, node in enumerate(path):
            parent.setdefault(node, path[index - 1] if index else -1)
    children: dict[int, int] = {}
    for above in parent.values():
        children[above] = children.get(above, 0) + 1
    segments: list[Segment] = []
    segment_of: dict[int, int] = {}
    start = 0
    for node in range(len(parent)):
        is_last = node + 1 == len(parent)
        if is_last or parent[node + 1] != node or children[node] > 1:
            branch = segment_of.get(parent[start])
            ancestors = () if branch is None else (*segments[branch].ancestors, branch)
            segments.append(Segment(start=start, stop=node + 1, ancestors=ancestors))
            segment_of[node] = len(segments) - 1
            start = node + 1
    return tuple(segments)
