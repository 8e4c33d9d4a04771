"""The commands and the HTTP API alone, on a tiny model that learns: cycle, hot swap, rollback, and ways around."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

import pytest
from openai import OpenAI

from loop_world import ANSWER, LoopWorld
from tidegate.app.locks import cycle_lock, exclusive
from tidegate.cycle.machine import Step

MESSAGES = [{"role": "user", "content": "train 3"}]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoopWorld:
    """Recorded traffic and a server's first start; the tests of this module go on from each other."""
    return LoopWorld.with_traffic(tmp_path_factory.mktemp("loop") / "world")


def client_of(url: str) -> OpenAI:
    """Closes its connections when it is left."""
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, **options: object) -> tuple[str, str]:
    """The answer and the release that gave it."""
    raw = client.chat.completions.with_raw_response.create(
        model="champion", messages=MESSAGES, max_tokens=8, temperature=0, **options
    )
    return raw.parse().choices[0].message.content or "", raw.headers["x-tidegate-release"]


class Users:
    """Ask without a pause on a thread of their own; every failure is kept."""

    def __init__(self, client: OpenAI) -> None:
        self.failures: list[Exception] = []
        self.releases: list[str] = []
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Users:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.releases.append(ask(self._client)[1])
            except Exception as error:
                self.failures.append(error)


