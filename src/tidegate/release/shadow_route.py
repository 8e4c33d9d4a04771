"""Where shadow calls go. It stands beside the routing table, so that no request of a user can end up here."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from tidegate.core.shadow import Shadow


class ShadowRoute:
    """A release that is loaded for the shadow.

    Args:
        shadow: what it is called and what it takes.
        adapter: its name in the engine, None the bare base model.
        adapter_sha256: its content, None the bare base model.
    """

    def __init__(self, shadow: Shadow, *, adapter: str | None, adapter_sha256: str | None) -> None:
        self.shadow = shadow
        self.adapter = adapter
        self.adapter_sha256 = adapter_sha256
        self.ended = asyncio.Event()
        """Set for good when the shadow ends; calls that run break off."""
        self.idle = asyncio.Event()
        """Set while no call runs."""
        self.idle.set()
        self._calls = 0

    @property
    def calls(self) -> int:
        """How many calls run."""
        return self._calls

    @contextmanager
    def call(self) -> Generator[None]:
        """Count a call; the adapter is not unloaded meanwhile."""
        self._calls += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self.idle.set()
