"""Recorded outcomes: what each arm did on each task, in columns that an audit line can hold.

An answer that an engine error, a timeout, a broken environment or a verifier without a verdict cut short says
nothing of the model. It counts against the challenger wherever it happened: as a failure of the challenger, as a
success of the champion or anchor. Missing data can thus never help a promotion. A verifier that raised on an
answer is different: it refused what the model gave, so the answer is a failure of its own arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, lt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.core.gate.samples import SampleEvidence
from tidegate.core.types import Answer, JsonObject, Task

Flags: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]
Rewards: TypeAlias = NDArray[np.float64]

_FLAGS = ("passed", "no_reply", "invalid_tool_call", "refused", "engine_error", "verifier_error")
_COUNTS = ("tokens", "milliseconds")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """How one arm did on N tasks: a column (N,) for each thing that was seen.

    ``rewards`` in [0, 1]: the score where the task's verifier grades, else 1 for a pass and 0 for a failure.
    ``tokens`` sampled and ``milliseconds`` taken are 0 where the answer was cut short.
    """

    passed: Flags
    rewards: Rewards
    no_reply: Flags
    invalid_tool_call: Flags
    refused: Flags
    engine_error: Flags
    verifier_error: Flags
    tokens: Counts
    milliseconds: Counts

    @property
    def won(self) -> Flags:
        """Tasks that the arm is taken to have passed, as the challenger."""
        return self.passed & ~self.engine_error

    @property
    def held(self) -> Flags:
        """Tasks that the arm is taken to have passed, as the challenger's opponent."""
        return self.passed | self.engine_error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Tasks and the outcomes of all arms on them; task n has its outcomes in row n of each column.

    ``kinds`` names the slices, ``kind`` (N,) is each task's place among them. The screen has no anchor.
    """

    task_ids: tuple[str, ...]
    kinds: tuple[str, ...]
    kind: NDArray[np.int64]
    challenger: Outcomes
    champion: Outcomes
    anchor: Outcomes | None = None

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.task_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """What a decision rests on.

    ``available``: sealed tasks that could have been asked. When they are too few nothing is asked, so that
    ``pairs`` is empty. ``graded``: whether some verifier of the epoch grades, so that rewards are compared instead of
    passes. ``seed`` of all random signs: fixed before anything was answered. ``samples``: further answers to some of
    the tasks, None until the rest of the evidence speaks for the challenger, or where the policy asks for none.
    """

    pairs: Pairs
    available: int
    graded: bool = False
    seed: int = 0
    samples: SampleEvidence | None = None


def outcomes_of(answers: Sequence[Answer], *, graded: Sequence[bool]) -> Outcomes:
    """The columns of some answers.

    Args:
        answers: N answers of one arm.
        graded: N; whether the verifier of an answer's task grades.
    """

    def column(dtype: Any, value: Callable[[Answer], Any]) -> NDArray[Any]:
        return np.fromiter(map(value, answers), dtype=dtype, count=len(answers))

    cut_short = column(np.bool_, attrgetter("cut_short"))
    passed = column(np.bool_, attrgetter("passed"))
    scores = column(np.float64, attrgetter("score"))
    return Outcomes(
        passed=passed,
        rewards=np.where(np.asarray(graded, dtype=np.bool_), scores, passed),
        no_reply=column(np.bool_, attrgetter("no_reply")),
        invalid_tool_call=column(np.bool_, attrgetter("invalid_tool_call")),
        refused=column(np.bool_, attrgetter("refused")),
        engine_error=cut_short,
        verifier_error=column(np.bool_, lambda answer: answer.error is not None) & ~cut_short,
        tokens=np.where(cut_short, 0, column(np.int64, attrgetter("tokens"))),
        milliseconds=np.where(cut_short, 0, column(np.int64, lambda answer: round(1000 * answer.seconds))),
    )


def paired(
    tasks: Iterable[Task],
    *,
    challenger: Mapping[str, Answer],
    champion: Mapping[str, Answer],
    anchor: Mapping[str, Answer] | None = None,
    graded: Iterable[str] = (),
) -> Pairs:
    """Join the answers of all arms, ordered by task id.

    Args:
        tasks: what was asked.
        challenger: answers by task id.
        champion: answers by task id.
        anchor: answers by task id.
        graded: names of the verifiers that grade.

    Raises:
        KeyError: an arm has no answer to a task.
    """
    ordered = sorted(tasks, key=lambda task: task.id)
    grading = frozenset(graded)
    grades = [task.verifier in grading for task in ordered]
    kinds = sorted({task.kind for task in ordered})
    places = {kind: place for place, kind in enumerate(kinds)}

    def outcomes(answers: Mapping[str, Answer]) -> Outcomes:
        return outcomes_of([answers[task.id] for task in ordered], graded=grades)

    return Pairs(
        task_ids=tuple(task.id for task in ordered),
        kinds=tuple(kinds),
        kind=np.array([places[task.kind] for task in ordered], dtype=np.int64),
        challenger=outcomes(challenger),
        champion=outcomes(champion),
        anchor=None if anchor is None else outcomes(anchor),
    )


def encode_pairs(pairs: Pairs) -> dict[str, Any]:
    """Pairs as JSON: ``{tasks, kinds, kind, challenger, champion, anchor?}``, a list of N a column.

    An arm is ``{passed, no_reply, ..., tokens, milliseconds, rewards?}``. Of a flag the places are written at which
    it is set, counted from 0, since most flags are rare; ``rewards`` is left out where it follows from ``passed``.
    """
    arms = {"challenger": pairs.challenger, "champion": pairs.champion, "anchor": pairs.anchor}
    return {
        "tasks": list(pairs.task_ids),
        "kinds": list(pairs.kinds),
        "kind": pairs.kind.tolist(),
    } | {name: _encoded(arm) for name, arm in arms.items() if arm is not None}


def decode_pairs(values: JsonObject) -> Pairs:
    """The pairs that :func:`encode_pairs` wrote.

    Raises:
        KeyError, TypeError, ValueError: the value has another form.
    """
    task_ids = tuple(values["tasks"])
    if not all(map(lt, task_ids, task_ids[1:])):
        raise ValueError("tasks are not in rising order; each task once, ordered by id, is accepted")
    size = len(task_ids)
    kinds = tuple(values["kinds"])
    kind = _integers(values["kind"], "kind", size)
    if size and not 0 <= kind.min() <= kind.max() < len(kinds):
        raise ValueError(
            f"kind holds numbers from {kind.min()} to {kind.max()}; places among {len(kinds)} are accepted"
        )
    return Pairs(
        task_ids=task_ids,
        kinds=kinds,
        kind=kind,
        challenger=_decoded(values["challenger"], size),
        champion=_decoded(values["champion"], size),
        anchor=_decoded(values["anchor"], size) if "anchor" in values else None,
    )


def _encoded(arm: Outcomes) -> dict[str, Any]:
    values: dict[str, Any] = {name: np.flatnonzero(getattr(arm, name)).tolist() for name in _FLAGS}
    values |= {name: getattr(arm, name).tolist() for name in _COUNTS}
    return values if np.array_equal(arm.rewards, arm.passed) else values | {"rewards": arm.rewards.tolist()}


def _decoded(values: JsonObject, size: int) -> Outcomes:
    unknown = sorted(set(values) - {*_FLAGS, *_COUNTS, "rewards"})
    if unknown:
        raise ValueError(f"an arm's outcomes hold {unknown!r}; {[*_FLAGS, *_COUNTS, 'rewards']!r} are accepted")
    flags = {name: _flags(values[name], name, size) for name in _FLAGS}
    counts = {name: _integers(values[name], name, size) for name in _COUNTS}
    for name, column in counts.items():
        if size and column.min() < 0:
            raise ValueError(f"{name} holds {column.min()}; numbers >= 0 are accepted")
    rewards = np.asarray(values["rewards"], dtype=np.float64) if "rewards" in values else flags["passed"].astype(float)
    if rewards.shape != (size,) or not np.all((rewards >= 0.0) & (rewards <= 1.0)):
        raise ValueError(f"rewards are not {size} numbers in [0, 1]")
    columns: dict[str, Any] = {"rewards": rewards, **flags, **counts}
    return Outcomes(**columns)


def _flags(places: Any, name: str, size: int) -> Flags:
    indices = _integers(places, name, len(places))
    if len(indices) and not (indices[0] >= 0 and indices[-1] < size and np.all(indices[1:] > indices[:-1])):
        raise ValueError(f"{name} holds no rising places from 0 to {size - 1}")
    flags = np.zeros(size, dtype=np.bool_)
    flags[indices] = True
    return flags


def _integers(values: Any, name: str, size: int) -> NDArray[np.int64]:
    column = np.asarray(values) if len(values) else np.zeros(0, dtype=np.int64)
    if column.shape != (size,) or column.dtype.kind != "i":
        raise ValueError(f"{name} is not a list of {size} whole numbers")
    return column.astype(np.int64, copy=False)