def test_a_cycle_publishes_into_the_running_server_and_rollback_undoes_it(world: LoopWorld) -> None:
    with world.serving() as url, client_of(url) as client:
        answer, release = ask(client)
        assert (answer == ANSWER, release) == (False, "tiny-r0-base")
        with Users(client) as users:
            result = world.cycle()
            assert result["outcome"] == "done", result
            published = result["steps"]["publish"]["release"]
            assert ask(client) == (ANSWER, published)
            rolled_back = json.loads(world.tidegate("releases", "rollback", "--json").stdout)
            answer, release = ask(client)
            assert (answer == ANSWER, release, rolled_back["restores"]) == (False, rolled_back["id"], "tiny-r0-base")
            promoted = json.loads(world.tidegate("releases", "promote", published, "--json").stdout)
            assert ask(client) == (ANSWER, promoted["id"])
        assert not users.failures
        assert set(users.releases) <= {"tiny-r0-base", published, rolled_back["id"], promoted["id"]}
        assert users.releases == sorted(users.releases, key=lambda name: int(name.split("-r")[1].split("-")[0]))
        again = world.tidegate("releases", "promote", promoted["id"])
        assert (again.returncode, "same content" in again.stderr) == (2, True)
    verified = world.tidegate("audit", "verify", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["decisions"] == 1


def test_the_report_of_that_cycle_tells_all_of_it(world: LoopWorld) -> None:
    report = json.loads(world.tidegate("cycle", "report", "--json").stdout)
    assert (report["outcome"], report["reasons"]) == ("done", [])
    assert [step["step"] for step in report["steps"]] == [step.value for step in Step]
    assert all(step["seconds"] >= 0.0 for step in report["steps"])
    assert report["curation"]["counts"]["kept"] == report["curation"]["examples"]
    training = report["training"]
    assert {"losses", "grad_norms"} <= set(training["series"])
    assert {one["name"]: one["differs"] for one in training["hyperparameters"]}["learning_rate"] is False
    assert training["guards"]["base_unchanged"] is True
    monitors = report["monitors"]
    assert (monitors["anchor"], monitors["failed"]) == ("tiny-r0-base", [])
    assert monitors["releases"]["tiny-r0-base"]["kinds"]["greeting"]["passed"] == 18  # none of the sealed users
    shown = world.tidegate("cycle", "report")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "tiny-r0-base (champion, anchor)" in shown.stdout
    assert "sealed" not in shown.stdout


def test_the_same_weights_proposed_again_are_not_judged_twice(world: LoopWorld) -> None:
    champion = next(path for path in world.data.adapters.iterdir() if not path.name.startswith("."))
    done = world.tidegate("cycle", "run", "--json", "--candidate", str(champion))
    assert done.returncode == 3, done.stderr
    assert "already" in done.stdout


def test_a_restart_serves_the_champion_again(world: LoopWorld) -> None:
    with world.serving() as url, client_of(url) as client:
        assert ask(client)[0] == ANSWER


def test_a_damaged_adapter_is_refused_and_spends_nothing(world: LoopWorld) -> None:
    from tidegate.training import degrade_adapter

    champion = next(path for path in world.data.adapters.iterdir() if not path.name.startswith("."))
    damaged = degrade_adapter(champion, world.root / "damaged", seed=1, scale=3.0)
    result = world.cycle("--candidate", str(damaged))
    assert result["outcome"] == "refused", result
    assert len(world.decisions()) == 1  # the screen is free: no sealed task was asked


def test_adapter_bytes_changed_after_certification_are_not_served(world: LoopWorld) -> None:
    row = json.loads(world.tidegate("releases", "list", "--json").stdout)[-1]
    shown = json.loads(world.tidegate("releases", "show", row["id"], "--json").stdout)
    weights = world.data.adapters / shown["adapter_sha256"] / "adapter_model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-4] + b"\x00\x00\x80\x3f")
    try:
        served = world.tidegate("serve", timeout_s=60)
        assert served.returncode != 0
        assert shown["adapter_sha256"][:8] in served.stderr
    finally:
        weights.write_bytes(original)


def test_a_certificate_of_another_adapter_and_a_row_set_by_sql_are_not_served(world: LoopWorld) -> None:
    database = sqlite3.connect(world.data.open_database)
    champion = database.execute("select release_id from aliases where name = 'champion'").fetchone()[0]
    columns = [row[1] for row in database.execute("pragma table_info(releases)")]
    row = dict(
        zip(columns, database.execute("select * from releases where id = ?", [champion]).fetchone(), strict=True)
    )
    damaged = next(path for path in world.data.adapters.iterdir() if path.name != row["adapter_sha256"])
    forged = {**row, "id": "tiny-r99-forged", "number": 99, "adapter_sha256": damaged.name}
    marks = ", ".join("?" * len(columns))
    try:
        database.execute(f"insert into releases values ({marks})", [forged[name] for name in columns])
        database.execute("update aliases set release_id = 'tiny-r99-forged' where name = 'champion'")
        database.commit()
        served = world.tidegate("serve", timeout_s=60)
        assert (served.returncode, "certificate_invalid" in served.stderr) == (1, True), served.stderr
    finally:
        database.execute("update aliases set release_id = ? where name = 'champion'", [champion])
        database.execute("delete from releases where id = 'tiny-r99-forged'")
        database.commit()


def test_an_edited_exported_log_is_found(world: LoopWorld, tmp_path: Path) -> None:
    lines = world.tidegate("audit", "export").stdout.splitlines()
    log = tmp_path / "audit.jsonl"
    log.write_text("\n".join(lines))
    assert world.tidegate("audit", "verify", "--file", str(log)).returncode == 0
    log.write_text("\n".join(lines).replace('"decision":"promote"', '"decision":"refuse"'))
    edited = world.tidegate("audit", "verify", "--file", str(log))
    assert (edited.returncode, "audit_mismatch" in edited.stderr) == (1, True)


def test_another_base_model_cannot_serve_this_data(world: LoopWorld, tmp_path: Path) -> None:
    from engine_fixtures import write_tiny_model

    other = write_tiny_model(tmp_path / "other", seed=9)
    served = world.tidegate("serve", "--model", str(other), timeout_s=60)
    assert served.returncode == 1
    assert "base" in served.stderr


def test_a_second_server_on_the_same_data_and_a_taken_port_are_told(world: LoopWorld, tmp_path: Path) -> None:
    with world.serving() as url:
        second = world.tidegate("serve", timeout_s=60)
        assert (second.returncode, url in second.stderr) == (2, True)
        port = url.rsplit(":", 1)[1]
        taken = world.tidegate("--data-dir", str(tmp_path / "elsewhere"), "serve", "--port", port, timeout_s=60)
        assert taken.returncode == 2
        assert port in taken.stderr
        assert "--port" in taken.stderr


def test_a_person_cannot_sign_past_the_gate(world: LoopWorld) -> None:
    rows = json.loads(world.tidegate("candidates", "list", "--json").stdout)
    rejected = next(row["id"] for row in rows if row["state"] == "rejected")
    signed = world.tidegate("candidates", "sign", rejected)
    assert (signed.returncode, "through the gate" in signed.stderr) == (2, True)


def test_feedback_reaches_the_server_and_is_kept_once(world: LoopWorld) -> None:
    with world.serving():
        for duplicate in (False, True):
            sent = world.tidegate("feedback", "episode-train-3", "helpful", "true", "--json")
            assert sent.returncode == 0, sent.stderr
            assert json.loads(sent.stdout)["duplicate"] is duplicate
        unknown = world.tidegate("feedback", "chatcmpl-nobody", "helpful", "true")
    assert unknown.returncode == 1
    assert "chatcmpl-nobody" in unknown.stderr


def test_users_never_move_between_splits(world: LoopWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_SPLIT__TRAIN", "0.9")
    monkeypatch.setenv("TIDEGATE_SPLIT__SEALED", "0.05")
    served = world.tidegate("serve", timeout_s=60)
    assert (served.returncode, "users never move" in served.stderr) == (2, True), served.stderr
    monkeypatch.undo()
    key = world.data.root / "keys" / "split.key"
    kept = key.read_bytes()
    key.unlink()
    try:
        served = world.tidegate("serve", timeout_s=60)
        assert (served.returncode, "split.key" in served.stderr) == (2, True), served.stderr
        assert not key.exists()
        doctor = world.tidegate("doctor", "--json")
        assert doctor.returncode == 1
        assert {row["check"] for row in json.loads(doctor.stdout) if row["state"] == "wrong"} == {"keys"}
    finally:
        key.write_bytes(kept)
        key.chmod(0o600)


def test_one_cycle_at_a_time_and_an_interrupted_one_comes_first(world: LoopWorld) -> None:
    champion = next(path for path in world.data.adapters.iterdir() if not path.name.startswith("."))
    with exclusive(cycle_lock(world.data.root), "a test"):
        second = world.tidegate("cycle", "run")
        assert (second.returncode, "another cycle runs" in second.stderr) == (2, True), second.stderr
    assert world.cycle_killed_in("collect", "started") == -9
    proposed = world.tidegate("cycle", "run", "--candidate", str(champion))
    assert (proposed.returncode, "cycle abandon" in proposed.stderr) == (2, True), proposed.stderr
    assert world.tidegate("cycle", "abandon").returncode == 0
    assert world.tidegate("cycle", "abandon").returncode == 2


def test_the_training_process_gets_no_path_to_sealed_tasks(world: LoopWorld) -> None:
    sealed = world.data.sealed_database.read_bytes()
    assert b"sealed 3" in sealed
    for folder in (world.data.batches, world.data.adapters):
        for file in folder.rglob("*"):
            assert not file.is_file() or b"sealed 3" not in file.read_bytes()
    assert b"sealed 3" not in world.data.open_database.read_bytes()
