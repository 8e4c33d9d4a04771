"""Search at serving: one call samples several choices, one of them is picked and delivered.

Nothing leaves before the choice is made, streams included. A verifier runs on a thread beside the event loop and has a
limit; what it has not judged by then counts as unverified and the answer goes out all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from starlette.datastructures import Headers

from tidegate.core.errors import RequestError, TidegateError
from tidegate.core.generation import GenerationFold
from tidegate.core.rollout import assistant_message
from tidegate.core.searches import Picked, Scored, Search, SearchKind, parse_search, pick_best, pick_majority
from tidegate.core.types import (
    Choice,
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    Interaction,
    JsonObject,
    Messages,
    Outcome,
    PromptTokens,
    Sampling,
    Task,
    TokenDelta,
)
from tidegate.gateway.body import shown
from tidegate.gateway.chat_schema import ChatRequest
from tidegate.gateway.identity import SEARCH_HEADER
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.ports.signals import VERIFIER_ERROR, Judgement

_log = logging.getLogger(__name__)

_MOST_THREADS: Final = 4
"""Threads that judge at a time. A verifier that hangs keeps its thread; beyond these no choice is verified any more."""
_UNVERIFIED: Final = Scored(score=None, passed=False)

Judge: TypeAlias = Callable[[Task, Sequence[JsonObject]], Judgement]
"""Judges the messages after the task's own; raises TidegateError where it cannot, whatever the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """What is searched for. ``task`` and ``before``, the messages between it and the answer, are for verifiers."""

    search: Search
    task: Task | None = None
    before: Messages = ()


def asked_search(chat: ChatRequest, headers: Headers, *, most: int) -> Search | None:
    """The search that a request asks for, None where it asks for none.

    Args:
        chat: the body.
        headers: win over ``metadata.tidegate_search``.
        most: largest number of choices.

    Raises:
        RequestError: it cannot be done, or contradicts the rest of the body.
    """
    text = headers.get(SEARCH_HEADER) or (chat.metadata or {}).get("tidegate_search")
    if not text:
        return None
    try:
        search = parse_search(text, most=most)
    except ValueError as error:
        raise RequestError(f"{SEARCH_HEADER} is {shown(text)}: {error}", param=SEARCH_HEADER) from error
    if chat.n is not None and chat.n > 1:
        raise RequestError(
            f"'n' is {chat.n} beside {SEARCH_HEADER}: {search}, which delivers one; leave it out", param="n"
        )
    if chat.temperature == 0.0:
        raise RequestError(
            f"'temperature' is 0 beside {SEARCH_HEADER}: {search}: all choices would be the same; send one above 0",
            param="temperature",
        )
    return search


def searched(sampling: Sampling, search: Search) -> Sampling:
    """The decoding settings with the choices that the search needs."""
    return replace(sampling, n=search.n, search=str(search))


