"""Which store a record belongs to. Synchronous; runs on the recorder's thread only.

Interactions follow their split. Feedback follows what it names. Feedback that names nothing known waits in the
*sealed* store, where no training code can read it, because it may turn out to be about a sealed user; when the
record arrives it stays there (sealed) or is moved to the open store. A crash between the two halves of a move
leaves it in both, and the next start finishes the move: ids are idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.core.types import Feedback, Interaction, Split
from tidegate.ports import TrajectoryStore


class RecordStore(TrajectoryStore, Protocol):
    """A trajectory store that can say what it holds."""

    def holds(self, feedback: Feedback) -> bool:
        """Whether what ``feedback`` names is here."""
        ...

    def knows_feedback(self, feedback_id: str) -> bool:
        """Whether this id was ever appended here."""
        ...

    def unmatched_feedback(self, about: Sequence[Interaction] | None = None) -> list[Feedback]:
        """Feedback that waits for the record that it names; with ``about`` only what names one of these."""
        ...

    def mark_feedback_moved(self, feedback_id: str) -> None:
        """Keep the id but no longer list it: another store has it now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The two stores, and the rules of who gets what."""

    open: RecordStore
    sealed: RecordStore

    def store_of(self, split: Split) -> RecordStore:
        """The store for interactions of ``split``."""
        return self.sealed if split is Split.SEALED else self.open

    def append_feedback(self, feedback: Feedback) -> bool:
        """Keep feedback where what it names is; False when its id is known.

        Raises:
            RequestError: the feedback cannot be stored as it is.
            StoreError: a store cannot be read or written.
        """
        if self.sealed.knows_feedback(feedback.id) or self.open.knows_feedback(feedback.id):
            return False
        if self.open.holds(feedback):
            return self.open.append_feedback(feedback)
        new = self.sealed.append_feedback(feedback)
        # Another process may have committed the record since we looked: whoever comes second makes the match.
        if self.open.holds(feedback):
            self._move(feedback)
        return new

    def match_waiting(self, interactions: Sequence[Interaction] | None = None) -> int:
        """Move waiting feedback to the open store where the open store now holds what it names.

        Args:
            interactions: only what names one of these, which were just committed there; None looks at all.

        Returns:
            How many were moved.
        """
        waiting = self.sealed.unmatched_feedback(interactions)
        ready = [feedback for feedback in waiting if self.open.holds(feedback)]
        for feedback in ready:
            self._move(feedback)
        return len(ready)

    def _move(self, feedback: Feedback) -> None:
        self.open.append_feedback(feedback)
        self.sealed.mark_feedback_moved(feedback.id)
