"""scripts/setup: repeated for free, safe to cut off. pip and Python are a stand-in that notes what it is asked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Makes a .venv whose Python is itself. While the file "block" is there, pip hangs; while "fail" is there, it fails.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    --version) echo "Python 3.99.0" ;;
    "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m ensurepip") ;;
    "-m pip "*)
        echo "$*" >> calls
        [ ! -e fail ] || exit 1
        while [ -e block ]; do : > blocked; sleep 0.02; done ;;
    "-c "*) [ ! -e old ] ;;
    -) cat > /dev/null ;;
    *) exit 99 ;;
esac
"""


class Checkout:
    """A folder with just what scripts/setup reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir()
        for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, root / name)
        self.python = root / "python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / "setup"), *arguments],
            env={**os.environ, "PYTHON": str(self.python)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A suite that runs in the background may have been started with SIGINT ignored, which children inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def setup(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        _, said = process.communicate(timeout=60)
        return process.returncode, said

    def calls(self) -> list[str]:
        """What pip was asked since the last time."""
        file = self.root / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    def switch(self, name: str, *, on: bool) -> None:
        path = self.root / name
        path.touch() if on else path.unlink()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_torch_comes_first_then_everything_pinned(checkout: Checkout) -> None:
    code, said = checkout.setup()
    assert code == 0, said
    torch, rest = checkout.calls()
    assert torch.endswith("-c constraints.txt torch==2.13.0")
    assert rest.endswith("-c constraints.txt -e .[embedded,tasks,dev,docs]")
    assert "torchvision" not in torch + rest
    assert all(line.startswith("setup: ") for line in said.splitlines())


def test_a_second_call_does_nothing_until_a_pin_changes(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    assert checkout.setup() == (0, "")
    assert checkout.calls() == []
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("zzz==1\n")
    checkout.setup()
    assert len(checkout.calls()) == 2


def test_test_holds_all_that_demo_needs_and_not_the_other_way_round(checkout: Checkout) -> None:
    checkout.setup("--profile", "demo")
    assert checkout.calls()[1].endswith("-e .[embedded,tasks]")
    checkout.setup("--profile", "test")
    assert checkout.calls()[1].endswith("-e .[embedded,tasks,dev,docs]")
    checkout.setup("--profile=demo")
    assert checkout.calls() == []


def test_a_moved_checkout_is_set_up_again(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkout.setup()
    moved = tmp_path_factory.mktemp("moved") / "checkout"
    shutil.copytree(checkout.root, moved)
    checkout.root = moved
    checkout.calls()
    checkout.setup()
    assert len(checkout.calls()) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_setup_that_was_cut_off_starts_afresh(checkout: Checkout, number: signal.Signals) -> None:
    checkout.switch("block", on=True)
    process = checkout.start()
    deadline = time.monotonic() + 60
    while not (checkout.root / "blocked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    half_installed = checkout.root / ".venv" / "half-installed"
    half_installed.touch()
    checkout.switch("block", on=False)
    code, said = checkout.setup()
    assert code == 0, said
    assert "cut off" in said
    assert not half_installed.exists()
    assert checkout.setup() == (0, "")


def test_a_failure_of_pip_is_told_and_the_next_call_goes_on(checkout: Checkout) -> None:
    checkout.switch("fail", on=True)
    code, said = checkout.setup()
    assert code == 1
    assert "error: pip could not install torch==2.13.0" in said
    (checkout.root / ".venv" / "kept").touch()
    checkout.switch("fail", on=False)
    assert checkout.setup()[0] == 0
    assert (checkout.root / ".venv" / "kept").exists()


def test_an_old_python_is_refused(checkout: Checkout) -> None:
    checkout.switch("old", on=True)
    code, said = checkout.setup()
    assert code == 1
    assert "older than 3.11" in said
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("arguments", [["--profile", "all"], ["--fast"]])
def test_usage_faults_change_nothing(checkout: Checkout, arguments: list[str]) -> None:
    code, said = checkout.setup(*arguments)
    assert code == 2
    assert "unknown" in said
    assert not (checkout.root / ".venv").exists()
