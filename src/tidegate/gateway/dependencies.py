"""What the gateway needs from the other stages, declared as the slices that it uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tidegate.core.errors import ConfigError
from tidegate.core.shadow import Shadow, ShadowAnswer
from tidegate.core.types import Feedback, Interaction, JsonObject, Split, Task
from tidegate.ports import Engine
from tidegate.ports.signals import Judgement


class RoutedModel(Protocol):
    """The release that answers a request; ``adapter`` is its name in the engine, None the bare base model."""

    @property
    def release_id(self) -> str: ...

    @property
    def adapter(self) -> str | None: ...


class ShadowTarget(Protocol):
    """Where copies of calls go. ``ended`` is set when they no longer should; ``adapter`` as in :class:`RoutedModel`."""

    @property
    def shadow(self) -> Shadow: ...

    @property
    def adapter(self) -> str | None: ...

    @property
    def ended(self) -> asyncio.Event: ...

    def call(self) -> AbstractContextManager[None]:
        """Keep the adapter loaded for the length of a ``with`` block."""
        ...


class EpisodeRouter(Protocol):
    """Which release answers. None of these wait: a swap between two of them is seen or not, never half."""

    @property
    def champion(self) -> str | None:
        """Release id that new episodes begin on."""
        ...

    @property
    def shadow(self) -> ShadowTarget | None:
        """Where copies of calls go now, if anywhere."""
        ...

    def resolve(self, model: str, *, episode_id: str, user_key: str) -> RoutedModel:
        """Route one request and pin its episode; NotFoundError for a name that is not served."""
        ...

    def lease(self, release_id: str) -> AbstractContextManager[None]:
        """Keep a release loaded for the length of a ``with`` block."""
        ...

    def end_episode(self, episode_id: str) -> None:
        """Unpin an episode that has its answer."""
        ...

    def models(self) -> Sequence[tuple[str, float]]:
        """Served names and their creation times in Unix seconds."""
        ...


class InteractionRecorder(Protocol):
    """Durable memory of what was served. Every method raises StoreError when it cannot keep its promise."""

    async def record(self, interaction: Interaction) -> object:
        """Return only after the interaction is durable; a known id is left as it is."""
        ...

    async def record_shadow(self, answer: ShadowAnswer) -> object:
        """Return only after the shadow's answer is durable; never before what users wait for."""
        ...

    async def record_feedback(self, feedback: Feedback) -> bool:
        """Return only after the feedback is durable; False when its id was known."""
        ...

    async def find(self, interaction_id: str) -> Interaction | None:
        """A record by id, or None."""
        ...


class Replicas(Protocol):
    """What ``/metrics`` tells of an engine with several replicas."""

    def breakers(self) -> Mapping[str, str]:
        """``closed`` (in service), ``open`` or ``half_open``, by replica."""
        ...

    def failovers(self) -> Mapping[str, int]:
        """Calls that another replica took over since the start, by reason."""
        ...


async def _nothing_else() -> Sequence[str]:
    return ()


def _unobserved(release_id: str, user_key: str, failed: bool) -> None:
    del release_id, user_key, failed


def _no_verifier(task: Task, transcript: Sequence[JsonObject]) -> Judgement:
    del transcript
    raise ConfigError(f"verifier {task.verifier!r} is not registered with this gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDependencies:
    """Everything that the public API stands on.

    Args:
        engine: answers.
        router: decides which release answers.
        recorder: makes answers durable.
        split_of: user id to (keyed hash, split); the plain id is never kept.
        check_task: raises RequestError when a declared task cannot be replayed.
        clock: Unix seconds.
        new_id: unique letters and digits, e.g. the hex form of a UUID.
        health: reasons beyond engine and champion why requests cannot be served now (a store that does not
            take writes); empty when there are none.
        recorder_counts: the recorder's events since the start by kind, for ``/metrics``.
        observe_call: told of each call that ended: release, user key, whether the engine failed it.
        monotonic: seconds for latencies.
        replicas: the replicas behind ``engine``, for ``/metrics``; None where it is one engine.
        passes_fields_on: whether the engine passes on what the gateway itself does not know or cannot honour.
        judge: runs a declared task's verifier over the messages after the task's own, for searches; raises
            TidegateError where it cannot judge at all.
    """

    engine: Engine
    router: EpisodeRouter
    recorder: InteractionRecorder
    split_of: Callable[[str], tuple[str, Split]]
    check_task: Callable[[Task], None]
    clock: Callable[[], float]
    new_id: Callable[[], str]
    health: Callable[[], Awaitable[Sequence[str]]] = _nothing_else
    recorder_counts: Callable[[], Mapping[str, int]] = dict
    observe_call: Callable[[str, str, bool], None] = _unobserved
    monotonic: Callable[[], float] = time.monotonic
    replicas: Replicas | None = None
    passes_fields_on: bool = False
    judge: Callable[[Task, Sequence[JsonObject]], Judgement] = _no_verifier
