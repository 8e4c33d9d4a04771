"""Ports of the signals stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.core.types import Json, JsonObject, Outcome, Task

VERIFIER_ERROR = "verifier_error"
"""How the ``detail`` of a judgement begins when a scorer raised on the answer instead of judging it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verifier's result before it is tied to an episode. ``score`` in [0, 1]."""

    outcome: Outcome
    score: float
    detail: str


class Verifier(Protocol):
    """Scores a finished transcript against a reference; a pure function of its arguments.

    ``graded``: whether scores between 0 and 1 are rewards of their own, to be compared as such; otherwise only the
    outcome counts, and a score says how near a failure came.
    """

    name: str
    version: str
    graded: bool

    def check_reference(self, reference: Json) -> None:
        """Raise ``ValueError`` that says what is accepted when ``reference`` is unusable."""
        ...

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        """Judge the messages that followed ``task.messages`` (assistant and tool messages, in order)."""
        ...


class Environment(Protocol):
    """Executes the tool calls of an agent; the same call gives the same result."""

    name: str
    tools: tuple[JsonObject, ...]

    def execute(self, name: str, arguments: str) -> str:
        """Run tool ``name`` with JSON ``arguments``; a failure is text that starts with ``error:``."""
        ...
