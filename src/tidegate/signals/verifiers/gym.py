"""``reasoning_gym``: the scorer that a reasoning-gym dataset comes with.

The reference is ``{"dataset": name, "entry": {"answer": ..., ...}}``; of the entry only what the dataset's scorer
reads is needed. The scorer sees the final assistant text, or what stands between its last ``<answer>`` tags.
Some wrong answers score a little, hence the threshold; some scorers raise on odd answers, which fails the
answer and is marked for counting. The package is imported on first use (it takes seconds).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidegate.core.errors import ConfigError
from tidegate.core.types import Json, JsonObject, Task
from tidegate.ports.signals import VERIFIER_ERROR, Judgement
from tidegate.signals.verifiers.findings import WRONG, boundary, failed, final_text, right, shown

PASS_SCORE = 0.99

_ACCEPTED = '{"dataset": name of a reasoning-gym dataset, "entry": {"answer": text, ...}}'


def load_reasoning_gym() -> Any:
    """The reasoning-gym package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "reasoning-gym tasks need the package 'reasoning-gym', which is not installed here; "
            "install it with: pip install 'tidegate[tasks]'"
        ) from error


class ReasoningGym:
    """Scores with reasoning-gym; at least .99 passes."""

    name: str = "reasoning_gym"
    version: str = "1"
    graded: bool = False

    def check_reference(self, reference: Json) -> None:
        """Accept a known dataset with an entry that holds an answer.

        Raises:
            ValueError: it is something else.
            ConfigError: reasoning-gym is not installed.
        """
        if not isinstance(reference, Mapping):
            raise ValueError(_ACCEPTED)
        entry = reference.get("entry")
        if not isinstance(entry, Mapping) or "answer" not in entry or not isinstance(reference.get("dataset"), str):
            raise ValueError(_ACCEPTED)
        try:
            _scorer(reference["dataset"])
        except (ValueError, AssertionError) as error:  # unknown, or not usable without a configuration
            raise ValueError(f"{_ACCEPTED}; {reference['dataset']!r} has no scorer of its own") from error

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        """Judge the last message."""
        text = final_text(transcript)
        if isinstance(text, Judgement):
            return text
        return boundary(lambda: _score(text, task.reference))


def _score(text: str, reference: Mapping[str, Any]) -> Judgement:
    answer = load_reasoning_gym().utils.extract_answer(text)
    scorer = _scorer(reference["dataset"])
    score = scorer(text if answer is None else answer, dict(reference["entry"]))
    if not 0.0 <= score <= 1.0:
        return failed(VERIFIER_ERROR, f"the scorer gives {score!r}")
    return right(score) if score >= PASS_SCORE else failed(WRONG, shown(text), score=score)


def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    return load_reasoning_gym().get_score_answer_fn(dataset)
