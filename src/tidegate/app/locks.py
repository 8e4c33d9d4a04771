"""Locks between processes on one data directory; the system gives them back when a process ends, however it ends."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tidegate.core.errors import ConflictError


def cycle_lock(data_dir: Path) -> Path:
    """Held by the process that runs a cycle."""
    return data_dir / "cycle.lock"


@contextmanager
def exclusive(path: Path, taken: str) -> Generator[None]:
    """Hold a lock file for the length of a block.

    Raises:
        ConflictError: another process holds it; the message begins with ``taken``.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(f"{taken} (lock {str(path)!r}); wait for it to end and try again") from error
        yield
