"""Many simulated users against a running server, at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

from tidegate.core.errors import ConfigError
from tidegate.core.types import Task
from tidegate.ports import Environment, Verifier
from tidegate.simulate.client import open_client
from tidegate.simulate.player import Player, PlayOptions
from tidegate.simulate.results import EpisodeResult, SimulationReport, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """Who comes and when.

    ``session`` names this simulation in episode and user ids; it must differ between simulations against one
    server, which would take episodes of the same id for one. ``users`` None gives each episode a user of its own
    (``<session>-user-<index>``); N lets ``user-0`` to ``user-<N-1>`` come in turn, the same ones in every session.
    ``concurrency`` episodes run at once at most. ``rate_per_s`` starts no more than so many a second.
    ``first_index`` is the number of the first episode.
    """

    session: str
    users: int | None = None
    concurrency: int = 8
    rate_per_s: float | None = None
    first_index: int = 0

    def __post_init__(self) -> None:
        """Refuse what no simulation can run with.

        Raises:
            ConfigError: a value is out of range.
        """
        for name, value, usable, accepted in (
            ("session", self.session, self.session.isascii() and self.session.isprintable() and self.session.strip(),
             "printable ASCII text"),
            ("users", self.users, self.users is None or self.users >= 1, "None or a whole number from 1"),
            ("concurrency", self.concurrency, self.concurrency >= 1, "a whole number from 1"),
            ("rate_per_s", self.rate_per_s, self.rate_per_s is None or self.rate_per_s > 0, "None or a number above 0"),
        ):  # fmt: skip
            if not usable:
                raise ConfigError(f"{name} = {value!r} is not usable for a simulation; accepted: {accepted}")

    def user(self, index: int) -> str:
        """The user who plays the episode with this number."""
        return f"{self.session}-user-{index}" if self.users is None else f"user-{index % self.users}"


async def simulate(
    tasks: Iterable[Task],
    *,
    base_url: str,
    arrivals: ArrivalOptions,
    environments: Mapping[str, Environment],
    verifiers: Mapping[str, Verifier],
    play: PlayOptions | None = None,
    api_key: str = "unused",
    timeout_s: float = 120.0,
    on_episode: Callable[[EpisodeResult], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    clock: Callable[[], float] = perf_counter,
) -> SimulationReport:
    """Play tasks as users of a server that speaks the OpenAI API, one episode a task.

    Args:
        tasks: what to ask, in order; may be endless when ``stop`` ends it.
        base_url: ``http://host:port/v1``.
        arrivals: who comes and when.
        environments: by name, for tasks with tools.
        verifiers: by name; they decide what passed.
        play: how users ask, and what feedback they give.
        api_key: bearer token of every request.
        timeout_s: a request that takes longer has failed.
        on_episode: called after each episode, in the event loop.
        stop: once set no episode begins; those under way are played to their end.
        clock: seconds; only differences are used.

    Returns:
        Totals over all episodes. When cancelled everything under way is dropped and nothing is returned;
        ``on_episode`` has seen all that ended.

    Raises:
        ConfigError: the URL or a task is not usable.
    """
    stop = stop or asyncio.Event()
    tally = Tally()
    started = clock()
    numbered = enumerate(tasks)
    async with open_client(base_url, api_key=api_key, timeout_s=timeout_s) as client:
        player = Player(
            client,
            options=play or PlayOptions(),
            environments=environments,
            verifiers=verifiers,
            clock=clock,
        )

        async def work() -> None:
            while (item := await _next(numbered, arrivals, stop, clock, started)) is not None:
                position, task = item
                index = arrivals.first_index + position
                result = await player.play(
                    task, index=index, episode_id=f"{arrivals.session}-{index}", user=arrivals.user(index)
                )
                tally.add(result)
                on_episode(result)

        await _run_all([asyncio.create_task(work()) for _ in range(arrivals.concurrency)])
    return tally.report(wall_s=clock() - started, stopped_early=stop.is_set())


async def _next(
    numbered: Iterator[tuple[int, Task]],
    arrivals: ArrivalOptions,
    stop: asyncio.Event,
    clock: Callable[[], float],
    started: float,
) -> tuple[int, Task] | None:
    """The next task when it is due, None when there is none or the simulation is to stop."""
    if stop.is_set():
        return None
    item = next(numbered, None)
    if item is None or arrivals.rate_per_s is None:
        return item
    delay = started + item[0] / arrivals.rate_per_s - clock()
    if delay > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), delay)
    return None if stop.is_set() else item


async def _run_all(workers: list[asyncio.Task[None]]) -> None:
    """Wait for all; the first failure, or being cancelled, ends the others."""
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
