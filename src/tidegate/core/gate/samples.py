"""Several answers of challenger and anchor to the same tasks, measured: how often they pass and how varied they are.

A *strategy* is the sequence of the names of the tools called together with the normalised last text (case, white space
and punctuation at its ends left out). Variety is taken over passing answers, of both arms equally many a task: the
first m of each where the arm with fewer has m >= 2. Being wrong in many ways is not worth keeping, and whoever is right
more often must neither be refused for it nor seem more varied for it.

Texts are looked at here and stay behind: a record holds the measures.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.core.rollout import Transcript
from tidegate.core.statistics import distinct_n, effective_strategies, vendi_score
from tidegate.core.strategy import normalised
from tidegate.core.types import Answer, JsonObject

Column: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Strategy: TypeAlias = tuple[tuple[str, ...], str]
"""Names of the tools called, and the last text normalised."""

_DISTINCT = 2
_GRAM = 3
_COUNTS = ("passed", "cut_short", "tokens")
_COLUMNS = (*_COUNTS, "surprisal", "strategies", "distinct", "vendi")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """What the answers of one arm were like: a column (T,) a measure, over the samples of each task.

    ``passed`` and ``cut_short`` count samples; ``tokens`` sampled in all; ``surprisal`` in nats, their sum of -logprob,
    None where the engine gave no log-probabilities. ``strategies``, ``distinct`` and ``vendi`` are 0 for a task that
    not both arms pass at least twice.
    """

    passed: Counts
    cut_short: Counts
    tokens: Counts
    surprisal: Column | None
    strategies: Column
    distinct: Column
    vendi: Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleEvidence:
    """``per_task`` samples of both arms on the same T tasks."""

    task_ids: tuple[str, ...]
    per_task: int
    challenger: Samples
    anchor: Samples


def sampled_tasks(task_ids: Iterable[str], *, commitment: str, limit: int) -> tuple[str, ...]:
    """The tasks of an epoch that are answered several times: at most ``limit``, drawn as the epoch fixed it.

    Args:
        task_ids: of the epoch.
        commitment: of the epoch.
        limit: most tasks.

    Returns:
        Their ids, in rising order.
    """
    ordered = sorted(task_ids)
    if limit >= len(ordered):
        return tuple(ordered)
    places: set[int] = set()
    draw = 0
    while len(places) < limit:
        digest = hashlib.sha256(f"{commitment}\nsampled task {draw}".encode()).digest()
        places.add(int.from_bytes(digest, "big") % len(ordered))
        draw += 1
    return tuple(ordered[place] for place in sorted(places))


def measure_samples(
    task_ids: Sequence[str], *, challenger: Sequence[Mapping[str, Answer]], anchor: Sequence[Mapping[str, Answer]]
) -> SampleEvidence:
    """Measure the answers of both arms.

    Args:
        task_ids: T tasks in rising order.
        challenger: S mappings from task id to answer, by number of the sample.
        anchor: as many.

    Raises:
        KeyError: a task has no answer.
    """
    ours, theirs = ([[sample[task] for sample in arm] for task in task_ids] for arm in (challenger, anchor))
    kept = [min(sum(answer.passed for answer in arm) for arm in pair) for pair in zip(ours, theirs, strict=True)]
    return SampleEvidence(
        task_ids=tuple(task_ids),
        per_task=len(challenger),
        challenger=_measured(ours, kept),
        anchor=_measured(theirs, kept),
    )


def encode_samples(evidence: SampleEvidence) -> dict[str, Any]:
    """Evidence as JSON: ``{tasks, per_task, challenger, anchor}``, a list a column. Texts stay in the sealed store."""

    def encoded(arm: Samples) -> dict[str, Any]:
        columns = {name: getattr(arm, name) for name in _COLUMNS}
        return {name: None if column is None else column.tolist() for name, column in columns.items()}

    return {
        "tasks": list(evidence.task_ids),
        "per_task": evidence.per_task,
        "challenger": encoded(evidence.challenger),
        "anchor": encoded(evidence.anchor),
    }


def decode_samples(values: JsonObject) -> SampleEvidence:
    """The evidence that :func:`encode_samples` wrote.

    Raises:
        KeyError, TypeError, ValueError: the value has another form.
    """
    size, per_task = len(values["tasks"]), values["per_task"]

    def decoded(arm: JsonObject) -> Samples:
        if set(arm) != set(_COLUMNS):
            raise ValueError(f"samples hold {sorted(arm)!r}; {sorted(_COLUMNS)!r} are accepted")
        columns: dict[str, Any] = {}
        for name in _COLUMNS:
            if name == "surprisal" and arm[name] is None:
                columns[name] = None
                continue
            column = np.asarray(arm[name], dtype=np.int64 if name in _COUNTS else np.float64)
            if column.shape != (size,) or not np.all(np.isfinite(column)) or np.any(column < 0):
                raise ValueError(f"samples: {name} is not a list of {size} numbers >= 0")
            columns[name] = column
        if np.any(columns["passed"] + columns["cut_short"] > per_task):
            raise ValueError(f"samples: more than {per_task} answers to a task")
        return Samples(**columns)

    return SampleEvidence(
        task_ids=tuple(values["tasks"]),
        per_task=per_task,
        challenger=decoded(values["challenger"]),
        anchor=decoded(values["anchor"]),
    )


def strategy_of(answer: Answer | Transcript) -> Strategy:
    """What an answer did: the names of the tools called, and its last text normalised."""
    return answer.tools, normalised(answer.text)


def _measured(answers: Sequence[Sequence[Answer]], kept: Sequence[int]) -> Samples:
    """Columns of one arm; ``kept`` is how many passing answers of each task are looked at for variety."""
    varied: list[tuple[float, float, float]] = []
    for samples, count in zip(answers, kept, strict=True):
        passing = [strategy_of(answer) for answer in samples if answer.passed][:count]
        varied.append(variety(passing) if count >= 2 else (0.0, 0.0, 0.0))
    strategies, distinct, vendi = np.array(varied, dtype=np.float64).reshape(-1, 3).T
    whole = [[answer for answer in samples if not answer.cut_short] for samples in answers]
    surprisals = [[answer.surprisal for answer in samples] for samples in whole]
    known = not any(surprisal is None for samples in surprisals for surprisal in samples)
    return Samples(
        passed=np.array([sum(answer.passed for answer in samples) for samples in answers], dtype=np.int64),
        cut_short=np.array([len(all_) - len(left) for all_, left in zip(answers, whole, strict=True)], dtype=np.int64),
        tokens=np.array([sum(answer.tokens for answer in samples) for samples in whole], dtype=np.int64),
        surprisal=np.array([sum(filter(None, samples)) for samples in surprisals], dtype=np.float64) if known else None,
        strategies=strategies,
        distinct=distinct,
        vendi=vendi,
    )


def variety(passing: Sequence[Strategy]) -> tuple[float, float, float]:
    """Effective strategies, distinct-2 and Vendi score of some answers, at least one.

    Each grows or falls with the number of answers: only values of equally many compare.
    """
    shares = np.array(list(Counter(passing).values()), dtype=np.float64) / len(passing)
    words = [words_of(strategy) for strategy in passing]
    return effective_strategies(shares), distinct_n(words, _DISTINCT), vendi_score(trigram_similarity(words))


def words_of(strategy: Strategy) -> tuple[str, ...]:
    """The tools and words of an answer, between the empty words that stand for its ends."""
    tools, text = strategy
    return ("", *tools, *text.split(), "")


def trigram_similarity(words: Sequence[Sequence[str]]) -> Column:
    """(N, N) cosines of the counts of character trigrams.

    Args:
        words: N >= 1 answers as :func:`words_of` gives them. Takes N times as many numbers as there are different
            trigrams.
    """
    texts = [f"  {' '.join(sequence)}  " for sequence in words]
    grams = [Counter(text[start : start + _GRAM] for start in range(len(text) - _GRAM + 1)) for text in texts]
    names = {name: place for place, name in enumerate(sorted(set().union(*grams)))}
    counts = np.zeros((len(grams), len(names)))
    for row, counter in zip(counts, grams, strict=True):
        for name, count in counter.items():
            row[names[name]] = count
    units = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    return units @ units.T
