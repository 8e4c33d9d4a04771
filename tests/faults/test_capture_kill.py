"""kill -9 at any moment: every record that was acknowledged is in the database afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from postgres_world import locations
from tidegate.core.types import Split
from tidegate.stores.records import Role
from tidegate.stores.sql import Location, SqlDatabase, SqlTrajectoryStore

ROUNDS = 4

WRITER = """
import asyncio, json, sys
from pathlib import Path
from store_samples import interaction
from tidegate.capture import Recorder
from tidegate.core.types import Split
from tidegate.stores.sql import PostgresAddress, SqlDatabase, SqlTrajectoryStore

async def user(recorder, name, split):
    number = 0
    while True:
        id_ = f"{name}-{number}"
        await recorder.record(interaction(id_, episode=f"e-{name}-{number // 3}", user_key=name, split=split))
        sys.stdout.write(id_ + "\\n")
        sys.stdout.flush()
        number += 1

async def main(places, round_):
    stores = [
        SqlTrajectoryStore(
            SqlDatabase.open(PostgresAddress(**place) if isinstance(place, dict) else Path(place), role=role)
        )
        for role, place in json.loads(places).items()
    ]
    recorder = Recorder(*stores)
    splits = [Split.TRAIN, Split.DEV, Split.SEALED]
    await asyncio.gather(*(user(recorder, f"{round_}-{n}", splits[n % 3]) for n in range(12)))

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> dict[Role, Location]:
    if request.param == "sqlite":
        return {"open": tmp_path / "open.db", "sealed": tmp_path / "sealed.db"}
    return {**locations(request.getfixturevalue("postgres"))}


def acknowledged_until_killed(where: dict[Role, Location], round_: int, kill_after: int) -> list[str]:
    """Ids that the writer printed, read to the end of its output after a SIGKILL."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    places = {role: str(place) if isinstance(place, Path) else asdict(place) for role, place in where.items()}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, json.dumps(places), str(round_)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        ids = [process.stdout.readline() for _ in range(kill_after)]
        process.kill()
        ids += process.stdout.readlines()
    assert process.returncode == -9
    return [id_.strip() for id_ in ids if id_.endswith("\n")]


def test_no_acknowledged_record_is_lost_when_the_process_is_killed(where: dict[Role, Location]):
    moments = random.Random(20)
    acknowledged: list[str] = []
    for round_ in range(ROUNDS):
        new = acknowledged_until_killed(where, round_, moments.randrange(1, 150))
        assert new, "the writer got nowhere"
        acknowledged += new
        with (
            SqlDatabase.open(where["open"], create=False) as database,
            SqlDatabase.open(where["sealed"], create=False, role="sealed") as sealed,
        ):
            database.check()
            sealed.check()
            stored = {
                record.id: episode
                for each in (database, sealed)
                for episode in SqlTrajectoryStore(each).list_episodes(splits=tuple(Split))
                for record in episode.interactions
            }
            assert set(acknowledged) <= set(stored)
            # What was committed but not yet acknowledged may be there too: at most one record a user and round.
            assert len(stored) - len(acknowledged) <= 12 * (round_ + 1)
