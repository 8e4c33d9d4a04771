"""``numeric_answer``: the last number in the final assistant text equals the reference.

How numbers are read is :mod:`tidegate.signals.numbers`'s. The reference is a number, a text that is one
(``"36"``, ``"1,250"``, ``"3/4"``), or an object with ``answer`` and, at will, ``tolerance`` (relative for answers
beyond 1, else absolute) and ``exactly_one`` (true refuses texts with several numbers).
Without a tolerance 1e-6 holds, absolute for integers: the neighbour of a large integer is a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tidegate.core.types import Json, JsonObject, Task
from tidegate.ports.signals import Judgement
from tidegate.signals.numbers import find_numbers, parse_number
from tidegate.signals.verifiers.findings import WRONG, failed, final_text, right, shown

DEFAULT_TOLERANCE = 1e-6  # below the last digit that an answer rounded to 6 decimals shows

_ACCEPTED = (
    "a finite number, a text that is a number such as '36', '1,250' or '3/4', or an object "
    '{"answer": one of these, "tolerance"?: number >= 0, "exactly_one"?: true or false}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    answer: Fraction
    limit: Fraction
    exactly_one: bool


class NumericAnswer:
    """Compares numbers exactly, within a tolerance."""

    name: str = "numeric_answer"
    version: str = "1"
    graded: bool = False

    def check_reference(self, reference: Json) -> None:
        """Accept what the module describes.

        Raises:
            ValueError: it is something else.
        """
        _read_reference(reference)

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        """Judge the last message."""
        text = final_text(transcript)
        if isinstance(text, Judgement):
            return text
        reference = _read_reference(task.reference)
        numbers = find_numbers(text)
        if not numbers:
            return failed(WRONG, f"no number in {shown(text)}")
        if reference.exactly_one and len(numbers) > 1:
            return failed(WRONG, f"{len(numbers)} numbers where one is asked for in {shown(text)}")
        answer = numbers[-1]
        if answer is not None and abs(answer - reference.answer) <= reference.limit:
            return right()
        return failed(WRONG, f"last number of {shown(text)}")


def _read_reference(reference: Json) -> _Reference:
    options: Mapping[str, Any] = reference if isinstance(reference, Mapping) else {"answer": reference}
    answer = _as_fraction(options.get("answer"))
    tolerance = _as_fraction(options.get("tolerance", DEFAULT_TOLERANCE))
    exactly_one = options.get("exactly_one", False)
    unknown = set(options) - {"answer", "tolerance", "exactly_one"}
    if answer is None or tolerance is None or tolerance < 0 or not isinstance(exactly_one, bool) or unknown:
        raise ValueError(_ACCEPTED)
    absolute = "tolerance" not in options and answer.denominator == 1
    limit = tolerance if absolute else tolerance * max(Fraction(1), abs(answer))
    return _Reference(answer=answer, limit=limit, exactly_one=exactly_one)


def _as_fraction(value: Any) -> Fraction | None:
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return Fraction(value)
    return Fraction(repr(value)) if math.isfinite(value) else None
