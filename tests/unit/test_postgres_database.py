"""Opening a PostgreSQL database: what is made, what is refused, and what every fault is called."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from postgres_world import PASSWORD, QUOTED, Server, name_of, running_postgres
from store_samples import interaction
from tidegate.app.layout import DataDirectory
from tidegate.app.stores import open_stores, reader_of_sealed
from tidegate.config import Settings
from tidegate.core.audit import verify_chain
from tidegate.core.errors import ConfigError, RequestError, SchemaVersionError, StoreError
from tidegate.core.types import Split
from tidegate.stores.audit import append_record
from tidegate.stores.schema import REVISION, metadata
from tidegate.stores.sql import PostgresAddress, SqlAuditLog, SqlDatabase, SqlTrajectoryStore, can_read

TWICE = """
INSERT INTO audit_records
SELECT seq + 1, hash, time, kind, body, hash FROM audit_records, generate_series(1, 2) WHERE seq = 3
"""
OVER = """
INSERT INTO audit_records SELECT 3, hash, time, kind, body, hash FROM audit_records WHERE seq = 2
ON CONFLICT (seq) DO UPDATE SET body = '{}'
"""


@pytest.fixture
def where(postgres: Server) -> PostgresAddress:
    return postgres.fresh()


def make(where: PostgresAddress, *ids: str) -> None:
    with SqlDatabase.open(where) as database:
        SqlTrajectoryStore(database).append_interactions([interaction(id_) for id_ in ids])


def shown(connection: sa.Connection, *names: str) -> dict[str, str]:
    return {name: connection.exec_driver_sql(f"SHOW {name}").scalar_one() for name in names}


def test_sessions_flush_wait_for_writers_and_give_up_in_time(where: PostgresAddress):
    with SqlDatabase.open(where, busy_timeout_s=3.0) as database:
        with database.read("read") as connection:
            reading = shown(connection, "transaction_isolation", "transaction_read_only", "lock_timeout", "fsync")
            assert shown(connection, "idle_in_transaction_session_timeout", "application_name") == {
                "idle_in_transaction_session_timeout": "1min",
                "application_name": "tidegate",
            }
        with database.write("written to") as connection:
            writing = shown(connection, "transaction_isolation", "transaction_read_only", "synchronous_commit")
        database.check()
    assert reading == {
        "transaction_isolation": "repeatable read",
        "transaction_read_only": "on",
        "lock_timeout": "3s",
        "fsync": "on",
    }
    assert writing == {
        "transaction_isolation": "read committed",
        "transaction_read_only": "off",
        "synchronous_commit": "on",
    }


def test_a_session_that_would_not_wait_for_the_disk_is_made_to(postgres: Server, where: PostgresAddress):
    postgres.execute(f"ALTER ROLE {name_of(where)} SET synchronous_commit = off")
    with SqlDatabase.open(where) as database, database.read("read") as connection:
        assert shown(connection, "synchronous_commit") == {"synchronous_commit": "on"}


def test_a_session_that_would_round_times_is_made_to_read_them_whole(postgres: Server, where: PostgresAddress):
    postgres.execute(f"ALTER ROLE {name_of(where)} SET extra_float_digits = 0")
    written = interaction(at=1700000000.1234567, latency_s=0.1 + 0.2)
    with SqlDatabase.open(where) as database:
        SqlTrajectoryStore(database).append_interactions([written])
        assert SqlTrajectoryStore(database).get_interaction("i1") == written
        log = SqlAuditLog(database)
        appended = [log.append("note", {"n": n}, time=1700000000.1234567 + n) for n in range(3)]
        assert list(log.read()) == appended
        assert verify_chain(log.read()) == 3


def test_what_was_written_is_there_after_reopening(where: PostgresAddress):
    assert not SqlDatabase.is_made(where)
    make(where, "i1")
    assert SqlDatabase.is_made(where)
    with SqlDatabase.open(where, create=False) as database:
        assert SqlTrajectoryStore(database).get_interaction("i1") == interaction("i1")


def test_the_migrated_schema_is_the_declared_schema(where: PostgresAddress):
    with SqlDatabase.open(where) as database, database.read("read") as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert [d for d in compare_metadata(context, metadata) if "alembic_version" not in str(d)] == []
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one() == REVISION
        query = """
            SELECT c.table_name, c.column_name, c.collation_name FROM information_schema.columns c
            WHERE c.table_schema = 'public' AND c.data_type = 'text' AND c.collation_name IS DISTINCT FROM 'C'
        """
        assert connection.exec_driver_sql(query).all() == [], "text is ordered by code points whatever the locale"
        waiting = "SELECT indexdef FROM pg_indexes WHERE indexname LIKE 'ix_feedback_waiting%%'"
        assert all("WHERE (state = 'unmatched'" in row[0] for row in connection.exec_driver_sql(waiting))


def test_an_empty_database_is_filled_only_when_one_may_be_made(where: PostgresAddress):
    with pytest.raises(StoreError, match="is empty; 'tidegate serve' makes its tables"):
        SqlDatabase.open(where, create=False)
    assert not SqlDatabase.is_made(where)


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda url: url.replace("@/t", "@/absent_t"), 'database "absent_t.*does not exist'),
        (lambda url: url.replace("host=/", "host=/absent/"), "cannot be reached"),
        (lambda url: url.replace("://t", "://stranger_t"), "password authentication failed"),
    ],
    ids=["database", "server", "user"],
)
def test_what_cannot_be_connected_to_is_named_without_its_password(
    where: PostgresAddress, change: Callable[[str], str], words: str
):
    url = change(where.url)
    user = url.partition("://")[2].partition("@")[0]
    for address in (
        PostgresAddress(url=url, password=PASSWORD),
        PostgresAddress(url=url.replace("@/", f":{QUOTED}@/", 1)),
    ):
        with pytest.raises(StoreError, match=words) as caught:
            SqlDatabase.open(address)
        assert f"postgresql://{user}" in str(caught.value)
        told = whole_text(caught.value) + repr(address)
        assert (PASSWORD in told, QUOTED in told) == (False, False)


def test_a_url_that_libpq_does_not_read_is_told_without_its_password():
    address = PostgresAddress(url="postgresql://u:hush%zz@host/db")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        SqlDatabase.open(address)
    assert "hush" not in whole_text(caught.value)


def test_a_password_in_the_url_is_used(where: PostgresAddress):
    make(PostgresAddress(url=where.url.replace("@/", f":{QUOTED}@/", 1)), "i1")
    assert SqlDatabase.is_made(where)


def test_somebody_elses_database_is_refused_and_left_as_it_is(postgres: Server, where: PostgresAddress):
    postgres.execute("CREATE TABLE public.recipes (id int)", database=name_of(where))
    with pytest.raises(StoreError, match=r"not one of Tidegate's \(tables: \['recipes'\]\)"):
        SqlDatabase.open(where)
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    assert postgres.execute(tables, database=name_of(where)) == [("recipes",)]


@pytest.mark.parametrize("revision", ["0999", None])
def test_a_database_of_another_version_names_both_revisions(
    postgres: Server, where: PostgresAddress, revision: str | None
):
    make(where, "i1")
    change = "DELETE FROM alembic_version" if revision is None else "UPDATE alembic_version SET version_num = '0999'"
    postgres.execute(change, database=name_of(where))
    with pytest.raises(SchemaVersionError, match=rf"{revision!r}.*up to {REVISION!r}.*run the version that wrote it"):
        SqlDatabase.open(where)
    rows = postgres.execute("SELECT version_num FROM alembic_version", database=name_of(where))
    assert rows == ([] if revision is None else [("0999",)])


def test_the_role_is_fixed_at_creation(where: PostgresAddress):
    make(where)
    with pytest.raises(StoreError, match="has the role 'open' and is opened as 'sealed'"):
        SqlDatabase.open(where, role="sealed")


def test_two_schemas_of_one_database_are_two_places_with_a_lock_each(postgres: Server, where: PostgresAddress):
    name = name_of(where)
    postgres.execute(
        *(f"CREATE SCHEMA {schema} AUTHORIZATION {name}" for schema in ("open", '"Sealed 1"')), database=name
    )
    places = {
        "open": f"{where.url}&options=-csearch_path%3Dopen",
        "sealed": f"{where.url}&options=-csearch_path%3D%22Sealed%5C%201%22",
    }
    one, two = (PostgresAddress(url=url, password=PASSWORD) for url in places.values())
    with SqlDatabase.open(one) as first, SqlDatabase.open(two, role="sealed", busy_timeout_s=0.1) as second:
        with first.write("written to") as connection:
            append_record(connection, "note", {}, time=1.0)
            SqlTrajectoryStore(second).append_interactions([interaction(split=Split.SEALED)])
        assert verify_chain(SqlAuditLog(first).read()) == 1
        assert SqlTrajectoryStore(first).get_interaction("i1") is None


def test_a_database_without_a_schema_for_this_user_is_told(postgres: Server, where: PostgresAddress):
    postgres.execute("DROP SCHEMA public", database=name_of(where))
    with pytest.raises(StoreError, match="CREATE SCHEMA"):
        SqlDatabase.open(where)


def test_a_user_without_rights_is_told(postgres: Server, where: PostgresAddress):
    other = postgres.fresh()
    postgres.execute(f"GRANT CONNECT ON DATABASE {name_of(where)} TO {name_of(other)}")
    make(where)
    stranger = PostgresAddress(url=where.url.replace(f"://{name_of(where)}", f"://{name_of(other)}"), password=PASSWORD)
    with pytest.raises(StoreError, match="access is denied"):
        SqlDatabase.open(stranger)


def test_who_may_read_another_database_is_found_out(postgres: Server, where: PostgresAddress):
    make(where)
    other = postgres.fresh()
    assert can_read(where, by=where)
    assert not can_read(where, by=other)
    postgres.execute(f"GRANT CONNECT ON DATABASE {name_of(where)} TO {name_of(other)}")
    assert not can_read(where, by=other)
    postgres.execute(f"GRANT SELECT ON interactions TO {name_of(other)}", database=name_of(where))
    assert can_read(where, by=other)
    assert not can_read(where, by=PostgresAddress(url=other.url, password="another"))


@pytest.mark.parametrize(
    "grants",
    [
        ["GRANT SELECT ON feedback TO {other}"],
        ["GRANT SELECT (messages) ON interactions TO {other}"],
        ["GRANT SELECT ON interactions TO PUBLIC"],
        ["GRANT {owner} TO {other}"],
        ["ALTER ROLE {other} NOINHERIT", "GRANT {owner} TO {other}"],
        ["ALTER ROLE {other} NOINHERIT", "GRANT pg_read_all_data TO {other}"],
        ["ALTER SCHEMA public OWNER TO {other}"],
    ],
)
def test_every_way_to_read_another_database_is_found(postgres: Server, where: PostgresAddress, grants: list[str]):
    make(where)
    other = postgres.fresh()
    names = {"owner": name_of(where), "other": name_of(other)}
    postgres.execute(f"GRANT CONNECT ON DATABASE {names['owner']} TO {names['other']}")
    assert not can_read(where, by=other)
    postgres.execute(*(grant.format(**names) for grant in grants), database=names["owner"])
    assert can_read(where, by=other)


def test_a_user_that_finds_no_free_connection_is_not_taken_for_one_that_is_shut_out(
    postgres: Server, where: PostgresAddress
):
    make(where)
    other = postgres.fresh()
    owner, reader = name_of(where), name_of(other)
    postgres.execute(f"ALTER DATABASE {owner} CONNECTION LIMIT 1", f"ALTER ROLE {reader} CONNECTION LIMIT 0")
    assert not can_read(where, by=other), "it has no right to connect, however many may"
    postgres.execute(f"GRANT CONNECT ON DATABASE {owner} TO {reader}")
    with pytest.raises(StoreError, match=rf"{owner}.* could not be asked: .*too many connections") as caught:
        can_read(where, by=other)
    assert PASSWORD not in whole_text(caught.value)
    postgres.execute(f"ALTER DATABASE {owner} CONNECTION LIMIT -1", f"ALTER ROLE {reader} NOLOGIN")
    assert not can_read(where, by=other)


def test_that_a_reader_could_not_be_asked_for_is_a_warning(postgres: Server, tmp_path: Path):
    database = postgres.pair()
    assert database.url is not None
    assert database.sealed_url is not None
    user, sealed = (
        url.get_secret_value().partition("@/")[2].partition("?")[0] for url in (database.url, database.sealed_url)
    )
    directory = DataDirectory.of(Settings(data_dir=tmp_path, database=database))
    assert reader_of_sealed(directory) is None
    postgres.execute(f"GRANT CONNECT ON DATABASE {sealed} TO {user}", f"ALTER ROLE {user} CONNECTION LIMIT 0")
    told = reader_of_sealed(directory)
    assert told is not None
    assert "can read the sealed database is unknown: " in told
    assert "could not be asked" in told
    assert PASSWORD not in told


def test_sqlite_files_of_the_same_directory_are_not_passed_over(postgres: Server, tmp_path: Path):
    with open_stores(DataDirectory(root=tmp_path).create()):
        pass
    directory = DataDirectory(root=tmp_path, database=postgres.pair())
    with (
        pytest.raises(ConfigError, match=r"holds tidegate\.db and sealed\.db: what lies there"),
        open_stores(directory),
    ):
        pass
    for name in ("tidegate.db", "sealed.db"):
        (tmp_path / name).rename(tmp_path / f"{name}.old")
    with open_stores(directory):
        pass


def test_text_of_another_encoding_is_refused(postgres: Server):
    with pytest.raises(StoreError, match="has the encoding 'LATIN1'; make one with ENCODING 'UTF8'"):
        SqlDatabase.open(postgres.fresh("ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'"))


def test_a_server_that_does_not_flush_is_refused():
    with running_postgres() as server:  # of its own: a stop writes out what all tests before have made
        where = server.fresh()
        make(where)
        server.stop()
        server.start("-F")
        with pytest.raises(StoreError, match="fsync = off: a power cut would lose records"):
            SqlDatabase.open(where)


def test_a_read_only_database_is_reported_when_it_is_opened_and_when_it_becomes_so(
    postgres: Server, where: PostgresAddress
):
    name = name_of(where)
    with SqlDatabase.open(where) as database:
        store = SqlTrajectoryStore(database)
        store.append_interactions([interaction("i1")])
        postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        with pytest.raises(StoreError, match="it is read-only"):
            store.append_interactions([interaction("i2")])
        assert store.get_interaction("i1") is not None
        with pytest.raises(StoreError, match="it is read-only"):
            SqlDatabase.open(where)
        postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = off")
        postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        assert store.append_interactions([interaction("i2")]) == 1


def test_a_writer_that_waits_too_long_says_so_and_readers_never_wait(where: PostgresAddress):
    with SqlDatabase.open(where, busy_timeout_s=0.05) as database, SqlDatabase.open(where) as other:
        store = SqlTrajectoryStore(database)
        with other.write("written to") as connection:
            append_record(connection, "note", {}, time=1.0)
            with pytest.raises(StoreError, match="another process held its write lock"):
                store.append_interactions([interaction()])
            assert store.get_interaction("i1") is None
            assert list(SqlAuditLog(database).read()) == [], "what is not committed is not seen"
        assert store.append_interactions([interaction()]) == 1


def test_many_may_make_the_same_database_at_the_same_moment(postgres: Server):
    barrier = threading.Barrier(4)

    def open_one(address: PostgresAddress) -> None:
        barrier.wait()
        SqlDatabase.open(address, busy_timeout_s=60.0).close()

    with ThreadPoolExecutor(barrier.parties) as pool:
        for _ in range(2):
            address = postgres.fresh()
            for done in [pool.submit(open_one, address) for _ in range(barrier.parties)]:
                done.result()


def test_a_value_that_is_too_large_for_an_index_is_the_requests_fault(where: PostgresAddress):
    long = random.Random(1).randbytes(20_000).hex()
    with SqlDatabase.open(where) as database:
        store = SqlTrajectoryStore(database)
        with pytest.raises(RequestError, match="too large"):
            store.append_interactions([interaction("good"), interaction(long)])
        assert store.list_episodes(splits=[Split.TRAIN]) == []


def test_a_transaction_that_fails_leaves_nothing(where: PostgresAddress):
    with SqlDatabase.open(where) as database:

        def fail_half_way() -> None:
            with database.write("written to") as connection:
                append_record(connection, "note", {}, time=1.0)
                raise RuntimeError("half-way")

        with pytest.raises(RuntimeError, match="half-way"):
            fail_half_way()
        assert list(SqlAuditLog(database).read()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_records SET body = '{}' WHERE seq = 2",
        "DELETE FROM audit_records WHERE seq = 3",
        "TRUNCATE audit_records CASCADE",
        "INSERT INTO audit_records SELECT 4, prev_hash, time, kind, body, hash FROM audit_records WHERE seq = 3",
        "INSERT INTO audit_records SELECT 5, hash, time, kind, body, hash FROM audit_records WHERE seq = 3",
        TWICE,
        OVER,
    ],
)
def test_the_database_itself_refuses_to_change_the_audit_log(where: PostgresAddress, statement: str):
    with SqlDatabase.open(where) as database:
        log = SqlAuditLog(database)
        for n in range(3):
            log.append("note", {"n": n}, time=float(n))
        with pytest.raises(StoreError, match=r"append-only|one chain"), database.write("written to") as connection:
            connection.exec_driver_sql(statement)
        assert verify_chain(log.read()) == 3


def test_two_that_append_without_our_lock_do_not_fork_the_chain(where: PostgresAddress):
    """Whoever writes by hand meets the primary key first, since both records have the next number, then the trigger."""
    insert = "INSERT INTO audit_records SELECT seq + 1, hash, time, kind, body, hash FROM audit_records WHERE seq = 1"
    with SqlDatabase.open(where) as database:
        SqlAuditLog(database).append("note", {}, time=1.0)
    with (
        psycopg.connect(where.url, password=where.password) as one,
        psycopg.connect(where.url, password=where.password) as two,
    ):
        one.execute(insert)
        two.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            two.execute(insert)
        one.commit()
        two.rollback()
        with pytest.raises(psycopg.errors.RaiseException, match="one chain"):
            two.execute(insert)
