"""Durable before done: ``await record(...)`` returns when the record is committed, never before.

One writer thread takes what has piled up while it committed the last batch and commits it in one transaction
(group commit): under load many records share one disk flush, without load nobody waits for company. Answers of a
release in the shadow, which no user waits for, are committed when nothing else is left, in transactions of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tidegate.capture.routing import RecordStore, Stores
from tidegate.core.errors import RequestError, StoreError, TidegateError
from tidegate.core.shadow import ShadowAnswer
from tidegate.core.types import Feedback, Interaction, Split
from tidegate.ports.shadows import ShadowStore

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAX_SHADOW_ANSWERS = 1024  # waiting; nobody is told that one was lost but the metrics
_GIVE_UP_AFTER = 2  # failures in a row that show that the store is away, not that a record is bad


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """One caller that waits on ``loop`` for ``item`` to be committed."""

    item: Interaction | Feedback | ShadowAnswer
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[bool]


class Recorder:
    """Commits interactions and feedback for any number of tasks on any number of event loops.

    A caller that is cancelled while it waits does not take its record back: what was said is still recorded.
    """

    def __init__(
        self,
        open_store: RecordStore,
        sealed_store: RecordStore,
        *,
        shadows: ShadowStore | None = None,
        max_batch: int = 256,
        max_pending: int = 4096,
    ) -> None:
        """Start the writer thread.

        Args:
            open_store: takes the train and dev splits.
            sealed_store: takes the sealed split, and feedback that waits for its record.
            shadows: takes shadow answers; without one they are refused.
            max_batch: most records in one transaction.
            max_pending: most records waiting; beyond it callers get StoreError at once.
        """
        self._stores = Stores(open=open_store, sealed=sealed_store)
        self._shadows = shadows
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._wake = threading.Condition()
        self._pending: deque[_Pending] = deque()
        self._later: deque[_Pending] = deque()
        self._counts: Counter[str] = Counter()
        self._closing = False
        # A daemon: a process that exits without close() must not hang, and nothing acknowledged is in memory only.
        self._thread = threading.Thread(target=self._run, name="tidegate-recorder", daemon=True)
        self._thread.start()

    async def record(self, interaction: Interaction) -> None:
        """Return after ``interaction`` is committed; an id that is known already is fine.

        Raises:
            ConflictError: it names an episode of another user.
            RequestError: it cannot be stored as it is.
            StoreError: the store is away, too much is waiting ("busy"), or the recorder is closed.
        """
        await self._submit(interaction)

    async def record_feedback(self, feedback: Feedback) -> bool:
        """Return after ``feedback`` is committed; False when its id is known already.

        Raises:
            RequestError: it cannot be stored as it is.
            StoreError: the store is away, too much is waiting ("busy"), or the recorder is closed.
        """
        return await self._submit(feedback)

    async def record_shadow(self, answer: ShadowAnswer) -> None:
        """Return after ``answer`` is committed; never before what users wait for.

        Raises:
            RequestError: it cannot be stored as it is, or what it shadows is not stored with the consent of its user.
            StoreError: the store is away, too much is waiting ("busy"), or the recorder is closed.
        """
        if self._shadows is None:
            raise StoreError(f"the shadow answer to {answer.interaction_id!r} has no store; give the recorder one")
        await self._submit(answer)

    async def find(self, interaction_id: str) -> Interaction | None:
        """A committed record by id, whichever store holds it, or None.

        Raises:
            StoreError: a store cannot be read.
        """
        for store in (self._stores.open, self._stores.sealed):
            found = await asyncio.to_thread(store.get_interaction, interaction_id)
            if found is not None:
                return found
        return None

    def counts(self) -> dict[str, int]:
        """How many of what since the start.

        ``recorded``, ``duplicate``, ``feedback``, ``feedback_duplicate``, ``feedback_matched_late``, ``batches``,
        ``shadow`` and, for each lost one, ``shadow_failed.<error code>`` or ``shadow_failed.busy``; failures by
        reason as ``quarantined.<error code>`` (this record only), ``failed.<error code>`` (store away),
        ``failed.busy`` and ``failed.match`` (waiting feedback not moved; tried again later).
        """
        with self._wake:
            return dict(self._counts)

    async def close(self) -> None:
        """Commit what waits, then end the writer thread. Again is a no-op."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        await asyncio.to_thread(self._thread.join)

    async def _submit(self, item: Interaction | Feedback | ShadowAnswer) -> bool:
        loop = asyncio.get_running_loop()
        pending = _Pending(item, loop, loop.create_future())
        shadow = isinstance(item, ShadowAnswer)
        name = item.interaction_id if shadow else item.id
        line, limit = (self._later, _MAX_SHADOW_ANSWERS) if shadow else (self._pending, self._max_pending)
        with self._wake:
            if self._closing:
                raise StoreError(f"{name!r} cannot be recorded: the recorder is closed; the server is stopping")
            if len(line) >= limit:
                self._counts["shadow_failed.busy" if shadow else "failed.busy"] += 1
                raise StoreError(
                    f"{name!r} cannot be recorded: the recorder is busy, {limit} records wait for the disk; "
                    "try again later"
                )
            line.append(pending)
            self._wake.notify()
        return await pending.done

    def _run(self) -> None:
        self._match_waiting(None)
        while True:
            with self._wake:
                while not self._pending and not self._later and not self._closing:
                    self._wake.wait()
                line = self._pending or self._later
                if not line:
                    return
                batch = [line.popleft() for _ in range(min(self._max_batch, len(line)))]
            if line is self._later:
                self._commit_shadows(batch)
            else:
                self._commit(batch)

    def _commit(self, batch: Sequence[_Pending]) -> None:
        self._count("batches")
        for sealed in (False, True):
            group = [p for p in batch if isinstance(p.item, Interaction) and (p.item.split is Split.SEALED) == sealed]
            if group:
                self._commit_interactions(self._stores.store_of(Split.SEALED if sealed else Split.TRAIN), group)
        for pending in batch:
            if isinstance(pending.item, Feedback):
                self._commit_feedback(pending, pending.item)

    def _commit_interactions(self, store: RecordStore, group: Sequence[_Pending]) -> None:
        """All in one transaction; when that fails one by one, so that a bad record fails only its own caller."""
        error = self._append(store, group)
        if error is None:
            return
        if len(group) == 1:
            self._fail(group, error)
            return
        away = 0
        for position, pending in enumerate(group):
            error = self._append(store, [pending])
            if error is None or isinstance(error, RequestError):
                away = 0
            else:
                away += 1
            if error is not None:
                self._fail([pending], error)
            if error is not None and away == _GIVE_UP_AFTER:
                self._fail(group[position + 1 :], error)
                return

    def _append(self, store: RecordStore, group: Sequence[_Pending]) -> TidegateError | None:
        """Commit and acknowledge a group, or say why not."""
        interactions = [p.item for p in group if isinstance(p.item, Interaction)]
        new = _attempt(lambda: store.append_interactions(interactions))
        if isinstance(new, TidegateError):
            return new
        self._count("recorded", new)
        self._count("duplicate", len(group) - new)
        _settle((pending, True) for pending in group)
        if store is self._stores.open:
            self._match_waiting(interactions)
        return None

    def _commit_feedback(self, pending: _Pending, feedback: Feedback) -> None:
        new = _attempt(lambda: self._stores.append_feedback(feedback))
        if isinstance(new, TidegateError):
            self._fail([pending], new)
            return
        self._count("feedback" if new else "feedback_duplicate")
        _settle([(pending, new)])

    def _commit_shadows(self, batch: Sequence[_Pending]) -> None:
        """All in one transaction; when that fails one by one, until the store shows that it is away."""
        error = self._append_shadows(batch)
        if error is None:
            return
        alone = len(batch) == 1
        for position, pending in enumerate(batch):
            failure = error if alone else self._append_shadows([pending])
            if failure is None:
                continue
            lost = [pending] if isinstance(failure, RequestError) else batch[position:]
            self._count(f"shadow_failed.{failure.code}", len(lost))
            _settle((one, type(failure)(str(failure))) for one in lost)
            if len(lost) > 1:
                return

    def _append_shadows(self, batch: Sequence[_Pending]) -> TidegateError | None:
        store = self._shadows
        assert store is not None  # noqa: S101 - record_shadow refuses without one
        new = _attempt(lambda: store.append_shadow_answers([p.item for p in batch if isinstance(p.item, ShadowAnswer)]))
        if isinstance(new, TidegateError):
            return new
        self._count("shadow", new)
        _settle((pending, True) for pending in batch)
        return None

    def _match_waiting(self, interactions: Sequence[Interaction] | None) -> None:
        """Never fails an acknowledged record: what is not moved now is moved at the next start."""
        moved = _attempt(lambda: self._stores.match_waiting(interactions))
        if isinstance(moved, TidegateError):
            self._count("failed.match")
        else:
            self._count("feedback_matched_late", moved)

    def _fail(self, group: Sequence[_Pending], error: TidegateError) -> None:
        kind = "quarantined" if isinstance(error, RequestError) else "failed"
        self._count(f"{kind}.{error.code}", len(group))
        # One exception object each: raising a shared one from many tasks would tangle their tracebacks.
        _settle((pending, error if len(group) == 1 else StoreError(str(error))) for pending in group)

    def _count(self, name: str, by: int = 1) -> None:
        if by:
            with self._wake:
                self._counts[name] += by


def _attempt(call: Callable[[], _T]) -> _T | TidegateError:
    try:
        return call()
    except TidegateError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the boundary: a dead writer would leave every caller waiting for ever
        _log.exception("the store failed unexpectedly")
        failure = StoreError(f"recording failed: {type(error).__name__}: {error}; this is a fault of the store")
        failure.__cause__ = error
        return failure


def _settle(results: Iterable[tuple[_Pending, bool | TidegateError]]) -> None:
    """Wake the callers, once per event loop and not once per record."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[bool], bool | TidegateError]]] = {}
    for pending, result in results:
        by_loop.setdefault(pending.loop, []).append((pending.done, result))
    for loop, settled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(_set_results, settled)


def _set_results(settled: Sequence[tuple[asyncio.Future[bool], bool | TidegateError]]) -> None:
    for future, result in settled:
        if future.done():  # its caller was cancelled
            continue
        if isinstance(result, TidegateError):
            future.set_exception(result)
        else:
            future.set_result(result)
