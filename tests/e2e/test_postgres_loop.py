"""The commands and the HTTP API over a real PostgreSQL server: serve, record, a cycle, the audit log, the doctor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from loop_world import ANSWER, LoopWorld
from postgres_world import PASSWORD, Server, locations, name_of
from tidegate.app.stores import open_stores
from tidegate.core.types import Split

SECTION = '\n[database]\nurl = "{open}"\nsealed_url = "{sealed}"\n'


@pytest.fixture(scope="module")
def passwords() -> Iterator[None]:
    """Only the environment holds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGATE_DATABASE__PASSWORD", PASSWORD)
        patch.setenv("TIDEGATE_DATABASE__SEALED_PASSWORD", PASSWORD)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, postgres: Server, passwords: None) -> LoopWorld:
    """Recorded traffic in two databases; the tests of this module go on from each other."""
    places = locations(postgres)
    section = SECTION.format(open=places["open"].url, sealed=places["sealed"].url)
    return LoopWorld.with_traffic(tmp_path_factory.mktemp("loop") / "world", more_settings=section)


def test_a_server_records_and_a_cycle_publishes_into_it(world: LoopWorld) -> None:
    with world.serving() as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def ask() -> tuple[str, str]:
            completion = client.chat.completions.create(
                model="champion", messages=[{"role": "user", "content": "train 3"}], max_tokens=8, temperature=0
            )
            return completion.id, completion.choices[0].message.content or ""

        asked, answer = ask()
        assert answer != ANSWER
        with open_stores(world.data) as stores:
            found = [s.get_interaction(asked) for s in (stores.trajectories, stores.sealed_trajectories)]
        assert [record is not None for record in found].count(True) == 1
        sent = world.tidegate("feedback", asked, "helpful", "false", "--json")
        assert json.loads(sent.stdout)["duplicate"] is False, sent.stderr
        result = world.cycle()
        assert result["outcome"] == "done", result
        assert ask()[1] == ANSWER
    verified = world.tidegate("audit", "verify", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["decisions"] == 1


def test_what_is_wrong_is_told_and_no_password_is(world: LoopWorld) -> None:
    doctor = world.tidegate("doctor", "--json")
    states = {row["check"]: row["state"] for row in json.loads(doctor.stdout)}
    assert {states[check] for check in ("databases", "audit log", "keys")} == {"ok"}, doctor.stdout
    assert "sealed database" not in states, "its user is not let in"
    shown = world.tidegate("config", "show", "--json")
    assert json.loads(shown.stdout)["database"]["password"] == "(hidden)"
    told = doctor.stdout + shown.stdout + shown.stderr + (world.root / "serve.log").read_text()
    told += world.tidegate("audit", "export").stdout
    assert PASSWORD not in told


def test_nothing_lies_in_files_and_nothing_sealed_in_the_open_database(world: LoopWorld, postgres: Server) -> None:
    assert not list(world.data.root.glob("*.db*"))
    assert world.settings.database.url is not None
    name = world.settings.database.url.get_secret_value().partition("@/")[2].partition("?")[0]
    for table in ("interactions", "episodes", "batch_manifests", "audit_records", "cycle_steps"):
        rows = postgres.execute(f"SELECT t::text FROM {table} AS t", database=name)
        assert rows, table
        assert not [row for row in rows if "sealed 3" in row[0] or "user-sealed" in row[0]], table
    with open_stores(world.data) as stores:
        assert len(stores.sealed_trajectories.list_episodes(splits=[Split.SEALED])) >= 12
        assert not stores.trajectories.list_episodes(splits=[Split.SEALED])


def test_another_data_directory_and_a_lost_key_do_not_get_at_the_database(world: LoopWorld, tmp_path: Path) -> None:
    for directory in (tmp_path / "other", tmp_path / "copy"):
        if directory.name == "copy":
            shutil.copytree(world.data.root, directory)
            (directory / "keys" / "split.key").unlink()
        told = world.tidegate("--data-dir", str(directory), "releases", "list")
        assert told.returncode == 1, told.stdout
        assert "belongs to another data directory" in told.stderr
    assert not (tmp_path / "copy" / "keys" / "split.key").exists(), "a lost key must be seen, not replaced"
    assert world.tidegate("releases", "list").returncode == 0


def test_a_user_that_may_read_sealed_traffic_is_warned_of(world: LoopWorld, postgres: Server) -> None:
    database = world.settings.database
    assert database.url is not None
    assert database.sealed_url is not None
    user, sealed = (
        url.get_secret_value().partition("@/")[2].partition("?")[0] for url in (database.url, database.sealed_url)
    )
    postgres.execute(f"GRANT CONNECT ON DATABASE {sealed} TO {user}")
    postgres.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}", database=sealed)
    rows = {row["check"]: row for row in json.loads(world.tidegate("doctor", "--json").stdout)}
    assert rows["sealed database"]["state"] == "warning"
    assert "can read the sealed database" in rows["sealed database"]["detail"]
    with world.serving():
        pass
    log = (world.root / "serve.log").read_text()
    assert log.count("can read the sealed database") == 1, log
    assert PASSWORD not in log


def test_an_empty_and_an_absent_database_are_told(world: LoopWorld, postgres: Server, tmp_path: Path) -> None:
    empty = locations(postgres)
    config = tmp_path / "tidegate.toml"
    section = SECTION.format(open=empty["open"].url, sealed=empty["sealed"].url)
    config.write_text(f'data_dir = "{tmp_path / "data"}"\n{section}')
    told = world.tidegate("--config", str(config), "releases", "list")
    assert (told.returncode, "holds no tables; start 'tidegate serve' first" in told.stderr) == (2, True), told.stderr
    postgres.execute(f"DROP DATABASE {name_of(empty['open'])}")
    told = world.tidegate("--config", str(config), "releases", "list")
    assert (told.returncode, "does not exist" in told.stderr) == (1, True), told.stderr
    doctor = world.tidegate("--config", str(config), "doctor", "--json")
    assert {row["check"] for row in json.loads(doctor.stdout) if row["state"] == "wrong"} >= {"databases"}
