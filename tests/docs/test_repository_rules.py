"""Rules that hold for every file of the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from repository import ROOT, tracked_files

MAX_LINES = 400

# Written in pieces, so that this file does not break its own rule.
_MACHINE_PATH = re.compile("(?<![\\w.])/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "tm" + "p")) + ")/[a-z]")
_HOSTS = (
    "py" + "pi.org",
    "python" + "hosted.org",
    "npm" + "js.org",
    "npm" + "js.com",
    "py" + "torch.org/whl",
    "deb" + "ian.org",
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_files() -> list[Path]:
    return [path for path in tracked_files() if b"\0" not in path.read_bytes()[:8192]]


@pytest.mark.parametrize("path", [p for p in tracked_files() if p.suffix == ".toml"], ids=relative)
def test_every_toml_loads(path: Path) -> None:
    assert tomllib.loads(path.read_text(encoding="utf-8"))


def test_no_file_names_a_path_of_some_machine() -> None:
    named = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _MACHINE_PATH.search(line)
    ]
    assert named == []


def test_no_file_names_the_host_of_a_registry() -> None:
    named = [
        f"{relative(path)}: {host}"
        for path in text_files()
        for host in _HOSTS
        if host in path.read_text(encoding="utf-8")
    ]
    assert named == []


def test_names_of_test_files_are_unique() -> None:
    names = Counter(
        path.name for path in tracked_files() if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"
    )
    assert [name for name, count in names.items() if count > 1 and name not in ("__init__.py", "conftest.py")] == []


def test_no_source_file_is_too_long_to_read() -> None:
    sources = [path for path in tracked_files() if path.is_relative_to(ROOT / "src") and path.suffix == ".py"]
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_constraints_pin_one_version_a_line_in_order() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [line.partition("==")[0].lower() for line in lines]
    assert names == sorted(names)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # no local version: +cpu exists only locally
    assert "torch==2.13.0" in lines


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "--keep-going", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "html")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").is_file()
