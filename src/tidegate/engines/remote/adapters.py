"""Adapters in a server outside this process: checked here before it reads them, counted while they are used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field

from tidegate.artifacts import adapter_base, adapter_hash
from tidegate.core.errors import AdapterError
from tidegate.core.types import AdapterRef


def check_adapter(ref: AdapterRef, *, base_sha256: str) -> None:
    """Whether the files are those of ``ref`` and belong to the base; reads all of them.

    Raises:
        AdapterError: they are not, or do not.
    """
    found = adapter_hash(ref.path)
    if found != ref.sha256:
        raise AdapterError(
            f"adapter {ref.name!r} in {str(ref.path)!r} hashes to {found}, expected {ref.sha256}: "
            "its files are not those that were released; restore them or release it anew"
        )
    base = adapter_base(ref.path)
    if base != base_sha256:
        raise AdapterError(
            f"adapter {ref.name!r} was trained on base {base}, this engine serves base {base_sha256}; "
            "serve the base that it belongs to, or train it on this one"
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    ref: AdapterRef
    users: int = 0
    leaving: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterTable:
    """The adapters that this process has loaded. Everything happens on the event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def refs(self) -> tuple[AdapterRef, ...]:
        """Those that can be named now, by name."""
        return tuple(entry.ref for _, entry in sorted(self._entries.items()) if not entry.leaving)

    def ref(self, name: str) -> AdapterRef:
        """The reference that was loaded under ``name``.

        Raises:
            AdapterError: it is not loaded.
        """
        return self._named(name).ref

    def known(self, ref: AdapterRef) -> bool:
        """Whether exactly this adapter is loaded; one that is leaving stays.

        Raises:
            AdapterError: the name is taken by other content.
        """
        entry = self._entries.get(ref.name)
        if entry is None:
            return False
        if entry.ref.sha256 != ref.sha256:
            raise AdapterError(
                f"adapter name {ref.name!r} is taken by content {entry.ref.sha256}, not {ref.sha256}; "
                "names are never reused: load it under a name of its own"
            )
        entry.leaving = False
        entry.changed.set()
        return True

    def add(self, ref: AdapterRef) -> None:
        """Make an adapter nameable."""
        self._entries[ref.name] = _Entry(ref=ref)

    async def drained(self, name: str) -> bool:
        """Stop new uses at once and wait for the running ones; False when it is wanted again, or was never known."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        entry.leaving = True
        while entry.leaving and entry.users:
            entry.changed.clear()
            await entry.changed.wait()
        return entry.leaving and self._entries.get(name) is entry

    def keep(self, name: str) -> None:
        """Take a drained adapter back: it could not be unloaded."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.leaving = False

    def forget(self, name: str) -> None:
        """Drop a drained adapter."""
        self._entries.pop(name, None)

    @contextlib.contextmanager
    def holding(self, name: str | None) -> Generator[None]:
        """Count a use of an adapter: it is not unloaded meanwhile. None is the base, which always stays.

        Raises:
            AdapterError: the adapter is not loaded.
        """
        if name is None:
            yield
            return
        entry = self._named(name)
        entry.users += 1
        try:
            yield
        finally:
            entry.users -= 1
            entry.changed.set()

    def _named(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None or entry.leaving:
            loaded = [ref.name for ref in self.refs()]
            raise AdapterError(f"adapter {name!r} is not loaded; loaded are {loaded} and the base (None)")
        return entry
