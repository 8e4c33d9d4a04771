"""``POST /v1/chat/completions``: route, generate, record, and only then let the last byte go.

A call ends in one of four ways - finished, client gone, out of time, engine failed - and in all of them what
was sampled is recorded. Only a finished call whose record is durable is acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from tidegate.config.settings import ServerSettings
from tidegate.core.errors import (
    AdapterError,
    EngineBusyError,
    EngineError,
    EngineTimeoutError,
    RequestError,
    StoppingError,
    StoreError,
    TidegateError,
)
from tidegate.core.generation import GenerationFold
from tidegate.core.searches import Picked
from tidegate.core.types import ChoiceEnd, GenerationEvent, Interaction, TokenDelta
from tidegate.gateway.body import read_json_object
from tidegate.gateway.chat_call import ChatCall, plan_call, route_call, to_record
from tidegate.gateway.delivery import BodyDelivery, Delivery, EventDelivery, Taker
from tidegate.gateway.dependencies import GatewayDependencies, RoutedModel
from tidegate.gateway.guard import Guard, Turns
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.problems import ClientGoneError, Problem, boundary
from tidegate.gateway.rendering import AnswerShape, is_finished, recorded_events, recorded_usage, usage
from tidegate.gateway.searching import HeldAnswer, Searcher, recorded_search_headers, search_headers
from tidegate.gateway.shadow import ShadowCalls

_CUT_SHORT = (ClientGoneError, EngineTimeoutError, StoppingError)
"""Ends that are recorded even when not one token had been sampled."""

Asgi: TypeAlias = tuple[Scope, Receive, Send]


class ChatEndpoint:
    """The ASGI app of the route.

    Args:
        deps: what the gateway stands on.
        metrics: counters of the app.
        settings: the limits on a body's size and on the time from there to the last sampled token.
        shadows: takes copies of answered calls.
    """

    def __init__(
        self, deps: GatewayDependencies, metrics: GatewayMetrics, settings: ServerSettings, shadows: ShadowCalls
    ) -> None:
        self._deps = deps
        self._metrics = metrics
        self._shadows = shadows
        self._max_body_bytes = settings.max_body_bytes
        self._timeout_s = settings.request_timeout_s
        self._max_search = settings.max_search
        self._searcher = Searcher(deps.judge, metrics, timeout_s=settings.search_verify_s)
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = self._deps.monotonic()
        headers = Headers(scope=scope)
        raw = await read_json_object(receive, headers, max_bytes=self._max_body_bytes, timeout_s=self._timeout_s)
        call = plan_call(raw, headers, self._deps, max_search=self._max_search, started_s=started_s)
        async with Guard(receive, timeout_s=self._timeout_s) as guard:
            if not call.identity.keyed:
                await self._generate(call, call.identity.interaction_id, guard, (scope, receive, send))
                return
            async with self._turns.turn(call.identity.interaction_id, guard):
                interaction_id, recorded = await guard.run(self._earlier_answer(call))
                if recorded is None:
                    await self._generate(call, interaction_id, guard, (scope, receive, send))
                else:
                    await self._repeat(call, recorded, guard, (scope, receive, send))

    async def _earlier_answer(self, call: ChatCall) -> tuple[str, Interaction | None]:
        """The recorded answer to the same request, else the id that a new attempt is recorded under.

        An attempt that was cut short keeps its record; the next one gets a number.
        """
        base = call.identity.interaction_id
        with boundary("the store", StoreError):
            for attempt in itertools.count(1):
                interaction_id = base if attempt == 1 else f"{base}-{attempt}"
                found = await self._deps.recorder.find(interaction_id)
                if found is None or not found.consent:
                    return interaction_id, None
                if is_finished(found):
                    return interaction_id, found
        raise AssertionError("unreachable: the count has no end")

    async def _repeat(self, call: ChatCall, recorded: Interaction, guard: Guard, asgi: Asgi) -> None:
        shape = call.answer_shape(recorded.id, recorded.release_id, recorded.created_at)
        headers = {"x-tidegate-replayed": "true", **recorded_search_headers(recorded)}
        delivery = self._delivery(call, asgi, shape, headers)
        fold = GenerationFold()

        async def say_again() -> None:
            for event in recorded_events(recorded):
                fold.add(event)
                await delivery.take(event)

        await guard.run(say_again())
        await delivery.finish(fold, recorded_usage(recorded))
        self._metrics.generations.labels("replayed").inc()

    async def _generate(self, call: ChatCall, interaction_id: str, guard: Guard, asgi: Asgi) -> None:
        routed = route_call(call, self._deps)
        shape = call.answer_shape(interaction_id, routed.release_id, call.created_at)
        delivery = self._delivery(call, asgi, shape, {})
        fold, held, picked = GenerationFold(), HeldAnswer(), None
        failure: TidegateError | ClientGoneError | None = None
        answered = False
        try:
            with self._deps.router.lease(routed.release_id), self._shadows.beside(call.sampling.n):
                taker = delivery if call.plan is None else held
                await guard.run(self._sample(call, interaction_id, routed, fold, taker))
                answered = True  # what goes wrong from here on, a verifier that is slow too, is no fault of the release
                if call.plan is not None:
                    with boundary("the search", TidegateError):
                        picked = await guard.run(self._searcher.pick(call.plan, fold.choices()))
        except (TidegateError, ClientGoneError) as error:
            failure = error
        except asyncio.CancelledError:
            # only a server that stops cancels us; its client and the record still hear of it, then the task ends
            failure = StoppingError("the server is stopping; repeat the request in a moment")
        self._metrics.generations.labels(_outcome(failure)).inc()
        at_fault = not answered and _is_engine_fault(failure)
        self._deps.observe_call(routed.release_id, call.identity.user_key, at_fault)
        events, shown = ([], fold) if picked is None else held.only(picked.index)
        self._unpin(call, shown, failure)
        if failure is None or fold.choices() or isinstance(failure, _CUT_SHORT):
            failure = await self._record(call, fold, interaction_id, routed.release_id, picked) or failure
        if isinstance(failure, ClientGoneError):
            raise failure
        if isinstance(failure, TidegateError):
            await delivery.fail(Problem.of(failure))
            return
        self._count_tokens(fold)
        if call.plan is not None and picked is not None:
            delivery = self._delivery(call, asgi, shape, search_headers(call.plan.search, picked))
            for event in events:
                await delivery.take(event)
        await delivery.finish(shown, usage(fold))
        if call.plan is None:  # what was picked among several says nothing beside a single answer
            self._shadows.offer(call, interaction_id, routed)

    def _unpin(self, call: ChatCall, fold: GenerationFold, failure: TidegateError | ClientGoneError | None) -> None:
        """An episode is over when it has its answer, and at once when its caller gave it no name to go on by."""
        identity = call.identity
        answered = failure is None and not any(choice.tool_calls for choice in fold.choices())
        if not identity.named_episode or (answered and identity.main_line):
            self._deps.router.end_episode(identity.episode_id)

    async def _sample(
        self, call: ChatCall, interaction_id: str, routed: RoutedModel, fold: GenerationFold, taker: Taker
    ) -> None:
        """Run the engine to its end; closing its iterator cancels it, whatever stops us."""
        with boundary("the engine", EngineError):
            events = self._deps.engine.generate(call.engine_request(interaction_id, routed.adapter))
            try:
                await self._pump(events, call, fold, taker)
            except AdapterError as error:
                raise EngineError(f"release {routed.release_id!r} cannot answer: {error}") from error
            finally:
                close = getattr(events, "aclose", None)
                if close is not None:
                    await close()

    async def _pump(
        self, events: AsyncIterator[GenerationEvent], call: ChatCall, fold: GenerationFold, taker: Taker
    ) -> None:
        ended: set[int] = set()
        sampled = False
        async for event in events:
            heard = call.heard(event, fold)
            fold.add(heard)
            if isinstance(event, ChoiceEnd):
                ended.add(event.choice)
            elif isinstance(event, TokenDelta) and not sampled:
                sampled = True
                self._metrics.first_token_seconds.observe(max(self._deps.monotonic() - call.started_s, 0.0))
            await taker.take(heard)
        if len(ended) != call.sampling.n:
            raise EngineError(f"the engine ended after {len(ended)} of {call.sampling.n} choices; repeat the request")

    async def _record(
        self, call: ChatCall, fold: GenerationFold, interaction_id: str, release_id: str, picked: Picked | None
    ) -> TidegateError | None:
        """Make the call durable; the error that says why it could not be, else None."""
        record = to_record(
            call,
            fold,
            interaction_id=interaction_id,
            release_id=release_id,
            replica=fold.replica or self._deps.engine.replica,
            latency_s=max(self._deps.monotonic() - call.started_s, 0.0),
            picked=None if picked is None else picked.index,
        )
        try:
            with boundary("the recorder", StoreError):
                await self._deps.recorder.record(record)
        except TidegateError as error:
            self._metrics.interactions.labels("failed").inc()
            if isinstance(error, RequestError):  # the recorder found fault with the call, e.g. a stranger's episode
                return error
            return StoreError(f"the answer could not be recorded, so it is withheld: {error}; repeat the request")
        self._metrics.interactions.labels("recorded").inc()
        if not all(choice.token_exact for choice in record.choices):
            self._metrics.interactions_without_tokens.inc()
        return None

    @staticmethod
    def _delivery(call: ChatCall, asgi: Asgi, shape: AnswerShape, extra_headers: Mapping[str, str]) -> Delivery:
        headers = {
            "x-tidegate-release": shape.release_id,
            "x-tidegate-episode": call.identity.episode_id,
            **extra_headers,
        }
        if call.chat.stream:
            return EventDelivery(*asgi, shape=shape, headers=headers, n=call.delivered_n)
        return BodyDelivery(*asgi, shape=shape, headers=headers)

    def _count_tokens(self, fold: GenerationFold) -> None:
        counts = usage(fold)
        if counts is None:
            return
        self._metrics.tokens.labels("prompt").inc(counts["prompt_tokens"])
        self._metrics.tokens.labels("completion").inc(counts["completion_tokens"])


def _is_engine_fault(failure: TidegateError | ClientGoneError | None) -> bool:
    """Whether the engine failed the call; a full queue is no release's fault."""
    return isinstance(failure, EngineError) and not isinstance(failure, EngineBusyError)


def _outcome(failure: TidegateError | ClientGoneError | None) -> str:
    match failure:
        case None:
            return "finished"
        case ClientGoneError():
            return "cancelled"
        case TidegateError():
            return failure.code
