"""The store of shadow answers over plain Python objects, beside a trajectory store over such."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from tidegate.core.errors import StoreError
from tidegate.core.shadow import ShadowAnswer, ShadowOutcome, ShadowPair
from tidegate.stores import rowmap, rules
from tidegate.stores.memory_trajectories import MemoryTrajectoryStore


class MemoryShadowStore:
    """The port :class:`tidegate.ports.shadows.ShadowStore`."""

    def __init__(self, trajectories: MemoryTrajectoryStore) -> None:
        """Start empty, for the interactions of ``trajectories``, which must be of role ``open``.

        Raises:
            StoreError: it is a sealed one.
        """
        if trajectories.role != "open":
            raise StoreError(f"the store has the role {trajectories.role!r}; shadow answers need one of 'open'")
        self._trajectories = trajectories
        self._lock = threading.RLock()
        self._answers: dict[tuple[str, str], ShadowAnswer] = {}

    def append_shadow_answers(self, answers: Sequence[ShadowAnswer]) -> int:
        """Keep a batch, all or nothing, the first answer per shadow and interaction. Returns how many were new."""
        with self._lock:
            new: dict[tuple[str, str], ShadowAnswer] = {}
            for answer in answers:
                row = rowmap.shadow_row(answer)
                key = (answer.shadow_id, answer.interaction_id)
                if key in self._answers or key in new:
                    continue
                main = self._trajectories.get_interaction(answer.interaction_id)
                rules.check_shadowed(answer.interaction_id, None if main is None else main.consent)
                new[key] = rowmap.shadow_of(row)
            self._answers.update(new)
            return len(new)

    def count_shadow_answers(self, shadow_id: str) -> Mapping[tuple[ShadowOutcome, str], int]:
        """How many calls came to which end, by outcome and reason."""
        with self._lock:
            return Counter((one.outcome, one.reason) for one in self._answers.values() if one.shadow_id == shadow_id)

    def list_shadow_pairs(self, shadow_id: str, *, latest: int | None = None) -> list[ShadowPair]:
        """Answered and failed calls beside their interactions, in order of time; with ``latest`` the last so many."""
        with self._lock:
            found = [
                one
                for one in self._answers.values()
                if one.shadow_id == shadow_id and one.outcome is not ShadowOutcome.DROPPED
            ]
        found.sort(key=lambda one: (one.created_at, one.interaction_id))
        pairs: list[ShadowPair] = []
        for one in found if latest is None else found[max(0, len(found) - latest) :]:
            main = self._trajectories.get_interaction(one.interaction_id)
            assert main is not None  # noqa: S101 - it was there when the answer came, and none is ever taken out
            pairs.append(ShadowPair(main=main, answer=one))
        return pairs
