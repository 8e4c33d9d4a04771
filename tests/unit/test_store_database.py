"""Opening a database: what is made, what is refused, and what every fault is called."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from store_samples import interaction
from tidegate.core.audit import verify_chain
from tidegate.core.errors import RequestError, SchemaVersionError, StoreError
from tidegate.core.types import Split
from tidegate.stores.audit import append_record
from tidegate.stores.schema import REVISION
from tidegate.stores.sql import (
    SqlAuditLog,
    SqlCycleStore,
    SqlDatabase,
    SqlReleaseStore,
    SqlSealedStore,
    SqlTrajectoryStore,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tidegate.db"


def make(path: Path, *ids: str) -> None:
    with SqlDatabase.open(path) as database:
        SqlTrajectoryStore(database).append_interactions([interaction(id_) for id_ in ids])


def test_a_new_database_is_private_durable_and_waits_for_writers(path: Path):
    with SqlDatabase.open(path, busy_timeout_s=3.0) as database:
        assert path.stat().st_mode & 0o777 == 0o600
        with database.read("read") as connection:
            pragmas = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            }
        assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 3000}
        database.check()
    assert [p.name for p in path.parent.iterdir()] == [path.name], "closing folds the log into the file"


def test_what_was_written_is_there_after_reopening(path: Path):
    make(path, "i1")
    with SqlDatabase.open(path, create=False) as database:
        assert SqlTrajectoryStore(database).get_interaction("i1") == interaction("i1")


def test_an_odd_path_is_no_obstacle(tmp_path: Path):
    folder = tmp_path / "50% of #1? ünï"
    folder.mkdir()
    make(folder / "a b.db", "i1")
    assert (folder / "a b.db").exists()


def test_a_missing_file_a_missing_parent_and_a_directory_are_named(tmp_path: Path):
    with pytest.raises(StoreError, match=r"absent\.db' does not exist"):
        SqlDatabase.open(tmp_path / "absent.db", create=False)
    with pytest.raises(StoreError, match=r"its directory does not exist; make '.*nowhere'"):
        SqlDatabase.open(tmp_path / "nowhere" / "tidegate.db")
    with pytest.raises(StoreError, match="is a directory"):
        SqlDatabase.open(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="its directory does not exist"):
        SqlDatabase.open(tmp_path / "file" / "tidegate.db")
    assert not (tmp_path / "absent.db").exists()


def test_an_empty_file_becomes_a_database_only_when_one_may_be_made(path: Path):
    path.touch()
    with pytest.raises(StoreError, match="is empty"):
        SqlDatabase.open(path, create=False)
    make(path, "i1")


@pytest.mark.parametrize("content", [b"hello", b"{}" * 5000, b"SQLite format 3"])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(path: Path, content: bytes):
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is not a SQLite database"):
        SqlDatabase.open(path)
    assert path.read_bytes() == content
    assert len(list(path.parent.iterdir())) == 1


def test_a_damaged_database_is_refused_and_left_as_it_is(path: Path):
    make(path, "i1")
    content = path.read_bytes()
    damaged = content[:16] + b"\xff" * 4000 + content[4016:]
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"damaged|not a SQLite database"):
        SqlDatabase.open(path)
    assert path.read_bytes() == damaged


def test_damage_further_inside_is_found_by_check_and_by_reading(path: Path):
    make(path, *(f"i{n}" for n in range(200)))
    with path.open("r+b") as file:
        file.seek(-20 * 4096, 2)  # the newest rows; what opening reads lies at the beginning
        file.write(b"\xa5" * (20 * 4096))
    with SqlDatabase.open(path) as database:
        with pytest.raises(StoreError, match="damaged"):
            database.check()
        with pytest.raises(StoreError, match="damaged"):
            SqlTrajectoryStore(database).list_episodes(splits=[Split.TRAIN])


def test_somebody_elses_database_is_refused_and_left_as_it_is(path: Path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE recipes (id)")
        other.commit()
    content = path.read_bytes()
    with pytest.raises(StoreError, match=r"not one of Tidegate's \(tables: \['recipes'\]\)"):
        SqlDatabase.open(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("revision", ["0999", "abc", None])
def test_a_database_of_another_version_names_both_revisions_and_is_left_as_it_is(path: Path, revision: str | None):
    make(path, "i1")
    with closing(sqlite3.connect(path)) as other:
        if revision is None:
            other.execute("DELETE FROM alembic_version")
        else:
            other.execute("UPDATE alembic_version SET version_num = ?", [revision])
        other.commit()
    content = path.read_bytes()
    with pytest.raises(SchemaVersionError, match=rf"{revision!r}.*up to '{REVISION}'.*run the version that wrote it"):
        SqlDatabase.open(path)
    assert path.read_bytes() == content


def test_the_role_is_fixed_at_creation(path: Path, tmp_path: Path):
    make(path)
    with pytest.raises(StoreError, match="has the role 'open' and is opened as 'sealed'"):
        SqlDatabase.open(path, role="sealed")
    sealed_path = tmp_path / "sealed.db"
    SqlDatabase.open(sealed_path, role="sealed").close()
    with pytest.raises(StoreError, match="has the role 'sealed' and is opened as 'open'"):
        SqlDatabase.open(sealed_path)


def test_a_store_refuses_a_database_of_the_wrong_role(path: Path, tmp_path: Path):
    with SqlDatabase.open(path) as database, pytest.raises(StoreError, match="the sealed store needs one of 'sealed'"):
        SqlSealedStore(database)
    with SqlDatabase.open(tmp_path / "sealed.db", role="sealed") as sealed:
        for store in (SqlAuditLog, SqlReleaseStore, SqlCycleStore):
            with pytest.raises(StoreError, match="needs one of 'open'"):
                store(sealed)


def test_a_read_only_database_is_reported_when_it_is_opened(path: Path):
    """Under a mount that is read-only, because file modes do not bind a privileged user."""
    make(path, "i1")
    mounted = subprocess.run(
        ["mount", "--bind", "-o", "ro", str(path.parent), str(path.parent)],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        for file in (path, path.parent):
            file.chmod(0o500)
    try:
        with pytest.raises(StoreError, match=r"read-only|cannot be opened|not exist and are accessible"):
            SqlDatabase.open(path)
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(path.parent)], check=True)  # noqa: S607
        else:
            path.parent.chmod(0o700)


def test_a_file_that_goes_away_fails_writers_and_is_used_again_when_it_is_back(path: Path):
    with SqlDatabase.open(path) as database:
        store = SqlTrajectoryStore(database)
        store.append_interactions([interaction("i1")])
        away = path.with_name("away.db")
        path.rename(away)
        with pytest.raises(StoreError, match="deleted or replaced"):
            store.append_interactions([interaction("i2")])
        path.write_bytes(away.read_bytes())
        with pytest.raises(StoreError, match="deleted or replaced"):
            store.append_interactions([interaction("i2")])
        path.unlink()
        away.rename(path)
        assert store.append_interactions([interaction("i2")]) == 1


def test_a_writer_that_waits_too_long_says_so(path: Path):
    with SqlDatabase.open(path, busy_timeout_s=0.01) as database, closing(sqlite3.connect(path)) as other:
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process held its write lock"):
            SqlTrajectoryStore(database).append_interactions([interaction()])
        assert SqlTrajectoryStore(database).get_interaction("i1") is None, "readers never wait for the writer"


def test_many_may_make_the_same_database_at_the_same_moment(tmp_path: Path):
    barrier = threading.Barrier(6)

    def open_one(path: Path) -> None:
        barrier.wait()
        SqlDatabase.open(path).close()

    with ThreadPoolExecutor(barrier.parties) as pool:
        for n in range(4):
            for done in [pool.submit(open_one, tmp_path / f"{n}.db") for _ in range(barrier.parties)]:
                done.result()


def test_making_a_database_waits_for_another_process_that_makes_it(path: Path):
    """SQLite itself reports this lock at once; when the opener comes too late to meet it the test shows nothing."""
    path.touch()
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.2, other.rollback)
        release.start()
        with SqlDatabase.open(path, busy_timeout_s=30.0) as database:
            database.check()
        release.join()


def test_a_value_that_is_too_large_is_the_requests_fault(path: Path):
    with SqlDatabase.open(path) as database, database.read("read") as connection:
        connection.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100)
        with pytest.raises(RequestError, match="too large"), database.mapped("written to"):
            connection.exec_driver_sql("SELECT ?", ("x" * 1000,))


def test_a_transaction_that_fails_leaves_nothing(path: Path):
    with SqlDatabase.open(path) as database:
        log = SqlAuditLog(database)

        def fail_half_way() -> None:
            with database.write("written to") as connection:
                append_record(connection, "note", {}, time=1.0)
                raise RuntimeError("half-way")

        with pytest.raises(RuntimeError, match="half-way"):
            fail_half_way()
        assert list(log.read()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_records SET body = '{}' WHERE seq = 2",
        "DELETE FROM audit_records WHERE seq = 3",
        "INSERT OR REPLACE INTO audit_records SELECT seq, prev_hash, time, kind, '{}', hash FROM audit_records LIMIT 1",
        "INSERT INTO audit_records SELECT 4, prev_hash, time, kind, body, hash FROM audit_records WHERE seq = 3",
        "INSERT INTO audit_records SELECT 5, hash, time, kind, body, hash FROM audit_records WHERE seq = 3",
    ],
)
def test_the_database_itself_refuses_to_change_the_audit_log(path: Path, statement: str):
    with SqlDatabase.open(path) as database:
        log = SqlAuditLog(database)
        for n in range(3):
            log.append("note", {"n": n}, time=float(n))
        with pytest.raises(StoreError, match=r"append-only|one chain"), database.write("written to") as connection:
            connection.exec_driver_sql(statement)
        assert verify_chain(log.read()) == 3


def test_a_log_longer_than_a_page_is_read_in_full(path: Path):
    with SqlDatabase.open(path) as database:
        with database.write("written to") as connection:
            for n in range(1001):
                append_record(connection, "note", {"n": n}, time=float(n))
        assert verify_chain(SqlAuditLog(database).read()) == 1001
        assert len(list(SqlAuditLog(database).read(after_seq=1))) == 1000


def test_a_damaged_row_is_an_error_and_not_a_wrong_record(path: Path):
    make(path, "i1", "i2", "i3")
    with SqlDatabase.open(path) as database:
        store = SqlTrajectoryStore(database)
        with database.write("written to") as connection:
            connection.exec_driver_sql("UPDATE interactions SET choice_tokens = prompt_tokens WHERE id = 'i1'")
            connection.exec_driver_sql("UPDATE interactions SET choices = '[]' WHERE id = 'i2'")
            connection.exec_driver_sql("UPDATE interactions SET messages = '[' WHERE id = 'i3'")
        with pytest.raises(StoreError, match="'i2' holds 3 completion tokens"):
            store.get_interaction("i2")
        with pytest.raises(StoreError, match="JSON value is damaged"):
            store.get_interaction("i3")
