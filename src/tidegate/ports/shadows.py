"""Port of the store of shadow answers. Synchronous, as the other stores.

It is not among the exports of :mod:`tidegate.ports`: the stages that train and decide take their ports from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tidegate.core.shadow import ShadowAnswer, ShadowOutcome, ShadowPair


class ShadowStore(Protocol):
    """What releases in the shadow made of the interactions of train and dev users."""

    def append_shadow_answers(self, answers: Sequence[ShadowAnswer]) -> int:
        """Commit a batch in one transaction, one answer per shadow and interaction. Returns how many were new.

        Raises:
            NotFoundError: an interaction is not in this database, e.g. because its user is sealed.
            RequestError: an answer cannot be stored as it is.
        """
        ...

    def count_shadow_answers(self, shadow_id: str) -> Mapping[tuple[ShadowOutcome, str], int]:
        """How many calls came to which end, by outcome and reason."""
        ...

    def list_shadow_pairs(self, shadow_id: str, *, latest: int | None = None) -> list[ShadowPair]:
        """Answered and failed calls beside their interactions, in order of time; with ``latest`` the last so many."""
        ...
