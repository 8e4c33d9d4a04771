"""Recorded outcomes: what each arm did on each task, in a form that an audit line can hold.

An answer that an engine error, a timeout, a broken environment or a verifier without a verdict cut short says
nothing of the model. It counts against the challenger wherever it happened: as a failure of the challenger, as a
success of the champion or anchor. Missing data can thus never help a promotion. A verifier that raised on an
answer is different: it refused what the model gave, so the answer is a failure of its own arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tidegate.core.types import Answer, Task

VERIFIER_ERROR = "verifier:"
"""How ``Answer.error`` begins when a verifier raised on the answer; every other error is the infrastructure's."""

_FLAGS = {"p": "passed", "n": "no_reply", "i": "invalid_tool_call", "e": "engine_error", "v": "verifier_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOutcome:
    """How one arm did on one task."""

    passed: bool
    no_reply: bool = False
    invalid_tool_call: bool = False
    engine_error: bool = False
    verifier_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One task and the outcomes of all arms on it. ``kind`` is its slice; the screen has no anchor."""

    task_id: str
    kind: str
    challenger: ArmOutcome
    champion: ArmOutcome
    anchor: ArmOutcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The outcomes that a decision rests on, by task id.

    ``available``: sealed tasks that could have been asked. When they are too few nothing is asked, so that
    ``pairs`` is empty.
    """

    pairs: tuple[Pair, ...]
    available: int


Reading = Callable[[ArmOutcome], bool]


def challenger_reading(outcome: ArmOutcome) -> bool:
    """Whether the challenger is taken to have passed."""
    return outcome.passed and not outcome.engine_error


def opponent_reading(outcome: ArmOutcome) -> bool:
    """Whether the champion or anchor is taken to have passed."""
    return outcome.passed or outcome.engine_error


def outcome_of(answer: Answer) -> ArmOutcome:
    """The recorded bits of an answer."""
    failed_verifier = answer.error is not None and answer.error.startswith(VERIFIER_ERROR)
    return ArmOutcome(
        passed=answer.passed,
        no_reply=answer.no_reply,
        invalid_tool_call=answer.invalid_tool_call,
        engine_error=answer.error is not None and not failed_verifier,
        verifier_error=failed_verifier,
    )


def paired(
    tasks: Iterable[Task],
    *,
    challenger: Mapping[str, Answer],
    champion: Mapping[str, Answer],
    anchor: Mapping[str, Answer] | None = None,
) -> tuple[Pair, ...]:
    """Join the answers of all arms, ordered by task id.

    Raises:
        KeyError: an arm has no answer to a task.
    """
    return tuple(
        Pair(
            task_id=task.id,
            kind=task.kind,
            challenger=outcome_of(challenger[task.id]),
            champion=outcome_of(champion[task.id]),
            anchor=None if anchor is None else outcome_of(anchor[task.id]),
        )
        for task in sorted(tasks, key=lambda task: task.id)
    )


def encode_pairs(pairs: Iterable[Pair]) -> dict[str, dict[str, str]]:
    """Pairs as JSON: ``{task id: {kind, challenger, champion, anchor?}}``, an outcome as letters.

    ``p`` passed, ``n`` no reply, ``i`` invalid tool call, ``e`` engine error, ``v`` verifier error.
    """
    return {pair.task_id: _encoded(pair) for pair in pairs}


def decode_pairs(values: Mapping[str, Mapping[str, str]]) -> tuple[Pair, ...]:
    """The pairs that :func:`encode_pairs` wrote, ordered by task id.

    Raises:
        KeyError, TypeError, ValueError: the value has another form.
    """
    return tuple(
        Pair(
            task_id=task_id,
            kind=value["kind"],
            challenger=_outcome(value["challenger"]),
            champion=_outcome(value["champion"]),
            anchor=_outcome(value["anchor"]) if "anchor" in value else None,
        )
        for task_id, value in sorted(values.items())
    )


def _encoded(pair: Pair) -> dict[str, str]:
    arms = {"challenger": pair.challenger, "champion": pair.champion, "anchor": pair.anchor}
    return {"kind": pair.kind} | {name: _letters(arm) for name, arm in arms.items() if arm is not None}


def _letters(outcome: ArmOutcome) -> str:
    return "".join(letter for letter, name in _FLAGS.items() if getattr(outcome, name))


def _outcome(letters: str) -> ArmOutcome:
    unknown = set(letters) - set(_FLAGS)
    if unknown:
        raise ValueError(f"outcome {letters!r} holds {sorted(unknown)!r}; letters of {''.join(_FLAGS)!r} are accepted")
    return ArmOutcome(**{name: letter in letters for letter, name in _FLAGS.items()})
