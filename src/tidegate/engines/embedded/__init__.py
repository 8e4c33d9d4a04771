"""The embedded engine. Importing this package imports no torch; using :class:`EmbeddedEngine` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]


def __getattr__(name: str) -> Any:
    if name != "EmbeddedEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidegate.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415 - torch is imported here

    return EmbeddedEngine
