"""One member of a replica set: whether it is in service, why not, and when it is looked at again.

A member is in service while its breaker is closed. It then holds every adapter that is wanted, each proven. Nothing
here talks to an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from enum import StrEnum

from tidegate.core.errors import TidegateError
from tidegate.core.types import AdapterRef
from tidegate.ports import Engine

_log = logging.getLogger(__name__)


class Breaker(StrEnum):
    """``closed`` lets traffic through, ``open`` none, ``half_open`` only what shall prove the member."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a member leaves service and how soon it is asked again. Times in seconds, all > 0.

    Args:
        failures: calls in a row that fail before the breaker opens, >= 1.
        first_event_timeout_s: a call that hears nothing for so long, while the member says nothing to any other call
            either, has failed.
        swap_timeout_s: longest time in which a member loads or proves one adapter.
        check_interval_s: time between two looks at a member in service.
        check_timeout_s: longest time that a look waits for the member's health or list of adapters.
        retry_s: time until a member that left is looked at again; doubled each time up to ``longest_retry_s``.
        longest_retry_s: see there.
    """

    failures: int = 5
    first_event_timeout_s: float = 30.0
    swap_timeout_s: float = 60.0
    check_interval_s: float = 5.0
    check_timeout_s: float = 4.0
    retry_s: float = 1.0
    longest_retry_s: float = 15.0


class Member:
    """State of one replica. Everything happens on the event loop.

    ``alone``: there is no other one, so that nothing is gained by not asking it: it then leaves service for what would
    be answered wrongly or not at all, never for being slow or for failed calls.

    ``held``: adapters that it acknowledged and was not asked to forget. ``heard`` counts what its calls heard.
    """

    def __init__(self, engine: Engine, *, limits: Limits, alone: bool) -> None:
        self.engine = engine
        self.alone = alone
        self.held: set[str] = set()
        self.running = 0
        self.heard = 0
        self.turn = 0
        self.breaker = Breaker.OPEN
        self.reason = "it was not asked yet"
        self.must_answer = not alone
        self.left = asyncio.Event()
        self.left.set()
        self.looked_at = asyncio.Event()
        self._limits = limits
        self._wake = asyncio.Event()
        self._failures = 0
        self._departures = 0

    @property
    def replica(self) -> str:
        """Its name."""
        return self.engine.replica

    @property
    def in_service(self) -> bool:
        """Whether it gets traffic."""
        return self.breaker is Breaker.CLOSED

    def lacks(self, wanted: Iterable[str]) -> list[str]:
        """Those of ``wanted`` that it does not hold."""
        return sorted(set(wanted) - self.held)

    def enter(self) -> None:
        """Take it into service."""
        _log.info("replica %s is in service", self.replica)
        self.breaker, self.reason = Breaker.CLOSED, ""
        self.must_answer, self._failures = False, 0
        self.left = asyncio.Event()
        self._wake.clear()

    def leave(self, reason: str, *, must_answer: bool = False) -> None:
        """Take it out of service, or say why it stays out.

        Args:
            reason: a sentence's end, for people.
            must_answer: only a call that it answers brings it back.
        """
        if self.in_service:
            _log.warning("replica %s leaves service: %s", self.replica, reason)
        self.breaker, self.reason = Breaker.OPEN, reason
        self.must_answer = self.must_answer or must_answer
        self._departures += 1
        self.left.set()
        self._wake.set()

    def suspect(self, reason: str) -> None:
        """It is slow or fails calls; what it answers is right."""
        if not (self.alone and self.in_service):
            self.leave(reason, must_answer=True)

    def lost(self, names: Iterable[str]) -> None:
        """It does not hold these adapters any more: somebody restarted it."""
        gone = sorted(names)
        self.held.difference_update(gone)
        self.leave(f"it has lost {gone}; was it restarted? They are loaded again")

    def failed(self, error: TidegateError) -> None:
        """A call failed by its fault."""
        if not self.in_service:
            return
        self._failures += 1
        self.look_soon()
        if self._failures >= self._limits.failures:
            self.suspect(f"{self._failures} calls in a row failed, the last one because {error}")

    def answered(self) -> None:
        """A call was answered whole."""
        self._failures = 0

    def begin_look(self) -> None:
        """Somebody looks at it now; of what happens meanwhile the next look hears."""
        self._wake.clear()
        self.begin_proof()

    def begin_proof(self) -> None:
        """One that is out of service is asked to show that it may come back."""
        if not self.in_service:
            self.breaker = Breaker.HALF_OPEN

    def is_well(self) -> None:
        """A look found nothing wrong with a member in service."""
        self._departures = 0

    def look_soon(self) -> None:
        """Have it looked at before its time; one that is out of service is not asked sooner than it should."""
        self._wake.set()

    async def rest(self) -> None:
        """Wait until it is time for the next look.

        One that has just left is looked at at once, unless it failed calls or came back only a moment ago.
        """
        if self.in_service:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.check_interval_s):
                    await self._wake.wait()
            if self.in_service or (self._departures <= 1 and not self.must_answer):
                return
        doubled = self._limits.retry_s * 2.0 ** min(max(self._departures - 1, 0), 30)
        await asyncio.sleep(min(doubled, self._limits.longest_retry_s))

    @contextlib.contextmanager
    def call(self) -> Generator[None]:
        """Count a running call."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The members of a set, and ``wanted``: the adapters that each of them in service holds, by name."""

    members: tuple[Member, ...]
    wanted: dict[str, AdapterRef]
    limits: Limits

    @property
    def alone(self) -> bool:
        """Whether there is one member only."""
        return len(self.members) == 1

    def in_service(self) -> list[Member]:
        """Those that get traffic."""
        return [member for member in self.members if member.in_service]

    def states(self) -> str:
        """Why which member is out of service, for messages."""
        return "; ".join(f"{one.replica}: {one.reason}" for one in self.members if not one.in_service)