class Searcher:
    """Picks choices.

    Args:
        judge: runs a task's verifier.
        metrics: counters of the app.
        timeout_s: longest time for the verdicts on one call's choices.
    """

    def __init__(self, judge: Judge, metrics: GatewayMetrics, *, timeout_s: float) -> None:
        self._judge = judge
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._threads = 0

    async def pick(self, plan: SearchPlan, choices: Sequence[Choice]) -> Picked:
        """Choose among the choices of a call that has ended; whatever a verifier does, one is chosen."""
        self._metrics.searches.labels(str(plan.search.kind)).inc()
        if plan.search.kind is SearchKind.MAJORITY or plan.task is None:
            return pick_majority(choices)
        scores = await self._scores(
            plan.task, [(choice, (*plan.before, assistant_message(choice))) for choice in choices]
        )
        for scored in scores:
            result = "unverified" if scored.score is None else "passed" if scored.passed else "failed"
            self._metrics.search_choices.labels(result).inc()
        return pick_best(scores)

    async def _scores(self, task: Task, answers: Sequence[tuple[Choice, Messages]]) -> list[Scored]:
        if self._threads >= _MOST_THREADS:
            _log.error("verifier %r: %d searches are being judged already; no choice is", task.verifier, self._threads)
            return [_UNVERIFIED] * len(answers)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        found: list[Scored] = []

        def over() -> None:
            self._threads -= 1
            if not ended.done():
                ended.set_result(None)

        def run() -> None:
            try:
                for choice, transcript in answers:
                    found.append(self._scored(task, choice, transcript))
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                    loop.call_soon_threadsafe(over)

        self._threads += 1
        # No pool: its threads keep a process alive that ends, and a verifier of others may never return.
        threading.Thread(target=run, name="tidegate-search", daemon=True).start()
        try:
            await asyncio.wait_for(ended, self._timeout_s)
        except TimeoutError:
            _log.error(
                "verifier %r judged %d of %d choices in %g s (server.search_verify_s)",
                task.verifier, len(found), len(answers), self._timeout_s,
            )  # fmt: skip
        judged = found[: len(answers)]
        return [*judged, *[_UNVERIFIED] * (len(answers) - len(judged))]

    def _scored(self, task: Task, choice: Choice, transcript: Messages) -> Scored:
        if choice.invalid_tool_call:
            return Scored(score=0.0, passed=False)
        try:
            judgement = self._judge(task, transcript)
        except TidegateError as error:
            _log.warning("verifier %r cannot judge: %s", task.verifier, error)
            return _UNVERIFIED
        except Exception:  # noqa: BLE001 - the boundary: code of others must not cost a client its answer
            _log.exception("verifier %r failed on a choice", task.verifier)
            return _UNVERIFIED
        if judgement.outcome is Outcome.ABSTAIN or judgement.detail.startswith(VERIFIER_ERROR):
            return _UNVERIFIED
        return Scored(score=judgement.score, passed=judgement.outcome is Outcome.PASS)


class HeldAnswer:
    """Keeps what the engine says until one choice is picked; stands where a delivery would."""

    def __init__(self) -> None:
        self._events: list[GenerationEvent] = []

    async def take(self, event: GenerationEvent) -> None:
        """Keep an event."""
        self._events.append(event)

    def only(self, index: int) -> tuple[list[GenerationEvent], GenerationFold]:
        """The events of one choice as those of a call that sampled nothing else, and their fold."""
        kept: list[GenerationEvent] = []
        for event in self._events:
            if isinstance(event, PromptTokens):
                kept.append(event)
            elif isinstance(event, TokenDelta | ChoiceEnd) and event.choice == index:
                kept.append(replace(event, choice=0))
        fold = GenerationFold()
        for event in kept:
            fold.add(event)
        return kept, fold


def picked_choices(choices: Sequence[Choice], index: int | None) -> tuple[Choice, ...]:
    """The choices of a search as they are recorded: all of them, with the one that was delivered marked.

    Args:
        choices: of the call, by index.
        index: of the delivered one; None where the call was cut short, and every choice with it.
    """
    if index is None:
        return tuple(replace(choice, delivered=False, finish_reason=FinishReason.CANCELLED) for choice in choices)
    return tuple(replace(choice, delivered=choice.index == index) for choice in choices)


def search_headers(search: Search, picked: Picked) -> dict[str, str]:
    """What a response says of its search."""
    return {
        SEARCH_HEADER: str(search),
        f"{SEARCH_HEADER}-choice": str(picked.index),
        f"{SEARCH_HEADER}-support": str(picked.support),
    }


def recorded_search_headers(recorded: Interaction) -> Mapping[str, str]:
    """The same of a recorded answer that is given again; how many spoke for it is not recorded."""
    if recorded.sampling.search is None:
        return {}
    delivered = next(choice.index for choice in recorded.choices if choice.delivered)
    return {SEARCH_HEADER: recorded.sampling.search, f"{SEARCH_HEADER}-choice": str(delivered)}
