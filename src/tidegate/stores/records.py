"""What the stores keep beyond the nouns of the core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from tidegate.core.types import JsonObject

Role: TypeAlias = Literal["open", "sealed"]
"""What a database is for: ``open`` may be trained on, ``sealed`` belongs to the gate alone."""


class FeedbackState(StrEnum):
    """Whether the interaction or episode that feedback names is in the same database."""

    MATCHED = "matched"
    UNMATCHED = "unmatched"
    MOVED = "moved"  # waited here, is now in the database that holds what it names; kept to know its id again


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A scalar for one interaction. ``value`` in [0, 1]; ``policy`` says how it was assigned within the episode."""

    episode_id: str
    interaction_id: str
    verifier: str
    version: str
    policy: str
    value: float
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A gate decision: the audit record number ``seq`` with its main fields at hand."""

    seq: int
    time: float
    outcome: str | None
    candidate_id: str | None
    epoch_id: str | None
    body: JsonObject
