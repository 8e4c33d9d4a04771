"""Copies of users' calls for a release in the shadow, after the user's own answer is durable and delivered.

Nothing here is awaited by a request. A copy gives way: it is not begun, or broken off, while users keep the engine
busy, and a server that stops does not wait for it. What became of each call that was drawn is recorded, dropped ones
included, so that a reader sees what the figures leave out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tidegate.config.shadow import ShadowSettings
from tidegate.core.errors import EngineBusyError, EngineError, EngineTimeoutError, StoreError, TidegateError
from tidegate.core.generation import GenerationFold
from tidegate.core.shadow import ShadowAnswer, ShadowOutcome
from tidegate.core.types import ChoiceEnd, GenerationEvent, Split
from tidegate.gateway.chat_call import ChatCall
from tidegate.gateway.dependencies import GatewayDependencies, RoutedModel, ShadowTarget
from tidegate.gateway.guard import CLOSE_GRACE_S, end_task
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.problems import boundary

_log = logging.getLogger(__name__)

BUSY = "busy"
"""Users had more choices in flight than ``shadow.max_beside`` when the call was drawn."""
INTERRUPTED = "interrupted"
"""They had so while the copy ran."""
LIMIT = "limit"
"""As many copies as ``shadow.max_calls`` ran already."""
ENGINE_BUSY = "engine_busy"
"""The engine's queue was full."""
ENDED = "ended"
"""The shadow ended while the copy ran."""
STOPPING = "stopping"
"""The server stopped."""


