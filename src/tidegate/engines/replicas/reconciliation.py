"""Bringing members back: each is looked at from time to time, given what is wanted, and proven before it gets traffic.

A member that was restarted, was away during a swap, or failed too many calls comes back only after its list of adapters
is the wanted one, each adapter on it was proven to differ from its base, to be the right bytes and to compute what the
trainer did, and, where its calls had failed, one was answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tidegate.core.agreement import Tolerance
from tidegate.core.errors import EngineBusyError, EngineError, TidegateError
from tidegate.core.generation import collect
from tidegate.core.types import GenerationRequest, Messages, Sampling
from tidegate.engines.replicas.members import Member, Membership
from tidegate.engines.replicas.proof import prove, record_of

_log = logging.getLogger(__name__)


class Reconciliation:
    """Looks at the members of one set, each in a task of its own.

    Args:
        membership: the set.
        probe_prompts: what adapters are told from the base by, at least one.
        tolerance: how far a member's log-probabilities may lie from the trainer's.
    """

    def __init__(self, membership: Membership, *, probe_prompts: Sequence[Messages], tolerance: Tolerance) -> None:
        self._set = membership
        self._tolerance = tolerance
        self._prompts = probe_prompts
        self._watching: list[asyncio.Task[None]] = []
        self._forgetting: dict[tuple[Member, str], asyncio.Task[None]] = {}
        self.moved = asyncio.Event()

    async def start(self) -> None:
        """Look at every member once, and from then on until :meth:`close`."""
        self._watching = [asyncio.create_task(self._watch(member)) for member in self._set.members]
        for member in self._set.members:
            await member.looked_at.wait()

    async def close(self) -> None:
        """End all looks, and what they have begun."""
        tasks = [*self._watching, *self._forgetting.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def forget(self, member: Member, name: str) -> asyncio.Task[None]:
        """Have a member unload an adapter when its last call has ended; one that fails to is asked again by a look."""
        key = member, name
        task = self._forgetting.get(key)
        if task is None:
            task = self._forgetting[key] = asyncio.create_task(self._unload(member, name))
            task.add_done_callback(lambda _: self._forgetting.pop(key, None))
        return task

    async def _unload(self, member: Member, name: str) -> None:
        try:
            await member.engine.unload(name)
        except TidegateError as error:
            _log.warning("replica %s did not unload %r, it is asked again: %s", member.replica, name, error)
            return
        if name not in self._set.wanted:
            member.held.discard(name)

    async def _watch(self, member: Member) -> None:
        while True:
            await self._look(member)
            await member.rest()

    async def _look(self, member: Member) -> None:
        member.begin_look()
        try:
            if await self._answers(member) and not member.in_service:
                await self._bring_back(member)
        except TidegateError as error:
            member.leave(str(error))
        except TimeoutError:
            member.leave(f"it did not do within {self._set.limits.swap_timeout_s:g} s what brings it back")
        except Exception as error:  # noqa: BLE001 - a member that nobody looks at would never come back
            _log.exception("replica %s failed unexpectedly", member.replica)
            member.leave(f"it failed unexpectedly ({type(error).__name__}); the server's log has the details")
        finally:
            member.looked_at.set()
            self.moved.set()

    async def _answers(self, member: Member) -> bool:
        """Whether a member says what it holds, and, in service, that it serves; what it has lost is noted."""
        held, heard = set(member.held), member.heard
        limit = self._set.limits.check_timeout_s
        try:
            async with asyncio.timeout(limit):
                listed = {ref.name for ref in await member.engine.list_adapters()}
                lost = (held & member.held & set(self._set.wanted)) - listed
                if lost:
                    member.lost(lost)
                if not member.in_service:
                    return True
                health = await member.engine.health()
        except TimeoutError:
            # one that answered a call meanwhile is busy, not dead
            if member.heard == heard or not member.in_service:
                member.suspect(f"it did not answer a check within {limit:g} s")
            return False
        if not health.ready:
            member.leave(health.detail)
            return False
        self._drop_unwanted(member)
        member.is_well()
        return True

    async def _bring_back(self, member: Member) -> None:
        """Make it what the set wants, prove it, and take it into service.

        Raises:
            TimeoutError, TidegateError: why it stays out.
        """
        limits, wanted = self._set.limits, self._set.wanted
        member.begin_proof()
        while True:
            for name in member.lacks(wanted):
                async with asyncio.timeout(limits.swap_timeout_s):
                    await member.engine.load(wanted[name])
                member.held.add(name)
            dropped = self._drop_unwanted(member)
            if dropped:  # calls that it answers still may hold them longer
                await asyncio.wait(dropped, timeout=limits.check_timeout_s)
            async with asyncio.timeout(limits.swap_timeout_s):
                health = await member.engine.health()
            if not health.ready:
                raise EngineError(health.detail)
            await self._prove(member)
            if not member.lacks(wanted):  # nothing came to be wanted meanwhile
                member.enter()
                return

    async def _prove(self, member: Member) -> None:
        refs = list(self._set.wanted.values())
        for ref in refs:
            record = await record_of(ref)
            async with asyncio.timeout(self._set.limits.swap_timeout_s):
                proof = await prove(
                    member.engine, ref, record, against=None, prompts=self._prompts, tolerance=self._tolerance
                )
            if proof.fault is not None:
                raise EngineError(proof.fault)
        if not refs and member.must_answer:
            await self._ask_for_a_token(member)

    async def _ask_for_a_token(self, member: Member) -> None:
        request = GenerationRequest(
            request_id="look", messages=self._prompts[0], sampling=Sampling(temperature=0.0, max_tokens=1)
        )
        try:
            async with asyncio.timeout(self._set.limits.swap_timeout_s):
                await collect(member.engine.generate(request))
        except EngineBusyError:
            pass  # it answers others

    def _drop_unwanted(self, member: Member) -> list[asyncio.Task[None]]:
        return [self.forget(member, name) for name in member.held - set(self._set.wanted)]
