"""What the machine has to give."""

from __future__ import annotations

from pathlib import Path


def available_memory_bytes() -> int | None:
    """Memory that can be taken now: the smaller of the system's and the control group's; None when unknown."""
    candidates: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        candidates.extend(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
            candidates.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # not Linux, or no control group: what was found so far counts
    return min(candidates, default=None)
