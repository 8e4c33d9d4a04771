"""Which arm of a live trial a user is in: sticky, drawn anew for each draw, and in equal shares.

A *draw* names one assignment: a canary has one, the permanent holdback one a period. The arms that are compared
have equal shares of the users, from the two ends of the unit interval; whoever is between them is served by the
champion and gives no unit. With the small arm against everybody else, units would be paired in arrival order with
units of long ago (at 5 % the other arm is 19 times as fast), and a world that changes in the meantime would look
like a difference between the arms.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class LiveArm(StrEnum):
    """``subject`` is the newer release, whose place is in question; ``control`` the one that it is compared with."""

    SUBJECT = "subject"
    CONTROL = "control"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """``low`` is the arm of the users in [0, share), the other one has [1 - share, 1).

    ``share`` in (0, 1); above one half the second arm is what the first one leaves.
    """

    draw: str
    share: float
    low: LiveArm

    def position(self, user_key: str) -> float:
        """The user's place in [0, 1): uniform, and independent between draws.

        User keys are keyed hashes already, so nobody can choose a user id that lands in a wanted arm.
        """
        digest = hashlib.sha256(f"{self.draw}\n{user_key}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    def is_low(self, user_key: str) -> bool:
        """Whether the user belongs to the arm at the lower end, the one that is not served by default."""
        return self.position(user_key) < self.share

    def arm_of(self, user_key: str) -> LiveArm | None:
        """The arm, or None for a user who is in neither."""
        position = self.position(user_key)
        if position < self.share:
            return self.low
        if position >= max(self.share, 1.0 - self.share):
            return LiveArm.CONTROL if self.low is LiveArm.SUBJECT else LiveArm.SUBJECT
        return None


def unit_id(draw: str, user_key: str) -> str:
    """The name of a user's unit in a record: says who it is only to somebody who holds the user keys."""
    return hashlib.sha256(f"unit\n{draw}\n{user_key}".encode()).hexdigest()[:32]
