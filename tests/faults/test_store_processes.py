"""Several processes on one database at once, as server, cycle and command line are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from postgres_world import Server
from tidegate.core.audit import verify_chain
from tidegate.core.types import CandidateState, Split
from tidegate.stores.sql import Location, SqlAuditLog, SqlCycleStore, SqlDatabase, SqlReleaseStore, SqlTrajectoryStore

PROCESSES = 3
RECORDS = 15

WORKER = """
import json, sys
from pathlib import Path
from store_samples import candidate, interaction, release
from tidegate.core.errors import ConflictError
from tidegate.core.types import CandidateState
from tidegate.stores.sql import *

place, me, records = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
where = PostgresAddress(**place) if isinstance(place, dict) else Path(place)
print("ready", flush=True)
sys.stdin.readline()

def wins(action):
    try:
        action()
    except ConflictError:
        return False
    return True

with SqlDatabase.open(where, busy_timeout_s=60) as database:
    trajectories, audit = SqlTrajectoryStore(database), SqlAuditLog(database)
    releases, cycles = SqlReleaseStore(database), SqlCycleStore(database)
    new = 0
    for n in range(records):
        audit.append("note", {"by": me, "n": n}, time=float(n))
        new += trajectories.append_interactions([interaction(f"shared-{n}", episode=f"e{n}"), interaction(f"{me}-{n}")])
    won = {
        "cycle": wins(lambda: cycles.open_cycle(f"c-{me}", config={}, time=1.0)),
        "release": wins(lambda: releases.add_release(release(1, id=f"r-{me}"))),
    }
    releases.add_candidate(candidate())
    releases.set_candidate_state("cand-aaaaaaaa", CandidateState.SCREENED, reasons=[me], time=1.0)
    print(json.dumps({"new": new, **won}))
"""


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "sqlite":
        return tmp_path / "tidegate.db"
    server: Server = request.getfixturevalue("postgres")
    return server.fresh()


def start(where: Location, me: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    place = str(where) if isinstance(where, Path) else asdict(where)
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(place), me, str(RECORDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def test_processes_share_one_database_from_its_creation_on(where: Location):
    workers = [start(where, f"p{n}") for n in range(PROCESSES)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    results = []
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        output, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        results.append(json.loads(output))

    with SqlDatabase.open(where, create=False) as database:
        database.check()
        records = list(SqlAuditLog(database).read())
        assert verify_chain(records) == len(records), "the chain never forks"
        kinds = [record.kind for record in records]
        assert {kind: kinds.count(kind) for kind in kinds} == {
            "note": PROCESSES * RECORDS,
            "release_added": 1,
            "candidate_proposed": 1,
            "candidate_moved": 1,
        }
        assert [result["cycle"] for result in results].count(True) == 1
        assert [result["release"] for result in results].count(True) == 1
        assert len(SqlCycleStore(database).list_cycles()) == 1
        assert SqlReleaseStore(database).list_candidates()[0].state is CandidateState.SCREENED
        # Each shared record is new to exactly one process, each own record to its owner.
        assert sum(result["new"] for result in results) == RECORDS + PROCESSES * RECORDS
        stored = SqlTrajectoryStore(database).list_episodes(splits=[Split.TRAIN])
        assert sum(len(episode.interactions) for episode in stored) == RECORDS + PROCESSES * RECORDS
