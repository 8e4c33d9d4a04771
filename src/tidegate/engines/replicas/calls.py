"""Calls to a replica set: which member answers, and which one next when that one does not.

A call moves on only before anything of its answer came, and only for what says nothing of the call itself: the member
cannot be reached, is busy, has lost the adapter, or went silent for everybody. A failure that the call may have
caused (a broken connection, status 500, a time-out) is told to the client: moved on it could fell one member after
the other. For the same reason a call leaves a silent member once only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from tidegate.core.errors import (
    AdapterError,
    EngineBusyError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
)
from tidegate.core.types import GenerationEvent, GenerationRequest, PromptTokens
from tidegate.engines.replicas.members import Member, Membership
from tidegate.ports import Engine

T = TypeVar("T")
Why = Literal["busy", "unavailable", "lost_adapter", "silent"]
WHYS: tuple[Why, ...] = ("busy", "unavailable", "lost_adapter", "silent")


class _MovesOnError(Exception):
    """The call may be another member's. ``told`` is what this one's failure would be to a client."""

    def __init__(self, why: Why, told: EngineError) -> None:
        super().__init__(str(told))
        self.why: Why = why
        self.told = told


class Calls:
    """Sends calls to members; ``failovers`` counts those that moved to another one, by why."""

    def __init__(self, membership: Membership) -> None:
        self._set = membership
        self._turns = 0
        self.failovers: Counter[Why] = Counter()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """The events of one call; see :class:`tidegate.ports.Engine`."""
        round_ = _Round(self, request.adapter)
        while (member := round_.next_member()) is not None:
            with member.call():
                async with _closing(member.engine.generate(request)) as events:
                    try:
                        event = await round_.first_answer(member, _next(events))
                    except _MovesOnError as moves:
                        round_.refused[member] = moves
                        continue
                    while event is not None:
                        member.heard += 1
                        yield _named(event, member)
                        with _counting_failures(member):
                            event = await _next(events)
                    member.answered()
                    return
        raise round_.nobody()

    async def once(self, adapter: str | None, ask: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """What the first member that can answer says."""
        round_ = _Round(self, adapter)
        while (member := round_.next_member()) is not None:
            with member.call():
                try:
                    answer = await round_.first_answer(member, ask(member.engine))
                except _MovesOnError as moves:
                    round_.refused[member] = moves
                    continue
                member.heard += 1
                member.answered()
                return answer
        raise round_.nobody()

    def able(self, adapter: str | None, asked: set[Member]) -> list[Member]:
        """Members that may be asked, the one with the fewest running calls first."""
        able = [
            member
            for member in self._set.in_service()
            if member not in asked and (adapter is None or adapter in member.held)
        ]
        if not able and not asked and self._set.alone and adapter is None:
            able = list(self._set.members)  # whatever a single server says of its base is the best there is to say
        return sorted(able, key=lambda member: (member.running, member.turn))

    def takes_turn(self, member: Member) -> None:
        """Of members with equally many calls the one that waited longest is asked."""
        self._turns += 1
        member.turn = self._turns

    @property
    def membership(self) -> Membership:
        """Who is asked."""
        return self._set


class _Round:
    """One call on its way through the members."""

    def __init__(self, calls: Calls, adapter: str | None) -> None:
        self._calls = calls
        self._set = calls.membership
        self._adapter = adapter
        self._asked: set[Member] = set()
        self.refused: dict[Member, _MovesOnError] = {}

    def next_member(self) -> Member | None:
        """Whom to ask now; None when nobody is left."""
        able = self._calls.able(self._adapter, self._asked)
        if not able:
            return None
        if self.refused:
            last = next(reversed(self.refused.values()))
            self._calls.failovers[last.why] += 1
        self._asked.add(able[0])
        self._calls.takes_turn(able[0])
        return able[0]

    async def first_answer(self, member: Member, answer: Coroutine[Any, Any, T]) -> T:
        """Wait for the first that a member says; a member that leaves service meanwhile is not waited for.

        Raises:
            _MovesOnError: another member may be asked.
            RequestError, EngineError: the call failed.
        """
        try:
            return await self._unless_it_leaves(member, answer)
        except RequestError:
            raise
        except AdapterError as error:
            if self._adapter is None or self._adapter not in self._set.wanted:
                raise
            member.lost([self._adapter])
            told = EngineUnavailableError(f"{error}; it is loaded again, repeat the request in a moment")
            raise _MovesOnError("lost_adapter", told) from error
        except EngineBusyError as error:
            raise _MovesOnError("busy", error) from error
        except EngineUnavailableError as error:
            member.failed(error)
            raise _MovesOnError("unavailable", error) from error
        except EngineError as error:
            member.failed(error)
            raise

    def nobody(self) -> EngineError:
        """Why no member answers."""
        told = [moves.told for moves in self.refused.values()]
        if self._set.alone and told:
            return told[0]
        waits = [one.retry_after_s for one in told if isinstance(one, EngineBusyError | EngineUnavailableError)]
        retry_after_s = min((wait for wait in waits if wait is not None), default=None)
        said = [f"{member.replica}: {moves.told}" for member, moves in self.refused.items()]
        if any(isinstance(one, EngineBusyError) for one in told):
            return EngineBusyError(
                f"every replica that could answer is busy: {'; '.join(said)}", retry_after_s=retry_after_s
            )
        out = [f"{one.replica}: {one.reason}" for one in self._set.members if one not in self.refused and one.reason]
        return EngineUnavailableError(
            f"no replica in service can answer: {'; '.join((*said, *out))}; repeat later", retry_after_s=retry_after_s
        )

    async def _unless_it_leaves(self, member: Member, answer: Coroutine[Any, Any, T]) -> T:
        limit: float | None = self._set.limits.first_event_timeout_s
        heard = member.heard
        waiting = asyncio.create_task(answer)
        left = asyncio.create_task(member.left.wait())
        watched: set[asyncio.Task[Any]] = {waiting, left}
        try:
            while True:
                await asyncio.wait(watched, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    return waiting.result()
                if left.done() and left in watched:
                    if self._may_leave_silence():
                        raise _MovesOnError("silent", EngineUnavailableError(f"{member.replica} {member.reason}"))
                    watched.discard(left)
                elif member.heard != heard:
                    heard = member.heard  # it answers others: this call stands in its queue
                elif limit is not None:
                    member.failed(EngineTimeoutError(f"nothing was heard for {limit:g} s"))
                    limit = None
        finally:
            left.cancel()
            await _ended(waiting)

    def _may_leave_silence(self) -> bool:
        silent = any(moves.why == "silent" for moves in self.refused.values())
        return not silent and bool(self._calls.able(self._adapter, self._asked))


@contextlib.contextmanager
def _counting_failures(member: Member) -> Generator[None]:
    try:
        yield
    except EngineError as error:
        member.failed(error)
        raise


@asynccontextmanager
async def _closing(events: AsyncIterator[GenerationEvent]) -> AsyncGenerator[AsyncIterator[GenerationEvent]]:
    try:
        yield events
    finally:
        close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def _next(events: AsyncIterator[GenerationEvent]) -> GenerationEvent | None:
    return await anext(events, None)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has cleaned up; what it raised is heard by nobody."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def _named(event: GenerationEvent, member: Member) -> GenerationEvent:
    if isinstance(event, PromptTokens) and event.replica is None:
        return replace(event, replica=member.replica)
    return event
