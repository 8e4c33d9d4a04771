"""A process between Tidegate and a server that it starts: the server ends when Tidegate ends, however that happens.

Run by its path, on nothing but the standard library::

    python -I keeper.py --grace-s 10 [--lock FILE] -- COMMAND...

Standard input is a pipe that the starter holds open. Once it closes, because the starter wishes so or is dead (SIGKILL
included), the command gets SIGTERM, and SIGKILL when the grace is over. Everything that the command started ends with
it, in whatever process group or session: orphans fall to this process (PR_SET_CHILD_SUBREAPER), and it goes last.
vLLM needs this: its engine processes outlive an API server that was killed (vllm #55510).

With ``--lock`` the command is not started while another keeper holds that file: two servers would share a name and
the memory of one processor.

Exit status: that of the command, 128 + N after signal N.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ALONE_S = 1.0
"""Processes whose parent has ended have so long to see it, and what they leave in shared memory is tidied up."""
_AGAIN_S = 0.05
_LOCK_AGAIN_S = 0.1


def main(arguments: list[str]) -> int:
    """Keep one command."""
    parser = argparse.ArgumentParser(prog="keeper")
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake = _Wake()
    if options.lock is not None and not _locked(options.lock, wake):
        return 0
    own = os.getpid()
    try:
        child = subprocess.Popen(options.command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _die_with(own))  # noqa: PLW1509 - one thread
    except OSError as error:
        _say(f"{options.command[0]!r} cannot be started: {error.strerror}")
        return 127
    status = _kept(child.pid, wake, grace_s=options.grace_s)
    child.returncode = status  # it has been waited for here
    _end_descendants(own, grace_s=options.grace_s)
    return status if status >= 0 else 128 - status


class _Wake:
    """What the keeper waits for: its input to close, a signal that says stop, a child that ends."""

    def __init__(self) -> None:
        self.stopping = False
        self._reader, writer = os.pipe()
        for handle in (self._reader, writer):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        del number, frame
        self.stopping = True

    def wait(self, timeout_s: float | None) -> None:
        """Until something happened, or for so long."""
        watched = [self._reader] if self.stopping else [self._reader, 0]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if 0 in ready and not os.read(0, 4096):
            self.stopping = True
        if self._reader in ready:
            os.read(self._reader, 4096)


def _locked(path: Path, wake: _Wake) -> bool:
    """Take the lock for the rest of this process; False when asked to stop before it was free."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                _say(f"waiting: another server of this data directory still runs (it holds {str(path)!r})")
                told = True
            wake.wait(_LOCK_AGAIN_S)
            if wake.stopping:
                return False
        else:
            return True


def _kept(pid: int, wake: _Wake, *, grace_s: float) -> int:
    """Wait for the command, and end it when asked to; returns its status as :mod:`subprocess` counts."""
    asked_at: float | None = None
    killed = False
    while (status := _reaped(pid)) is None:
        if wake.stopping and asked_at is None:
            asked_at = time.monotonic()
            os.kill(pid, signal.SIGTERM)
        left = None if asked_at is None else asked_at + grace_s - time.monotonic()
        if left is not None and left <= 0 and not killed:
            _say(f"process {pid} has not ended within {grace_s:g} s of SIGTERM and is killed")
            os.kill(pid, signal.SIGKILL)
            killed = True
        wake.wait(None if left is None or killed else max(0.0, left))
    return status


def _end_descendants(own: int, *, grace_s: float) -> None:
    """End whatever the command has left behind; returns when nothing is left."""
    if _gone(own, within_s=_ALONE_S):
        return
    for pid in _descendants(own):
        _signal(pid, signal.SIGTERM)
    if _gone(own, within_s=grace_s):
        return
    while left := _descendants(own):  # again and again: what is being killed may start others
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(_AGAIN_S)
        _reaped(0)


def _gone(own: int, *, within_s: float) -> bool:
    """Whether all descendants end by themselves within so long."""
    deadline = time.monotonic() + within_s
    while True:
        _reaped(0)
        if not _descendants(own):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_AGAIN_S)


def _reaped(pid: int) -> int | None:
    """Wait for every child that has ended, adopted ones too; the status of ``pid`` if it is among them."""
    found: int | None = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if ended == 0:
            return found
        if ended == pid:
            found = os.waitstatus_to_exitcode(status)


def _descendants(own: int) -> list[int]:
    """Every process below this one, by parents in /proc; ended ones that nobody has waited for are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [own]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _die_with(parent: int) -> None:
    """In the child: end when the keeper ends, were it by SIGKILL."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _say(line: str) -> None:
    print(f"keeper: {line}", file=sys.stderr, flush=True)  # noqa: T201 - standard error is the log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
