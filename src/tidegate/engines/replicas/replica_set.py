"""The engine port over several engines that serve the same base.

An adapter is loaded when every member in service has acknowledged it; one that cannot leaves service and is reconciled
later. Counting uses of an adapter, and checking files, stay with the members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from tidegate.core.agreement import DEFAULT_TOLERANCE, Tolerance
from tidegate.core.errors import (
    AdapterError,
    ConfigError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
    TidegateError,
)
from tidegate.core.types import AdapterRef, GenerationEvent, GenerationRequest, Messages
from tidegate.engines.replicas.calls import WHYS, Calls
from tidegate.engines.replicas.members import Breaker, Limits, Member, Membership
from tidegate.engines.replicas.proof import Proof, prove, record_of
from tidegate.engines.replicas.reconciliation import Reconciliation
from tidegate.ports import Engine, EngineHealth, ProbeResult

T = TypeVar("T")


class ReplicaSet:
    """Serves with whichever members are sound; implements :class:`tidegate.ports.Engine`. Use it in ``async with``.

    Args:
        engines: one a replica, over the same base, with different names. Closed by whoever made them.
        probe_prompts: what adapters are told from the base by when a member comes back, at least one.
        limits: when a member leaves and when it is asked again.
        tolerance: how far a member's log-probabilities may lie from the trainer's.

    Raises:
        ConfigError: there is no engine, two have one name, or they serve different bases.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        probe_prompts: Sequence[Messages],
        limits: Limits | None = None,
        tolerance: Tolerance = DEFAULT_TOLERANCE,
    ) -> None:
        names = [engine.replica for engine in engines]
        if not engines or len(set(names)) != len(names):
            raise ConfigError(f"replicas {names} are no set; name one or more, each once")
        if len({engine.base_sha256 for engine in engines}) != 1:
            bases = {engine.replica: engine.base_sha256[:12] for engine in engines}
            raise ConfigError(f"replicas serve different bases {bases}; all must serve the same one")
        limits = limits or Limits()
        members = tuple(Member(engine, limits=limits, alone=len(engines) == 1) for engine in engines)
        self._set = Membership(members=members, wanted={}, limits=limits)
        self._calls = Calls(self._set)
        self._tolerance = tolerance
        self._reconciliation = Reconciliation(self._set, probe_prompts=probe_prompts, tolerance=tolerance)
        self._loading = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._reconciliation.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._reconciliation.close()

    @property
    def replica(self) -> str:
        """The names of all members; what one answers names that one, see ``PromptTokens.replica``."""
        return ",".join(member.replica for member in self._set.members)

    @property
    def base_sha256(self) -> str:
        """Content hash of the base model's weights."""
        return self._set.members[0].engine.base_sha256

    def breakers(self) -> Mapping[str, Breaker]:
        """Each member's breaker by the member's name; those whose breaker is closed are in service."""
        return {member.replica: member.breaker for member in self._set.members}

    def running(self) -> Mapping[str, int]:
        """Calls that run now, by the member's name."""
        return {member.replica: member.running for member in self._set.members}

    def failovers(self) -> Mapping[str, int]:
        """Calls that another member took over, by why; all reasons, those without any too."""
        return {why: self._calls.failovers[why] for why in WHYS}

    async def load(self, adapter: AdapterRef) -> None:
        """Load on every member in service; all acknowledge, or leave service until they hold it.

        What is loaded already needs nobody in service: no member comes back without it. So a rollback to it does not
        wait for servers that are being started again.

        Raises:
            AdapterError: a member finds fault with the adapter, or the name is taken; no member keeps it.
            EngineUnavailableError: no member is in service, and it was not loaded before.
            EngineError: no member acknowledged it.
        """
        async with self._loading:
            wanted = self._set.wanted
            known = wanted.get(adapter.name)
            if known is not None and known.sha256 != adapter.sha256:
                raise AdapterError(
                    f"adapter name {adapter.name!r} is taken by content {known.sha256}, not {adapter.sha256}; "
                    "names are never reused: load it under a name of its own"
                )
            if known is not None and not self._set.in_service():
                return
            wanted[adapter.name] = adapter  # members that come back meanwhile load it too
            try:
                await self._load_everywhere(adapter)
            except BaseException:
                if known is None:
                    wanted.pop(adapter.name, None)
                    await self._forget(adapter.name)
                raise

    async def _load_everywhere(self, adapter: AdapterRef) -> None:
        members = await self._serving()
        if not members:
            raise EngineUnavailableError(f"{adapter.name!r} is loaded nowhere: {self._nobody_serves()}")
        for member in members:
            member.look_soon()  # a wedged one is found out while the others load
        failures = await self._on_each(members, lambda member: self._load_on(member, adapter))
        for error in failures.values():
            if isinstance(error, AdapterError):
                raise error
        if len(failures) == len(members):  # they go on with what they have
            raise _one_of(failures, f"no replica loaded {adapter.name!r}")
        for member, error in failures.items():
            if member.in_service:
                member.leave(f"it did not load {adapter.name!r}: {error}")

    async def _load_on(self, member: Member, adapter: AdapterRef) -> None:
        await self._within_limits(member, member.engine.load(adapter), f"load {adapter.name!r}")
        member.held.add(adapter.name)

    async def unload(self, name: str) -> None:
        """Forget an adapter everywhere. Waits for the calls of members in service; the others forget it later."""
        self._set.wanted.pop(name, None)
        await self._forget(name)

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        """What every member in service holds."""
        return tuple(ref for _, ref in sorted(self._set.wanted.items()))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """Stream one call from the member with the fewest running ones; ``PromptTokens`` names it.

        Raises:
            AdapterError: ``request.adapter`` is not loaded.
            RequestError: the member refuses the request.
            EngineBusyError: all members that could answer are busy; with the shortest Retry-After of theirs.
            EngineUnavailableError: no member in service can answer.
            EngineTimeoutError, EngineError: the member that was asked failed.
        """
        self._require(request.adapter)
        async with contextlib.aclosing(self._calls.stream(request)) as events:
            async for event in events:
                yield event

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        """Compare on every member in service; the smallest difference that is found.

        The same bytes over the same base either change answers or do not. A member that holds other bytes than the
        rest, finds no difference where another one finds one, or states other log-probabilities than the trainer's
        record where another one states those, answers with wrong weights: it leaves service, and the others' result
        stands. Where none is sound, other bytes or else the smallest difference are
        the result.

        Raises:
            AdapterError: one of them is not loaded, or its record of the trainer is none.
            RequestError: there is no prompt, or one is longer than the context.
            EngineError: no member could be asked.
        """
        self._require(name)
        self._require(against)
        ref = self._set.wanted[name]
        record = await record_of(ref)
        members = await self._serving()
        found: dict[Member, Proof] = {}

        async def ask(member: Member) -> None:
            probing = prove(member.engine, ref, record, against=against, prompts=prompts, tolerance=self._tolerance)
            found[member] = await self._within_limits(member, probing, f"prove {name!r}")

        failures = await self._on_each(members, ask)
        for member, error in failures.items():
            if isinstance(error, RequestError):
                raise error
            if isinstance(error, AdapterError):
                member.lost([one for one in (name, against) if one is not None])
            elif member.in_service and found:
                member.leave(f"it did not prove {name!r}: {error}")
        if not found:
            raise _one_of(failures, f"no replica proved {name!r}: {self._nobody_serves()}")
        results = {member: proof.result for member, proof in found.items()}
        sound = [member for member, proof in found.items() if proof.fault is None]
        if not sound:
            other = (one for one in results.values() if one.sha256 != ref.sha256)
            return next(other, min(results.values(), key=lambda result: result.max_logit_difference))
        for member in found.keys() - set(sound):
            member.leave(f"{found[member].fault}; other replicas are sound")
        return min((results[member] for member in sound), key=lambda result: result.max_logit_difference)

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        """As the member with the fewest running calls states them. Raises as :meth:`generate`."""
        self._require(adapter)
        return await self._calls.once(adapter, lambda engine: engine.sequence_logprobs(adapter, token_ids, first=first))

    async def health(self) -> EngineHealth:
        """Ready while a member is in service; the detail names those that are not, and why. Asks only a single one."""
        members, serving = self._set.members, self._set.in_service()
        running = sum(member.running for member in members)
        if self._set.alone and serving:
            single = await serving[0].engine.health()
            return EngineHealth(ready=single.ready, detail=single.detail, queued=0, running=running)
        out = self._set.states()
        detail = "serving" if not out else f"{len(serving)} of {len(members)} replicas in service; not: {out}"
        return EngineHealth(ready=bool(serving), detail=detail, queued=0, running=running)

    async def _serving(self) -> list[Member]:
        """Members in service; while there are none and one is being proven, what comes of that."""
        while not self._set.in_service():
            if all(member.breaker is Breaker.OPEN for member in self._set.members):
                break
            self._reconciliation.moved.clear()
            await self._reconciliation.moved.wait()
        return self._set.in_service()

    async def _forget(self, name: str) -> None:
        """Have it unloaded by members in service, and wait while they are."""
        forgetting = {
            member: self._reconciliation.forget(member, name)
            for member in self._set.in_service()
            if name in member.held
        }
        await asyncio.gather(*(_done_or_left(task, member) for member, task in forgetting.items()))

    @staticmethod
    async def _on_each(
        members: Sequence[Member], act: Callable[[Member], Coroutine[Any, Any, None]]
    ) -> dict[Member, TidegateError]:
        """Do something on all members at once; the failures."""
        results = await asyncio.gather(*(act(member) for member in members), return_exceptions=True)
        failures: dict[Member, TidegateError] = {}
        for member, result in zip(members, results, strict=True):
            if isinstance(result, TidegateError):
                failures[member] = result
            elif isinstance(result, BaseException):
                raise result
        return failures

    async def _within_limits(self, member: Member, work: Coroutine[Any, Any, T], what: str) -> T:
        """Do it in the time that a swap may wait for one member, and not at all once that has left service.

        Raises:
            EngineTimeoutError, EngineUnavailableError: it did not.
        """
        limit = self._set.limits.swap_timeout_s
        task = asyncio.create_task(work)
        try:
            await _done_or_left(task, member, timeout_s=limit)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
        if member.in_service:
            raise EngineTimeoutError(f"{member.replica} did not {what} within {limit:g} s; see engine.swap_timeout_s")
        raise EngineUnavailableError(f"{member.replica} left service before it could {what}: {member.reason}")

    def _require(self, adapter: str | None) -> None:
        if adapter is not None and adapter not in self._set.wanted:
            loaded = sorted(self._set.wanted)
            raise AdapterError(f"adapter {adapter!r} is not loaded; loaded are {loaded} and the base (None)")

    def _nobody_serves(self) -> str:
        return f"no replica is in service ({self._set.states()})"


async def _done_or_left(task: asyncio.Task[Any], member: Member, *, timeout_s: float | None = None) -> None:
    left = asyncio.create_task(member.left.wait())
    try:
        await asyncio.wait({task, left}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()


def _one_of(failures: Mapping[Member, TidegateError], said: str) -> TidegateError:
    """The only failure as it is, or all of them in one."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    each = "; ".join(f"{member.replica}: {error}" for member, error in failures.items())
    return EngineUnavailableError(f"{said}: {each}" if each else said)
