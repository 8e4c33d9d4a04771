"""The log file of a supervised server, and its last words for error messages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

_TAIL_BYTES = 16 << 10
_TAIL_LINES = 15
_TAIL_CHARACTERS = 2000
_LARGEST_BYTES = 32 << 20


class ServerLog:
    """Appended to by the server, readable by its owner only.

    Args:
        path: the file; the one before it, once it has grown large, lies beside it with ``.1`` appended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def begin(self) -> None:
        """Put a large file aside.

        Raises:
            OSError: the file cannot be written.
        """
        if self._size() > _LARGEST_BYTES:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        with self.opened():
            pass

    def mark(self) -> None:
        """What comes from now on is this start's."""
        self._start = self._size()

    @contextlib.contextmanager
    def opened(self) -> Generator[int]:
        """A handle to append with."""
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            yield handle
        finally:
            os.close(handle)

    def tail(self) -> str:
        """The last lines since :meth:`mark`."""
        lines = self._lines()[-_TAIL_LINES:]
        return "\n".join(lines)[-_TAIL_CHARACTERS:] if lines else "(nothing)"

    def last_line(self) -> str:
        """The last of them."""
        return (self._lines() or ["(no output yet)"])[-1][:200]

    def _lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(max(self._start, self._size() - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return []
        lines = text.replace("\r", "\n").splitlines()  # pip draws its progress over itself
        printable = ("".join(one for one in line if one.isprintable()).rstrip() for line in lines)
        return [line for line in printable if line]

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
