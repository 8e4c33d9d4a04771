"""Revisions and the tables that the code uses agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from store_samples import TASK, answer, interaction, shadow_answer
from tidegate.core.errors import StoreError
from tidegate.stores.schema import REVISION, metadata
from tidegate.stores.sql import SqlCycleStore, SqlDatabase, SqlSealedStore, SqlShadowStore, SqlTrajectoryStore
from tidegate.stores.upgrade import known_revisions, upgrade

NOUNS = {
    "interactions",
    "episodes",
    "verdicts",
    "feedback",
    "shadow_answers",
    "rewards",
    "batch_manifests",
    "candidates",
    "decisions",
    "releases",
    "aliases",
    "audit_records",
    "cycles",
    "cycle_steps",
    "epochs",
    "epoch_tasks",
    "answers",
}


def test_the_migrated_schema_is_the_declared_schema(tmp_path: Path):
    with SqlDatabase.open(tmp_path / "x.db") as database, database.read("read") as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = [d for d in compare_metadata(context, metadata) if "alembic_version" not in str(d)]
        migrated = _statements(connection)
    assert differences == []
    declared_engine = sa.create_engine("sqlite://")
    with declared_engine.begin() as connection:
        metadata.create_all(connection)
        declared = _statements(connection)
    declared_engine.dispose()
    assert migrated == declared, "names of constraints and partial indexes too"


def test_every_noun_is_a_table():
    assert set(metadata.tables) == NOUNS | {"store_meta"}


def test_the_declared_revision_is_the_newest_one():
    assert known_revisions()[0] == REVISION


def test_upgrading_a_current_database_changes_nothing(tmp_path: Path):
    with SqlDatabase.open(tmp_path / "x.db") as database:
        with database.read("read") as connection:
            before = _statements(connection)
        with database.write("written to") as connection:
            upgrade(connection)
        with database.read("read") as connection:
            assert _statements(connection) == before


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path):
    with SqlDatabase.open(tmp_path / "x.db") as database:
        with database.read("read") as connection:
            before = _statements(connection)
        with database.write("written to") as connection:
            connection.exec_driver_sql("DELETE FROM alembic_version")

        def migrate() -> None:
            with database.write("migrated") as connection:
                connection.exec_driver_sql("CREATE TABLE half_way (id)")
                upgrade(connection)

        # Without its revision the first migration runs into the tables that are there.
        with pytest.raises(StoreError, match="already exists"):
            migrate()
        with database.read("read") as connection:
            assert _statements(connection) == before


def test_a_database_of_the_first_revision_keeps_its_epochs_and_forgets_its_answers(tmp_path: Path):
    with SqlDatabase.open(tmp_path / "new.db", role="sealed") as database, database.read("read") as connection:
        wanted = _statements(connection)
    with SqlDatabase.open(tmp_path / "old.db", role="sealed") as database:
        with database.write("made old") as connection:
            connection.exec_driver_sql("DROP TABLE shadow_answers")
            connection.exec_driver_sql("DROP TABLE answers")
            connection.exec_driver_sql("CREATE TABLE answers (epoch_id TEXT, task_id TEXT, passed BOOLEAN)")
            connection.exec_driver_sql("INSERT INTO answers VALUES ('s1', 't1', 1)")
            for table in ("cycles", "cycle_steps"):
                connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN position")
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
        SqlSealedStore(database).open_epoch("s1", [TASK], "commit", 1.0)
    with SqlDatabase.open(tmp_path / "old.db", role="sealed") as database:
        sealed = SqlSealedStore(database)
        assert sealed.epoch_tasks("s1") == (TASK,)
        assert sealed.answers("s1", "a" * 64) == {}
        sealed.save_answers("s1", [answer(), answer(sample=7)])
        assert sealed.answers("s1", "a" * 64, sample=7) == {"t1": answer(sample=7)}
        with database.read("read") as connection:
            assert _statements(connection) == wanted
            assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one() == REVISION


def test_cycles_of_the_second_revision_keep_their_order(tmp_path: Path):
    with SqlDatabase.open(tmp_path / "old.db") as database, database.write("made old") as connection:
        connection.exec_driver_sql("DROP TABLE shadow_answers")
        for table in ("cycles", "cycle_steps"):
            connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN position")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0002'")
        for name in ("c2", "c1"):
            connection.exec_driver_sql(
                "INSERT INTO cycles (id, config, opened_at, closed_at, outcome) VALUES (?, '{}', 1.0, 1.0, 'done')",
                (name,),
            )
            for step in ("zero", "alpha"):
                connection.exec_driver_sql("INSERT INTO cycle_steps VALUES (?, ?, '{}', 1.0)", (name, step))
    with SqlDatabase.open(tmp_path / "old.db") as database:
        cycles = SqlCycleStore(database)
        cycles.open_cycle("c0", config={}, time=1.0)
        assert [cycle["id"] for cycle in cycles.list_cycles()] == ["c2", "c1", "c0"]
        assert list(cycles.steps("c1")) == ["zero", "alpha"]


def test_a_database_of_the_third_revision_keeps_its_interactions_and_takes_shadow_answers(tmp_path: Path):
    with SqlDatabase.open(tmp_path / "new.db") as database, database.read("read") as connection:
        wanted = _statements(connection)
    with SqlDatabase.open(tmp_path / "old.db") as database:
        SqlTrajectoryStore(database).append_interactions([interaction()])
        with database.write("made old") as connection:
            connection.exec_driver_sql("DROP TABLE shadow_answers")
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0003'")
    with SqlDatabase.open(tmp_path / "old.db") as database:
        with database.read("read") as connection:
            assert _statements(connection) == wanted
        store = SqlShadowStore(database)
        assert store.append_shadow_answers([shadow_answer()]) == 1
        assert [pair.main for pair in store.list_shadow_pairs("shadow-1")] == [interaction()]


def _statements(connection: sa.Connection) -> dict[str, list[str]]:
    """The words of each CREATE statement; the order of constraints within one is of no matter."""
    rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'trigger'")
    return {name: sorted(re.findall(r"\w+|[<>=]+", sql)) for name, sql in rows if name != "alembic_version"}
