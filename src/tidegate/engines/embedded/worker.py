"""The decode thread: commands between steps, then one step of the next lane that has work.

Callers talk to it through a guarded inbox; it talks back in one batch a step and event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from tidegate.core.errors import EngineBusyError, EngineError, TidegateError
from tidegate.core.types import GenerationEvent
from tidegate.engines.embedded.lane import Lane
from tidegate.engines.embedded.rows import Row

_log = logging.getLogger(__name__)
T = TypeVar("T")
_Item = GenerationEvent | TidegateError


class Mailbox:
    """Events of one call on their way from the decode thread to the caller's event loop."""

    def __init__(self, worker: DecodeWorker, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._worker = worker
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()

    def post(self, item: _Item) -> None:
        """Decode thread: hand over at the end of the step."""
        self._worker.outbox.append((self, item))

    def deliver(self, item: _Item) -> None:
        """Event loop: put what the decode thread posted."""
        self._queue.put_nowait(item)

    async def get(self) -> GenerationEvent:
        """Event loop: the next event.

        Raises:
            TidegateError: the call failed.
        """
        item = await self._queue.get()
        if isinstance(item, TidegateError):
            raise item
        return item


class DecodeWorker:
    """Runs lanes in turn on a thread of its own.

    Args:
        max_queue: most choices that wait for a slot, over all lanes.
        threads: compute threads; 0 leaves torch's default (all processors).
    """

    def __init__(self, *, max_queue: int, threads: int) -> None:
        self.outbox: list[tuple[Mailbox, _Item]] = []
        self.last_error = ""
        self._max_queue = max_queue
        self._threads = threads
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._arrived: deque[tuple[Lane, list[Row]]] = deque()
        self._lanes: list[Lane] = []
        self._closing = False
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="tidegate-decode", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and takes work."""
        return self._thread.is_alive() and not self._closing

    def counts(self) -> tuple[int, int]:
        """Choices that wait and choices that run."""
        with self._changed:
            return self._queued(), sum(lane.running for lane in self._lanes)

    def submit(self, lane: Lane, rows: list[Row]) -> None:
        """Queue the rows of one call.

        Raises:
            EngineBusyError: the queue has no room for them.
            EngineError: the worker has ended.
        """
        with self._changed:
            self._refuse_when_closed()
            queued = self._queued()
            if queued + len(rows) > self._max_queue:
                raise EngineBusyError(
                    f"{queued} choices wait already and {len(rows)} more would exceed model.max_queue = "
                    f"{self._max_queue}; repeat the request later"
                )
            self._arrived.append((lane, rows))
            self._changed.notify()

    def run(self, command: Callable[[], T]) -> Future[T]:
        """Run a function on the decode thread between two steps."""
        future: Future[T] = Future()

        def execute() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as error:  # noqa: BLE001 - the caller gets it
                    future.set_exception(error)

        with self._changed:
            self._refuse_when_closed()
            self._commands.append(execute)
            self._changed.notify()
        return future

    def wake(self) -> None:
        """Make the thread look at cancelled calls."""
        with self._changed:
            self._changed.notify()

    def add_lane(self, lane: Lane) -> None:
        """Let a lane take part."""
        with self._changed:
            self._lanes.append(lane)

    def remove_lane(self, lane: Lane) -> Future[None]:
        """Forget a lane; what still runs there (calls that were given up) ends. Done when nothing here refers to it."""
        last = [lane]

        def drop() -> None:
            gone = last.pop()  # a lane in the closure would outlive the future, and with it a copy of the model
            gone.fail_all(EngineError("the adapter was unloaded while the request ran"))
            with self._changed:
                if gone in self._lanes:
                    self._lanes.remove(gone)

        return self.run(drop)

    def close(self, *, drain: bool, timeout_s: float) -> bool:
        """End the thread, after the queued work when ``drain``. False when it did not end in time."""
        with self._changed:
            self._closing, self._draining = True, drain
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _refuse_when_closed(self) -> None:
        if not self.alive:
            raise EngineError(f"the embedded engine is not running{f': {self.last_error}' if self.last_error else ''}")

    def _queued(self) -> int:
        return sum(len(rows) for _, rows in self._arrived) + sum(len(lane.waiting) for lane in self._lanes)

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        reason = "the engine was closed while the request ran"
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:
            _log.exception("the decode thread ended")
            reason = self.last_error = f"the decode thread ended: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(EngineError(reason))

    def _turn(self) -> bool:
        """Wait for work, do one round; False when the thread should end."""
        with self._changed:
            while not (self._commands or self._arrived or self._closing or any(lane.has_work for lane in self._lanes)):
                self._changed.wait()
            if self._closing and not self._draining:
                return False
            commands = list(self._commands)
            self._commands.clear()
            for lane, rows in self._arrived:
                lane.waiting.extend(rows)
            self._arrived.clear()
            lanes = [lane for lane in self._lanes if lane.has_work]
            if self._closing and not lanes and not commands:
                return False
        for command in commands:
            command()
        for lane in lanes:
            self._step(lane)
            self._flush()
        self._flush()
        return True

    def _step(self, lane: Lane) -> None:
        try:
            lane.step()
        except Exception as error:  # noqa: BLE001 - whatever the model raises fails this batch and no other
            _log.exception("the model failed while it computed a batch")
            self.last_error = f"{type(error).__name__}: {error}"
            lane.fail_running(EngineError(f"the model failed while it computed this batch: {self.last_error}"))

    def _flush(self) -> None:
        """Deliver what was posted: one wake-up an event loop."""
        posted, self.outbox = self.outbox, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, _Item]]] = {}
        for mailbox, item in posted:
            by_loop.setdefault(mailbox.loop, []).append((mailbox, item))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:
                continue  # that loop has closed: nobody waits for these any more

    def _end(self, error: EngineError) -> None:
        with self._changed:
            self._closing = True
            for lane, rows in self._arrived:
                lane.waiting.extend(rows)
            self._arrived.clear()
            commands = list(self._commands)
            self._commands.clear()
        for lane in self._lanes:
            lane.fail_all(error)
        for command in commands:
            command()
        self._flush()


def _deliver(items: list[tuple[Mailbox, _Item]]) -> None:
    for mailbox, item in items:
        mailbox.deliver(item)
