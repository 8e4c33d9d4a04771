"""Where a supervised server listens: a Unix socket in a folder that nobody else can enter.

Not a port of loopback: vLLM's key guards only part of its routes, any user of the machine can connect to a port, and
while the server is away any of their programs can listen there and be sent what was meant for it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

_LONGEST = 100
"""Characters; the kernel takes a path of 107."""


@contextlib.contextmanager
def socket_path(name: str) -> Generator[Path]:
    """The path of a socket for a server of that name, for the length of a block."""
    # The data directory may lie too deep for the kernel; a folder for temporary files seldom does.
    root = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir=root if len(root) + len(name) < _LONGEST - 30 else "/tmp"))  # noqa: S108 - mkdtemp makes it, for the owner alone
    try:
        yield folder / f"{name}.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
