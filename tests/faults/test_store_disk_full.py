"""A full disk: a clear error, and everything that was acknowledged before is intact."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store_samples import interaction
from tidegate.core.errors import StoreError
from tidegate.core.types import Split
from tidegate.stores.sql import SqlDatabase, SqlTrajectoryStore

BLOB = "x" * 20_000

LIMITED = """
import resource, sys
from pathlib import Path
from store_samples import interaction
from tidegate.core.errors import StoreError
from tidegate.stores.sql import SqlDatabase, SqlTrajectoryStore

with SqlDatabase.open(Path(sys.argv[1])) as database:
    store = SqlTrajectoryStore(database)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, 800_000))
    for n in range(1000):
        try:
            store.append_interactions(
                [interaction(f"i{n}", messages=({"role": "user", "content": "x" * 20_000},))]
            )
        except StoreError as error:
            print(error)
            break
        print(f"i{n}", flush=True)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(tmp_path)],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("mounting a small file system needs root; the test with a file size limit runs everywhere")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)  # noqa: S607


def fill(store: SqlTrajectoryStore) -> tuple[list[str], StoreError]:
    stored: list[str] = []
    for n in range(1000):
        try:
            store.append_interactions([interaction(f"i{n}", messages=({"role": "user", "content": BLOB},))])
        except StoreError as error:
            return stored, error
        stored.append(f"i{n}")
    raise AssertionError("the disk never filled up")


def test_a_full_disk_is_named_and_loses_nothing(small_disk: Path):
    path = small_disk / "tidegate.db"
    with SqlDatabase.open(path) as database:
        store = SqlTrajectoryStore(database)
        stored, error = fill(store)
        assert len(stored) > 5
        assert str(path) in str(error)
        assert "full" in str(error)
        assert [store.get_interaction(id_) is not None for id_ in stored] == [True] * len(stored)
    with SqlDatabase.open(path, create=False) as database:
        database.check()
        found = SqlTrajectoryStore(database).list_episodes(splits=[Split.TRAIN])
        assert {record.id for episode in found for record in episode.interactions} == set(stored)


def test_making_a_database_on_a_full_disk_is_an_error_and_works_when_there_is_room(small_disk: Path):
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb") as file:
        file.write(bytes(4 << 20))
    with pytest.raises(StoreError, match="full"):
        SqlDatabase.open(small_disk / "tidegate.db")
    ballast.unlink()
    with SqlDatabase.open(small_disk / "tidegate.db") as database:
        assert SqlTrajectoryStore(database).append_interactions([interaction()]) == 1


def test_a_file_size_limit_is_an_error_and_loses_nothing(tmp_path: Path):
    path = tmp_path / "tidegate.db"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    *stored, error = ended.stdout.splitlines()
    assert "disk" in error
    with SqlDatabase.open(path, create=False) as database:
        database.check()
        found = SqlTrajectoryStore(database).list_episodes(splits=[Split.TRAIN])
        assert {record.id for episode in found for record in episode.interactions} == set(stored)
        assert len(stored) > 5
