"""The embedded engine. Importing this package imports no torch; using :class:`EmbeddedEngine` does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]


def __getattr__(name: str) -> Any:
    if name != "EmbeddedEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Threads that wait for each other by spinning take the processor from whoever they wait for as soon as a second
    # process computes: serving beside a cycle was 3 to 10 times slower (docs/decisions/0008). Read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tidegate.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415 - torch is imported here

    return EmbeddedEngine
