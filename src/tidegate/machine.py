"""What the machine has to give."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Memory that can be taken now: the least of the system's and the control groups' around this process.

    Args:
        proc: where the kernel tells of processes.
        cgroups: where version 2 of its control groups is mounted.

    Returns:
        Bytes, cached files that the kernel would give up included; None when nothing is known.
    """
    candidates = [_left_of_group(folder) for folder in _groups(proc, cgroups)]
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        candidates.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        pass  # not Linux
    return min((found for found in candidates if found is not None), default=None)


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """The process's own control group and all above it: each may set a limit; the root where its own is unknown."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return [cgroups]
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    folder = cgroups / own
    if ".." in folder.parts or not folder.is_dir():  # the group lies outside of what is mounted here
        return [cgroups]
    return [folder, *(above for above in folder.parents if above.is_relative_to(cgroups))]


def _left_of_group(folder: Path) -> int | None:
    """What a control group's limit leaves; None without a limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        return max(0, int(limit) - used + _inactive_file(folder))
    except (OSError, ValueError):
        return None  # another version of control groups, or the root, which has no limit


def _inactive_file(folder: Path) -> int:
    """Cached files that nothing has used for a while: counted as used, given up before anything is refused."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError, IndexError):
        return 0