class ShadowCalls:
    """The copies of one gateway. Everything happens on its event loop.

    Args:
        deps: what the gateway stands on.
        metrics: counters of the app.
        settings: how much of the engine copies may take.
        timeout_s: longest time of one copy.
    """

    def __init__(
        self, deps: GatewayDependencies, metrics: GatewayMetrics, settings: ShadowSettings, *, timeout_s: float
    ) -> None:
        self._deps = deps
        self._metrics = metrics
        self._settings = settings
        self._timeout_s = timeout_s
        self._users = 0
        self._running: set[asyncio.Task[None]] = set()
        self._writing: set[asyncio.Task[None]] = set()
        self._crowded = asyncio.Event()
        self._stopping = asyncio.Event()

    @contextmanager
    def beside(self, choices: int) -> Generator[None]:
        """Count a user's call of so many choices while the engine answers it; copies make room for it."""
        self._count_users(choices)
        try:
            yield
        finally:
            self._count_users(-choices)

    def offer(self, call: ChatCall, interaction_id: str, routed: RoutedModel) -> None:
        """Copy a call that was answered, recorded and delivered, if it is drawn. Returns at once.

        Only the main line of train and dev users who let their calls be stored, answered by the champion: what sealed
        users get must not be seen from anywhere but the gate.
        """
        router, identity = self._deps.router, call.identity
        target = router.shadow
        open_to_us = identity.main_line and identity.consent and identity.split is not Split.SEALED
        if target is None or not open_to_us or routed.release_id != router.champion:
            return
        if not target.shadow.takes(interaction_id):
            return
        answer = ShadowAnswer(
            shadow_id=target.shadow.id,
            interaction_id=interaction_id,
            release_id=target.shadow.release_id,
            engine_replica="",
            created_at=self._deps.clock(),
            outcome=ShadowOutcome.DROPPED,
        )
        reason = self._why_not_now()
        if reason is None:
            self._start(self._running, self._answer(call, target, answer))
        else:
            self._start(self._writing, self._keep(replace(answer, reason=reason)))

    async def close(self) -> None:
        """Begin nothing any more, break off what runs, and wait until that is written down."""
        self._stopping.set()
        left = self._running | self._writing
        if left:
            await asyncio.wait(left, timeout=2 * CLOSE_GRACE_S)

    def _count_users(self, change: int) -> None:
        self._users += change
        if self._users > self._settings.max_beside:
            self._crowded.set()
        else:
            self._crowded.clear()

    def _why_not_now(self) -> str | None:
        if self._stopping.is_set():
            return STOPPING
        if self._crowded.is_set():
            return BUSY
        return LIMIT if len(self._running) >= self._settings.max_calls else None

    @staticmethod
    def _start(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _answer(self, call: ChatCall, target: ShadowTarget, answer: ShadowAnswer) -> None:
        fold = GenerationFold()
        began_s = self._deps.monotonic()
        try:
            with target.call():
                reason = await self._unless_broken_off(self._sample(call, target, answer, fold), target)
        except EngineBusyError:
            outcome, reason = ShadowOutcome.DROPPED, ENGINE_BUSY
        except TidegateError as error:
            _log.info("the shadow failed on %s: %s", answer.interaction_id, error)
            outcome, reason = ShadowOutcome.FAILED, error.code
        else:
            outcome = ShadowOutcome.ANSWERED if reason is None else ShadowOutcome.DROPPED
        seconds = max(self._deps.monotonic() - began_s, 0.0)
        replica = "" if outcome is ShadowOutcome.DROPPED else fold.replica or self._deps.engine.replica
        ended = replace(answer, outcome=outcome, reason=reason or "", seconds=seconds, engine_replica=replica)
        await self._keep(ended if outcome is not ShadowOutcome.ANSWERED else _with_answer(ended, fold))

    async def _unless_broken_off(self, work: Coroutine[Any, Any, None], target: ShadowTarget) -> str | None:
        """Run to the end and return None, or cancel and say why.

        Raises:
            EngineTimeoutError: the time was up.
            TidegateError: the work failed.
        """
        task = asyncio.create_task(work)
        reasons = ((target.ended, ENDED), (self._stopping, STOPPING), (self._crowded, INTERRUPTED))
        waits = {asyncio.create_task(event.wait()): reason for event, reason in reasons}
        try:
            await asyncio.wait({task, *waits}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return None
            for wait, reason in waits.items():
                if wait.done():
                    return reason
            raise EngineTimeoutError(f"the shadow gave no complete answer within {self._timeout_s:g} s")
        finally:
            for wait in waits:
                wait.cancel()
            await end_task(task)

    async def _sample(self, call: ChatCall, target: ShadowTarget, answer: ShadowAnswer, fold: GenerationFold) -> None:
        """Ask for one choice, whatever the user asked for: the first one is compared.

        All copies are one caller, so that where callers take turns none takes that of its user.
        """
        request = replace(
            call.engine_request(f"{answer.interaction_id}-{answer.shadow_id}", target.adapter),
            sampling=replace(call.sampling, n=1),
            passed=None,
            caller=answer.shadow_id,
        )
        with boundary("the engine", EngineError):
            events = self._deps.engine.generate(request)
            try:
                await _pump(events, call, fold)
            finally:
                close = getattr(events, "aclose", None)
                if close is not None:
                    await close()

    async def _keep(self, answer: ShadowAnswer) -> None:
        try:
            with boundary("the recorder", StoreError):
                await self._deps.recorder.record_shadow(answer)
        except TidegateError as error:
            _log.warning("a shadow answer is lost: %s", error)
            self._metrics.shadow_calls.labels("unrecorded").inc()
            return
        self._metrics.shadow_calls.labels(answer.reason or answer.outcome.value).inc()


async def _pump(events: AsyncIterator[GenerationEvent], call: ChatCall, fold: GenerationFold) -> None:
    ended = False
    async for event in events:
        fold.add(call.heard(event, fold))
        ended = ended or isinstance(event, ChoiceEnd)
    if not ended:
        raise EngineError("the engine ended in the middle of a shadow's answer")


def _with_answer(answer: ShadowAnswer, fold: GenerationFold) -> ShadowAnswer:
    """The text and its counts; token ids and log-probabilities stay behind, so that nothing can train on them."""
    (choice,) = fold.all_choices(1)
    counts = fold.counts
    exact = choice.token_exact and bool(fold.prompt_token_ids)
    return replace(
        answer,
        text=choice.text,
        tool_calls=choice.tool_calls,
        finish_reason=choice.finish_reason,
        invalid_tool_call=choice.invalid_tool_call,
        prompt_tokens=len(fold.prompt_token_ids) if exact else counts.prompt if counts else None,
        completion_tokens=len(choice.token_ids) if exact else counts.completion if counts else None,
    )
