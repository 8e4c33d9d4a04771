"""How much memory is left: the least of the system's and of every control group around the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.machine import available_memory_bytes

GIB = 1 << 30


def system(folder: Path, *, own: str = "0::/outer/inner\n", available: int = 8 * GIB) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(own)
    (cgroups / "outer" / "inner").mkdir(parents=True)
    return proc, cgroups


def group(folder: Path, *, limit: str, used: int, stat: str | None = None) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)


@pytest.mark.parametrize("where", ["", "outer", "outer/inner"])
def test_the_tightest_group_around_the_process_counts(tmp_path: Path, where: str) -> None:
    proc, cgroups = system(tmp_path)
    for folder in ("", "outer", "outer/inner"):
        group(cgroups / folder, limit="max", used=GIB)
    group(cgroups / where, limit=str(4 * GIB), used=GIB)
    assert available_memory_bytes(proc, cgroups) == 3 * GIB


def test_the_system_counts_where_it_has_less(tmp_path: Path) -> None:
    proc, cgroups = system(tmp_path, available=2 * GIB)
    group(cgroups / "outer", limit=str(4 * GIB), used=GIB)
    assert available_memory_bytes(proc, cgroups) == 2 * GIB


def test_cached_files_that_would_be_given_up_are_not_used(tmp_path: Path) -> None:
    proc, cgroups = system(tmp_path)
    group(cgroups / "outer", limit=str(4 * GIB), used=3 * GIB, stat=f"file {3 * GIB}\ninactive_file {2 * GIB}\n")
    assert available_memory_bytes(proc, cgroups) == 3 * GIB
    group(cgroups / "outer", limit=str(4 * GIB), used=5 * GIB, stat="nonsense\n")
    assert available_memory_bytes(proc, cgroups) == 0


@pytest.mark.parametrize("own", ["0::/\n", "4:memory:/old\n", "0::/../elsewhere\n", "0::/not/mounted\n", ""])
def test_the_root_counts_where_the_own_group_is_not_known(tmp_path: Path, own: str) -> None:
    proc, cgroups = system(tmp_path, own=own)
    group(cgroups, limit=str(5 * GIB), used=GIB)
    group(cgroups / "outer" / "inner", limit=str(2 * GIB), used=GIB)
    assert available_memory_bytes(proc, cgroups) == 4 * GIB


def test_nothing_known_is_none(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "no", tmp_path / "where") is None
    proc, cgroups = system(tmp_path)
    assert available_memory_bytes(proc, cgroups) == 8 * GIB
