"""Publication is all or nothing, also when the writer is killed or races another."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tidegate.artifacts import directory_published_at, write_atomically

FILES = 4
SIZE_BYTES = 200_000

# Publishes one directory and one file under new content again and again. It tells each point that it reaches and
# goes on when it is told to.
WRITER = """
import json, sys
from pathlib import Path
from tidegate.artifacts import directory_published_at, write_atomically

root, files, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def reached(point):
    print(point, flush=True)
    sys.stdin.readline()

number = 0
while True:
    number += 1
    with directory_published_at(root / f"adapter-{number}") as scratch:
        for index in range(files):
            (scratch / f"part-{index}").write_bytes(bytes([number]) * size)
            if index == files // 2:
                reached("half")
    write_atomically(root / "state.json", json.dumps({"number": number, "pad": "x" * size}).encode())
    reached("done")
"""


@pytest.mark.parametrize("wait_until", ["half", "done"])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_killed_writer_leaves_only_whole_directories_and_files(tmp_path: Path, rounds: int, wait_until: str) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(FILES), str(SIZE_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        finished = 0
        while True:
            point = writer.stdout.readline().strip()
            finished += point == "done"
            if point == wait_until and finished + (point == "half") == rounds:
                break
            print(file=writer.stdin, flush=True)
        if wait_until == "done":
            print(file=writer.stdin, flush=True)  # the kill then meets it somewhere in the next round
        writer.send_signal(signal.SIGKILL)
    directories = [path for path in tmp_path.iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert len(directories) >= finished
    for directory in directories:
        parts = sorted(directory.iterdir())
        assert [part.name for part in parts] == [f"part-{index}" for index in range(FILES)]
        assert len({part.read_bytes() for part in parts}) == 1
        assert all(part.stat().st_size == SIZE_BYTES for part in parts)
    if finished:
        state = json.loads((tmp_path / "state.json").read_text())
        assert state["number"] >= finished
        assert len(state["pad"]) == SIZE_BYTES


def test_nothing_is_published_when_the_block_fails(tmp_path: Path) -> None:
    target = tmp_path / "adapter"

    def write_and_fail() -> None:
        with directory_published_at(target) as scratch:
            (scratch / "half").write_text("written")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_a_published_directory_never_changes(tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    for content in ("first", "second"):
        with directory_published_at(target) as scratch:
            (scratch / "file").write_text(content)
    assert (target / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_nested_directories_are_published_whole(tmp_path: Path) -> None:
    with directory_published_at(tmp_path / "a" / "b") as scratch:
        (scratch / "inner").mkdir()
        (scratch / "inner" / "file").write_text("deep")
    assert (tmp_path / "a" / "b" / "inner" / "file").read_text() == "deep"


def test_writers_that_race_for_one_name_both_succeed(tmp_path: Path) -> None:
    file = tmp_path / "state"
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def publish(number: int) -> None:
        try:
            for turn in range(10):
                barrier.wait()
                write_atomically(file, bytes([number]) * SIZE_BYTES)
                with directory_published_at(tmp_path / f"adapter-{turn}") as scratch:
                    for index in range(FILES):
                        (scratch / f"part-{index}").write_bytes(bytes([number]) * 1000)
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"adapter-{turn}" for turn in range(10)), "state"]
    for turn in range(10):  # each is one writer's, not a mixture
        assert len({part.read_bytes() for part in (tmp_path / f"adapter-{turn}").iterdir()}) == 1
    assert len(set(file.read_bytes())) == 1


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_atomically(file, b"old")
    with pytest.raises(TypeError):
        write_atomically(file, "no bytes")  # type: ignore[arg-type]
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_publication_that_cannot_be_renamed_is_an_error(tmp_path: Path) -> None:
    target = tmp_path / "adapter"

    def publish() -> None:
        with directory_published_at(target):
            target.symlink_to(tmp_path / "nowhere")  # there for a rename, not for a reader

    with pytest.raises(OSError, match="adapter"):
        publish()
    assert list(tmp_path.iterdir()) == [target]
