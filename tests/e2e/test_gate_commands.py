"""The gate's commands over a real small model: nothing gets past the gate, and people can stop it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loop_world import POLICY, LoopWorld, get
from tidegate.app.stores import open_stores


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoopWorld:
    """After a cycle that promoted."""
    world = LoopWorld.with_traffic(tmp_path_factory.mktemp("gate") / "w")
    asyncio.run(world.first_release())
    assert world.cycle()["outcome"] == "done"
    return world


def told(world: LoopWorld, *arguments: str) -> dict[str, Any]:
    done = world.tidegate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(world: LoopWorld, arguments: Sequence[str], words: str, *, code: int = 1) -> None:
    done = world.tidegate(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stderr


def champion(world: LoopWorld) -> dict[str, Any]:
    rows = json.loads(world.tidegate("releases", "list", "--json").stdout)
    return next(row for row in rows if "champion" in row["aliases"].split(","))


def test_a_decision_is_explained_condition_by_condition(world: LoopWorld) -> None:
    decision = world.decisions()[-1]
    looks = told(world, "gate", "explain", decision["candidate"])
    assert [look["stage"] for look in looks] == ["screen", "certify"]
    divergence, rest = looks[0]["kl_to_anchor"].split(" ", 1)
    assert 0.0 < float(divergence) < 50.0
    assert rest.startswith("nats per token over ")
    assert rest.endswith(" tokens, at most 50")
    conditions = looks[-1]["conditions"]
    assert all(condition["holds"] for condition in conditions)
    assert conditions[0]["condition"] == "better than the champion"
    assert f"{decision['measured']['wins']} wins" in conditions[0]["measured"]
    assert len(conditions) == 1 + len(decision["measured"]["bounds"])
    assert "holds" in world.tidegate("gate", "explain", decision["candidate"]).stdout
    refused(world, ["gate", "explain", "cand-unknown"], "never looked at candidate 'cand-unknown'", code=2)


def test_an_edited_policy_stops_the_next_cycle_until_two_people_sign(world: LoopWorld, tmp_path: Path) -> None:
    policy = world.root / "gate.toml"
    policy.write_text(POLICY.replace("alpha = 0.2", "alpha = 0.9"))
    try:
        refused(world, ["cycle", "run"], "looser than the one in force: ledger.alpha: 0.2 -> 0.9")
        assert told(world, "gate", "status")["policy"]["looser_than_in_force"] == ["ledger.alpha: 0.2 -> 0.9"]
        assert told(world, "gate", "sign", str(policy))["waiting_for_people"] == 1
        refused(world, ["gate", "sign", str(policy)], "another person has to", code=2)
        refused(world, ["cycle", "run"], "looser than the one in force")
        second = tmp_path / "second.pem"
        given = told(world, "gate", "keygen", str(second))["introduction"]
        told(world, "gate", "trust", "second", given)
        signed = told(world, "gate", "sign", str(policy), "--key", str(second))
        assert signed["in_force_from_window"] == 2
        refused(world, ["cycle", "run"], "takes effect with window 2")
    finally:
        policy.write_text(POLICY)
    assert told(world, "gate", "status")["may_decide"] == "yes"


def test_a_freeze_stops_learning_and_not_serving(world: LoopWorld) -> None:
    told(world, "gate", "freeze", "--reason", "something is odd")
    refused(world, ["cycle", "run"], "learning is frozen since audit record")
    with world.serving() as url:
        assert url
    assert "recorded" in told(world, "gate", "unfreeze")
    assert told(world, "gate", "status")["frozen"] is None


def test_an_edited_line_of_the_log_serves_no_adapter(world: LoopWorld) -> None:
    database = sqlite3.connect(world.data.open_database)
    seq, body = database.execute("SELECT seq, body FROM audit_records WHERE kind = 'screen'").fetchone()
    edit = "UPDATE audit_records SET body = ? WHERE seq = ?"
    database.execute("DROP TRIGGER IF EXISTS audit_records_no_update")
    with database:
        database.execute(edit, (body.replace('"pass"', '"fail"', 1), seq))
    try:
        refused(world, ["serve"], "the audit log was changed")
        assert world.tidegate("audit", "verify").returncode == 1
    finally:
        with database:
            database.execute(edit, (body, seq))
        database.close()
    assert world.tidegate("audit", "verify").returncode == 0


def test_people_who_disagree_with_a_verifier_bring_the_anchor_back(world: LoopWorld, tmp_path: Path) -> None:
    served = champion(world)
    assert served["adapter"]
    items = tmp_path / "items.jsonl"
    told(world, "gate", "review", "--out", str(items))
    assert items.stat().st_mode & 0o077 == 0
    lines = [json.loads(line) for line in items.read_text().splitlines()]
    assert len(lines) >= 10
    assert {line["passed"] for line in lines} == {True}
    assert lines[0]["messages"][-1] == {"role": "assistant", "content": "ok"}
    refused(world, ["gate", "review", "--take", str(items)], "field 'agree' is None", code=2)
    items.write_text("".join(json.dumps({**line, "agree": True}) + "\n" for line in lines[:5]))
    assert told(world, "gate", "review", "--take", str(items))["reviews"][0]["invalidated"] is False
    assert champion(world)["id"] == served["id"]
    refused(world, ["gate", "review", "--take", str(items)], "were reviewed before")
    judged = [{**line, "agree": index % 2 == 0} for index, line in enumerate(lines[5:])]
    items.write_text("".join(json.dumps(line) + "\n" for line in judged))
    taken = told(world, "gate", "review", "--take", str(items))
    assert taken["reviews"][0]["invalidated"] is True
    assert champion(world)["id"] == taken["restored"]
    assert champion(world)["adapter"] == ""  # the anchor of this directory is the base model
    shown = told(world, "releases", "show", served["id"])
    assert "INVALID: certificate" in shown["certificate_check"]
    assert "void" in shown["certificate_check"]
    refused(world, ["releases", "promote", served["id"]], "is void: it rests on")
    assert world.tidegate("audit", "verify").returncode == 0


def test_an_emergency_is_served_and_ends_with_its_day(world: LoopWorld, tmp_path: Path) -> None:
    before = champion(world)
    lines = tmp_path / "demonstrations.jsonl"
    messages = [{"role": "user", "content": "help"}, {"role": "assistant", "content": "ok"}]
    lines.write_text(json.dumps({"messages": messages}) + "\n")
    candidate = told(world, "train", "--demonstrations", str(lines), "--epochs", "2")["candidate"]
    refused(world, ["candidates", "sign", candidate], "only come in through the gate", code=2)
    served = told(world, "gate", "break-glass", candidate, "--reason", "the champion insults people")
    assert champion(world)["id"] == served["release"]
    assert champion(world)["certificate"] == "break_glass"
    refused(world, ["cycle", "run"], "the glass was broken")
    assert told(world, "gate", "status")["anchor_review"] is True
    refused(world, ["gate", "break-glass", candidate, "--reason", "again"], "only one that was not judged", code=2)
    with open_stores(world.data) as stores:  # a day passes; the clock may then be set back, the log has seen it
        stores.audit.append("note", {"text": "a day later"}, time=time.time() + 25 * 3600)
    with world.serving() as url:
        assert get(f"{url}/readyz")[0] == 200
    assert champion(world)["adapter"] == before["adapter"]
    assert "ended at" in told(world, "releases", "show", served["release"])["certificate_check"]
    told(world, "releases", "anchor", champion(world)["id"])
    assert told(world, "gate", "status")["may_decide"] == "yes"
    assert world.tidegate("audit", "verify").returncode == 0
