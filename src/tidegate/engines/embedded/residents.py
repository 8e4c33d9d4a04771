"""Which adapters are known, which of them have a merged copy in memory, and who uses them.

Known adapters keep their LoRA tensors, so that a merged copy that had to make room comes back without reading a
file again. Everything here happens on the event loop; only merging runs on a helper thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from tidegate.core.errors import AdapterError, EngineBusyError, EngineError
from tidegate.core.types import AdapterRef
from tidegate.engines.embedded.adapters import LoraWeights
from tidegate.engines.embedded.give_back import give_back_memory
from tidegate.engines.embedded.lane import Lane
from tidegate.engines.embedded.worker import DecodeWorker


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """An adapter that can be named, or the base (``weights`` None). ``lane`` is None while it has no merged copy."""

    weights: LoraWeights | None
    lane: Lane | None = None
    users: int = 0
    last_used: int = 0
    leaving: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str | None:
        """The adapter's name; None for the base."""
        return self.weights.ref.name if self.weights else None


class Residents:
    """The table of adapters.

    Args:
        base: lane of the base model, always resident and not counted.
        max_resident: most merged copies.
        build: makes the lane of an adapter (slow; run on a helper thread).
        worker: runs the lanes.
    """

    def __init__(
        self, *, base: Lane, max_resident: int, build: Callable[[LoraWeights], Lane], worker: DecodeWorker
    ) -> None:
        worker.add_lane(base)
        self._table: dict[str | None, Resident] = {None: Resident(weights=None, lane=base)}
        self._max_resident = max_resident
        self._build = build
        self._worker = worker
        self._ticks = itertools.count(1)
        self._merging = asyncio.Lock()

    def refs(self) -> tuple[AdapterRef, ...]:
        """The adapters that can be named now, by name."""
        named = [entry.weights.ref for entry in self._table.values() if entry.weights and not entry.leaving]
        return tuple(sorted(named, key=lambda ref: ref.name))

    def ref(self, name: str) -> AdapterRef:
        """The reference that was loaded under ``name``.

        Raises:
            AdapterError: it is not loaded.
        """
        entry = self._named(name)
        assert entry.weights is not None  # noqa: S101 - only the base has none, and it has no name
        return entry.weights.ref

    def known(self, ref: AdapterRef) -> bool:
        """Whether exactly this adapter is loaded; one that is leaving stays.

        Raises:
            AdapterError: the name is taken by other content.
        """
        entry = self._table.get(ref.name)
        if entry is None or entry.weights is None:
            return False
        if entry.weights.ref.sha256 != ref.sha256:
            raise AdapterError(
                f"adapter name {ref.name!r} is taken by content {entry.weights.ref.sha256}, not {ref.sha256}; "
                "names are never reused: load it under a name of its own"
            )
        entry.leaving = False
        entry.changed.set()
        return True

    async def add(self, weights: LoraWeights) -> None:
        """Make an adapter known and resident.

        Raises:
            AdapterError: the name is taken by other content.
            EngineBusyError: every resident adapter is in use.
            EngineError: there is no memory for its copy.
        """
        async with self._merging:
            if self.known(weights.ref):
                return
            entry = Resident(weights=weights)
            await self._make_resident(entry)
            self._table[weights.ref.name] = entry

    async def remove(self, name: str) -> None:
        """Stop new uses at once, wait for the running ones, forget. Unknown names are a no-op."""
        entry = self._table.get(name)
        if entry is None:
            return
        entry.leaving = True
        while entry.leaving and entry.users:
            entry.changed.clear()
            await entry.changed.wait()
        if entry.leaving and self._table.get(name) is entry:
            del self._table[name]
            await self._drop_copy(entry)

    @contextlib.contextmanager
    def holding(self, name: str | None) -> Generator[Resident]:
        """Count a use of an adapter: it is neither evicted nor unloaded meanwhile.

        Leaving awaits nothing, so that a generator that is thrown away in any state still lets go.

        Raises:
            AdapterError: the adapter is not loaded.
        """
        entry = self._named(name)
        entry.users += 1
        entry.last_used = next(self._ticks)
        try:
            yield entry
        finally:
            entry.users -= 1
            entry.changed.set()

    async def lane(self, held: Resident) -> Lane:
        """The lane of an adapter that is held; merged again first when it had to make room.

        Raises:
            EngineBusyError: it has no merged copy and every other one is in use.
            EngineError: there is no memory for its copy.
        """
        if held.lane is None:
            async with self._merging:
                if held.lane is None:
                    await self._make_resident(held)
        assert held.lane is not None  # noqa: S101 - _make_resident sets it, and the hold keeps it
        return held.lane

    def _named(self, name: str | None) -> Resident:
        entry = self._table.get(name)
        if entry is None or entry.leaving:
            loaded = [ref.name for ref in self.refs()]
            raise AdapterError(f"adapter {name!r} is not loaded; loaded are {loaded} and the base (None)")
        return entry

    async def _drop_copy(self, entry: Resident) -> None:
        """Free a merged copy, to the system too."""
        if entry.lane is None:
            return
        removed = self._worker.remove_lane(entry.lane)
        entry.lane = None
        await asyncio.wrap_future(removed)
        await asyncio.to_thread(give_back_memory)

    async def _make_resident(self, entry: Resident) -> None:
        """Under ``_merging``."""
        assert entry.weights is not None  # noqa: S101 - the base is resident from the start
        resident = [other for other in self._table.values() if other.weights is not None and other.lane is not None]
        if len(resident) >= self._max_resident:
            idle = [other for other in resident if other.users == 0]
            if not idle:
                names = sorted(str(other.name) for other in resident)
                raise EngineBusyError(
                    f"adapter {entry.name!r} needs room, but all {len(resident)} resident adapters {names} are in use; "
                    "repeat later or raise model.max_resident_adapters"
                )
            await self._drop_copy(min(idle, key=lambda other: other.last_used))
        try:
            lane = await asyncio.to_thread(self._build, entry.weights)
        except (MemoryError, RuntimeError) as error:  # torch reports memory that it cannot have as the latter
            raise EngineError(
                f"adapter {entry.name!r} could not be merged into a copy of the base: {str(error)[:200] or 'none'};"
                " lower model.max_resident_adapters, or give this machine more memory"
            ) from error
        self._worker.add_lane(lane)
        entry.lane = lane
        entry.last_used = next(self._ticks)
