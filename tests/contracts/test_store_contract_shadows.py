"""What every store of shadow answers promises, over SQLite, PostgreSQL and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from postgres_world import locations
from store_samples import feedback, interaction, shadow_answer, verdict
from tidegate.core.errors import NotFoundError, RequestError, StoreError
from tidegate.core.shadow import ShadowOutcome, ShadowPair
from tidegate.core.types import Split
from tidegate.ports.shadows import ShadowStore
from tidegate.stores.memory import MemoryShadowStore, MemoryTrajectoryStore
from tidegate.stores.records import Role
from tidegate.stores.sql import Location, SqlDatabase, SqlShadowStore, SqlTrajectoryStore

DROPPED = {"outcome": ShadowOutcome.DROPPED, "reason": "busy", "text": "", "tool_calls": (), "finish_reason": None}
FAILED = {**DROPPED, "outcome": ShadowOutcome.FAILED, "reason": "engine_timeout"}
NOTHING = {"invalid_tool_call": False, "prompt_tokens": None, "completion_tokens": None}


@dataclass
class Backend:
    trajectories: SqlTrajectoryStore | MemoryTrajectoryStore
    shadows: ShadowStore


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "memory":
        memory = MemoryTrajectoryStore()
        yield Backend(memory, MemoryShadowStore(memory))
        return
    where: Location = tmp_path / "tidegate.db"
    if request.param == "postgres":
        where = request.getfixturevalue("postgres").fresh()
    with SqlDatabase.open(where) as database:
        yield Backend(SqlTrajectoryStore(database), SqlShadowStore(database))


def test_an_answer_comes_back_beside_its_interaction(backend: Backend):
    backend.trajectories.append_interactions([interaction()])
    assert backend.shadows.append_shadow_answers([shadow_answer()]) == 1
    assert backend.shadows.list_shadow_pairs("shadow-1") == [ShadowPair(main=interaction(), answer=shadow_answer())]
    assert backend.shadows.list_shadow_pairs("shadow-2") == []


def test_the_first_answer_of_a_shadow_to_an_interaction_stands(backend: Backend):
    backend.trajectories.append_interactions([interaction()])
    other = shadow_answer(text="another")
    assert backend.shadows.append_shadow_answers([shadow_answer(), other]) == 1
    assert backend.shadows.append_shadow_answers([other, replace(other, shadow_id="shadow-2")]) == 1
    assert [pair.answer for pair in backend.shadows.list_shadow_pairs("shadow-1")] == [shadow_answer()]


def test_pairs_are_in_order_and_without_what_was_dropped(backend: Backend):
    backend.trajectories.append_interactions([interaction(f"i{n}", episode=f"e{n}") for n in range(5)])
    answers = [
        shadow_answer("i0", created_at=4.0),
        shadow_answer("i1", created_at=3.0, **FAILED, **NOTHING),
        shadow_answer("i2", created_at=2.0, **DROPPED, **NOTHING),
        shadow_answer("i3", created_at=3.0),
        shadow_answer("i4", created_at=1.0, **{**DROPPED, "reason": "limit"}, **NOTHING),
    ]
    assert backend.shadows.append_shadow_answers(answers) == 5
    assert [pair.answer for pair in backend.shadows.list_shadow_pairs("shadow-1")] == [answers[n] for n in (1, 3, 0)]
    latest = backend.shadows.list_shadow_pairs("shadow-1", latest=2)
    assert [pair.main.id for pair in latest] == ["i3", "i0"]
    assert backend.shadows.list_shadow_pairs("shadow-1", latest=0) == []
    assert dict(backend.shadows.count_shadow_answers("shadow-1")) == {
        (ShadowOutcome.ANSWERED, ""): 2,
        (ShadowOutcome.FAILED, "engine_timeout"): 1,
        (ShadowOutcome.DROPPED, "busy"): 1,
        (ShadowOutcome.DROPPED, "limit"): 1,
    }
    assert dict(backend.shadows.count_shadow_answers("shadow-2")) == {}


def test_what_is_not_recorded_here_has_no_shadow(backend: Backend):
    """So an answer is never there before the record that it shadows, and never of a sealed user."""
    backend.trajectories.append_interactions([interaction()])
    with pytest.raises(NotFoundError, match="'i2'"):
        backend.shadows.append_shadow_answers([shadow_answer(), shadow_answer("i2")])
    assert backend.shadows.list_shadow_pairs("shadow-1") == [], "all or nothing"


def test_what_was_not_to_be_stored_has_no_shadow(backend: Backend):
    backend.trajectories.append_interactions([interaction(consent=False, messages=(), tools=())])
    with pytest.raises(RequestError, match="consent"):
        backend.shadows.append_shadow_answers([shadow_answer(**DROPPED, **NOTHING)])


@pytest.mark.parametrize("changes", [{"created_at": float("nan")}, {"seconds": float("inf")}])
def test_times_that_are_not_finite_are_refused(backend: Backend, changes: dict[str, float]):
    backend.trajectories.append_interactions([interaction()])
    with pytest.raises(RequestError, match="finite"):
        backend.shadows.append_shadow_answers([shadow_answer(**changes)])


def test_nothing_else_in_the_store_knows_of_shadow_answers(backend: Backend):
    store = backend.trajectories
    store.append_interactions([interaction()])
    store.append_feedback(feedback(episode_id="e1"))
    store.append_verdicts([verdict()])

    def everything() -> list[object]:
        return [
            store.list_episodes(splits=tuple(Split)),
            store.list_episodes(splits=tuple(Split), releases=["smol-r0-base"]),
            store.list_episodes(splits=tuple(Split), active=True, after=1.5),
            store.list_verdicts(),
            store.list_rewards(),
            store.list_feedback(),
            store.get_interaction("i1"),
        ]

    before = everything()
    backend.shadows.append_shadow_answers([shadow_answer()])
    assert everything() == before
    assert before[1] == before[2] == []


def test_no_sealed_store_takes_shadow_answers(request: pytest.FixtureRequest, tmp_path: Path):
    with pytest.raises(StoreError, match="sealed"):
        MemoryShadowStore(MemoryTrajectoryStore("sealed"))
    places: list[Location] = [tmp_path / "sealed.db", locations(request.getfixturevalue("postgres"))["sealed"]]
    role: Role = "sealed"
    for where in places:
        with SqlDatabase.open(where, role=role) as database, pytest.raises(StoreError, match="sealed"):
            SqlShadowStore(database)
