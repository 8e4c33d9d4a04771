"""``exact_text``: the final assistant text equals the reference, blanks around it aside."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.core.types import Json, JsonObject, Task
from tidegate.ports.signals import Judgement
from tidegate.signals.verifiers.findings import WRONG, failed, final_text, right, shown


class ExactText:
    """Compares texts, case and inner blanks included."""

    name: str = "exact_text"
    version: str = "1"
    graded: bool = False

    def check_reference(self, reference: Json) -> None:
        """Accept a text that is not blank.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(reference, str) or not reference.strip():
            raise ValueError("a text that is not blank")

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        """Judge the last message."""
        text = final_text(transcript)
        if isinstance(text, Judgement):
            return text
        return right() if text == task.reference.strip() else failed(WRONG, shown(text))
