"""What every trajectory store promises, over SQLite, PostgreSQL and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from postgres_world import Server
from store_samples import feedback, interaction, verdict
from tidegate.core.errors import ConflictError, NotFoundError, RequestError, StoreError
from tidegate.core.types import Choice, Outcome, Sampling, Split
from tidegate.stores.memory import MemoryTrajectoryStore
from tidegate.stores.records import Reward, Role
from tidegate.stores.sql import SqlDatabase, SqlTrajectoryStore

Store = SqlTrajectoryStore | MemoryTrajectoryStore
ALL = tuple(Split)
ODD = (float("nan"), float("inf"), float("-inf"))


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Role], Store]]:
    opened: list[SqlDatabase] = []

    def make(role: Role) -> Store:
        if request.param == "memory":
            return MemoryTrajectoryStore(role)
        server: Server | None = request.getfixturevalue("postgres") if request.param == "postgres" else None
        where = tmp_path / f"{role}.db" if server is None else server.fresh()
        opened.append(SqlDatabase.open(where, role=role))
        return SqlTrajectoryStore(opened[-1])

    yield make
    for database in opened:
        database.close()


@pytest.fixture
def store(make_store: Callable[[Role], Store]) -> Store:
    return make_store("open")


def test_an_interaction_comes_back_exactly_as_it_was(store: Store):
    schema = '{"type":"object","properties":{"z":{},"a":{"const":"\u00e9"}}}'
    held = {"json_schema": schema, "tool_choice": "calc", "parallel_tool_calls": False}
    record = interaction(sampling=Sampling(temperature=0.7, stop=("\n",), seed=2**80, n=2, **held))
    assert store.append_interactions([record]) == 1
    found = store.get_interaction("i1")
    assert found == record
    assert found is not None
    assert list(found.messages[0]) == ["role", "content", "name"], "templates render messages: key order is content"
    assert store.get_interaction("i2") is None


def test_lone_surrogates_and_large_arrays_survive(store: Store):
    long = tuple(range(5000))
    record = interaction(
        messages=({"role": "user", "content": "half \ud83d of a pair"},),
        prompt_token_ids=long,
        choices=(Choice(index=0, token_ids=long, logprobs=tuple(-i / 8 for i in long), text="\udc00"),),
    )
    store.append_interactions([record])
    assert store.get_interaction("i1") == record


def test_what_an_engine_did_not_say_is_kept_as_not_said(store: Store):
    bare = Choice(index=0, token_ids=(), logprobs=(), text="hi", token_exact=False)
    sampling = Sampling(distribution_known=False)
    record = interaction(choices=(bare,), prompt_token_ids=(), sampling=sampling)
    store.append_interactions([record])
    assert store.get_interaction("i1") == record


def test_a_search_is_kept_with_the_choice_that_was_delivered(store: Store):
    made = tuple(
        Choice(index=index, token_ids=(index, 7), logprobs=(-0.5, -0.25), text=str(index), delivered=index == 1)
        for index in range(3)
    )
    record = interaction(choices=made, sampling=Sampling(n=3, search="best-of-3"))
    store.append_interactions([record])
    assert store.get_interaction("i1") == record


def test_known_ids_are_left_as_they_are_and_counted_once(store: Store):
    assert store.append_interactions([interaction("a"), interaction("b"), interaction("a", latency_s=9.0)]) == 2
    assert store.append_interactions([interaction("b", latency_s=9.0), interaction("c")]) == 1
    assert store.append_interactions([]) == 0
    assert [i.latency_s for e in store.list_episodes(splits=ALL) for i in e.interactions] == [0.25] * 3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"messages": ({"role": "user", "content": float("nan")},)}, "messages of interaction 'bad'"),
        ({"tools": ({"x": {1, 2}},)}, "tools of interaction 'bad'"),
        ({"choices": (Choice(index=0, token_ids=(1, 2), logprobs=(-1.0,), text=""),)}, "2 tokens and 1"),
        ({"choices": (Choice(index=0, token_ids=(1,), logprobs=(), text="", token_exact=False),)}, "lacking some"),
        ({"prompt_token_ids": (2**31,)}, "32 bits"),
        ({"release_id": "\ud800"}, "lone surrogate"),
        ({"episode_id": "e\0"}, "a NUL"),
        *(({name: value}, f"'bad' has the {name} {value}") for name in ("created_at", "latency_s") for value in ODD),
    ],
)
def test_a_record_that_cannot_be_stored_is_the_requests_fault_and_nothing_of_its_batch_is_kept(
    store: Store, bad: dict[str, object], words: str
):
    with pytest.raises(RequestError, match=words):
        store.append_interactions([interaction("good"), interaction("bad", **bad)])
    assert store.get_interaction("good") is None


def test_an_episode_belongs_to_one_user(store: Store):
    store.append_interactions([interaction("a")])
    with pytest.raises(ConflictError, match="'e1' of another user"):
        store.append_interactions([interaction("x", episode="new"), interaction("b", user_key="u2")])
    with pytest.raises(ConflictError, match="'e2'"):
        store.append_interactions([interaction("c", episode="e2"), interaction("d", episode="e2", split=Split.DEV)])
    assert [e.id for e in store.list_episodes(splits=ALL)] == ["e1"]


def test_episodes_are_listed_by_their_first_interaction(store: Store):
    store.append_interactions(
        [
            interaction("b2", episode="b", at=9.0),
            interaction("a1", episode="a", at=3.0),
            interaction("c1", episode="c", at=3.0),
            interaction("d1", episode="d", at=4.0, split=Split.DEV),
        ]
    )
    store.append_interactions([interaction("b1", episode="b", at=2.0), interaction("b3", episode="b", at=10.0)])
    listed = store.list_episodes(splits=ALL)
    assert [e.id for e in listed] == ["b", "a", "c", "d"]
    assert [i.id for i in listed[0].interactions] == ["b1", "b2", "b3"]
    assert [e.id for e in store.list_episodes(splits=[Split.DEV])] == ["d"]
    assert [e.id for e in store.list_episodes(splits=[])] == []
    assert [e.id for e in store.list_episodes(splits=ALL, after=2.0, until=3.0)] == ["a", "c"]
    active = store.list_episodes(splits=ALL, after=3.0, until=9.0, active=True)
    assert [(e.id, len(e.interactions)) for e in active] == [("b", 3), ("d", 1)]


def test_the_last_episodes_that_some_releases_answered_in(store: Store):
    store.append_interactions(
        [
            interaction("a1", episode="a", at=1.0, release_id="r0"),
            interaction("b1", episode="b", at=2.0, release_id="r1"),
            interaction("b2", episode="b", at=9.0, release_id="r0"),
            interaction("d1", episode="d", at=3.0, release_id="r0"),
            interaction("c1", episode="c", at=3.0, release_id="r2"),
            interaction("e1", episode="e", at=4.0, release_id="r2", split=Split.DEV),
        ]
    )

    def ids(**options: object) -> list[str]:
        return [episode.id for episode in store.list_episodes(splits=ALL, **options)]

    assert ids(releases=["r0"]) == ["a", "b", "d"]
    assert ids(releases=["r0"], latest=2) == ["b", "d"]
    assert ids(releases=["r0", "r2"], latest=3, until=3.0) == ["b", "c", "d"]
    assert ids(releases=["r1"], active=True, after=8.0, latest=5) == ["b"]
    assert ids(releases=[], latest=5) == ids(releases=["r0"], latest=0) == []
    assert ids(latest=2) == ["d", "e"]
    assert [episode.id for episode in store.list_episodes(splits=[Split.DEV], releases=["r2"], latest=9)] == ["e"]
    assert len(store.list_episodes(splits=ALL, releases=["r1"], latest=1)[0].interactions) == 2


def test_many_records_in_one_batch(store: Store):
    batch = [interaction(f"i{n}", episode=f"e{n % 700}", at=1.0 + n) for n in range(1500)]
    assert store.append_interactions(batch) == 1500
    assert store.append_interactions(batch) == 0
    assert len(store.list_episodes(splits=ALL)) == 700


def test_sealed_and_open_traffic_never_share_a_store(make_store: Callable[[Role], Store]):
    store, sealed = make_store("open"), make_store("sealed")
    with pytest.raises(StoreError, match="role 'open'"):
        store.append_interactions([interaction(split=Split.SEALED)])
    for split in (Split.TRAIN, Split.DEV):
        with pytest.raises(StoreError, match="role 'sealed'"):
            sealed.append_interactions([interaction(split=split)])
    assert sealed.append_interactions([interaction(split=Split.SEALED)]) == 1
    assert store.list_episodes(splits=ALL) == []


def test_feedback_is_kept_once_and_listed_oldest_first(store: Store):
    late, early = feedback("late", episode_id="e1"), feedback("early", interaction_id="i1", created_at=1.0)
    assert store.append_feedback(late)
    assert store.append_feedback(replace(early, metric_name="demonstration", value=[{"role": "assistant"}]))
    assert not store.append_feedback(replace(late, value=False))
    assert [f.id for f in store.list_feedback()] == ["early", "late"]
    assert store.list_feedback(metric_name="thumb") == [late]


@pytest.mark.parametrize("odd", ODD)
def test_times_that_are_no_numbers_are_refused(store: Store, odd: float):
    store.append_interactions([interaction()])
    reward = Reward(
        episode_id="e1", interaction_id="i1", verifier="v", version="1", policy="p", value=1.0, created_at=odd
    )
    for append in (
        lambda: store.append_feedback(feedback(episode_id="e1", created_at=odd)),
        lambda: store.append_verdicts([verdict(created_at=odd)]),
        lambda: store.append_verdicts([verdict(seconds=odd)]),
        lambda: store.add_reward(reward),
    ):
        with pytest.raises(RequestError, match=f"{odd}; a finite number of seconds"):
            append()
    assert (store.list_feedback(), store.list_verdicts(), store.list_rewards()) == ([], [], [])


@pytest.mark.parametrize("named", [{"id_": "f\0"}, {"episode_id": "e\0"}, {"metric_name": "m\0"}])
def test_feedback_whose_names_no_database_keeps_is_refused(store: Store, named: dict[str, str]):
    with pytest.raises(RequestError, match="NUL"):
        store.append_feedback(feedback(**{"episode_id": "e", **named}))
    assert store.list_feedback() == []


def test_the_order_of_ids_is_that_of_their_code_points(store: Store):
    ids = ["a", "B", "_", "\u00e4", "b", "A", "-", "Z", "a-b", "a_b", "\U0001f44b", "\ufffd"]
    store.append_interactions([interaction(f"i{id_}", episode=id_) for id_ in ids])
    assert [episode.id for episode in store.list_episodes(splits=ALL)] == sorted(ids)
    for id_ in ids:
        store.append_feedback(feedback(id_, episode_id="e"))
    assert [item.id for item in store.list_feedback()] == sorted(ids)


@pytest.mark.parametrize("both", [True, False])
def test_feedback_names_exactly_one_thing(store: Store, both: bool):
    named = {"interaction_id": "i", "episode_id": "e"} if both else {}
    with pytest.raises(RequestError, match="exactly one"):
        store.append_feedback(feedback(**named))


def test_feedback_whose_value_is_no_json_is_refused(store: Store):
    with pytest.raises(RequestError, match="value of feedback 'f1'"):
        store.append_feedback(feedback(episode_id="e", value=float("inf")))
    assert not store.knows_feedback("f1")


def test_early_feedback_waits_is_listed_and_is_matched_by_its_record(store: Store):
    one, two = feedback("one", interaction_id="i1"), feedback("two", episode_id="e1", created_at=6.0)
    other = feedback("other", interaction_id="i9", created_at=7.0)
    for item in (other, two, one):
        store.append_feedback(item)
    assert store.unmatched_feedback() == [one, two, other]
    assert store.unmatched_feedback([interaction()]) == [one, two]
    assert not store.holds(one)
    store.append_interactions([interaction()])
    assert store.unmatched_feedback() == [other]
    assert store.list_feedback() == [one, two, other]
    assert store.holds(one)
    assert store.holds(two)
    assert not store.holds(other)


def test_moved_feedback_is_known_but_no_longer_listed(store: Store):
    store.append_feedback(feedback(interaction_id="i1"))
    store.mark_feedback_moved("f1")
    store.append_interactions([interaction()])
    assert store.list_feedback() == []
    assert store.unmatched_feedback() == []
    assert store.knows_feedback("f1")
    assert not store.append_feedback(feedback(interaction_id="i1"))


def test_one_verdict_per_episode_verifier_and_version(store: Store):
    store.append_interactions([interaction()])
    first, newer = verdict(detail="odd \ud800"), verdict(version="2", created_at=10.0, outcome=Outcome.FAIL, score=0.0)
    assert store.append_verdicts([first, newer, verdict(score=0.5)]) == 2
    assert store.append_verdicts([verdict(score=0.5)]) == 0
    assert store.list_verdicts() == [replace(first, detail="odd \\ud800"), newer]


def test_a_verdict_needs_its_episode_and_a_score_in_range(store: Store):
    store.append_interactions([interaction()])
    with pytest.raises(NotFoundError, match="'nowhere'"):
        store.append_verdicts([verdict(), verdict("nowhere")])
    for score in (1.5, float("nan")):
        with pytest.raises(RequestError, match="score"):
            store.append_verdicts([verdict(score=score)])
    assert store.list_verdicts() == []


def test_the_reward_goes_to_the_last_main_line_interaction(store: Store):
    store.append_interactions(
        [interaction("a", at=1.0), interaction("b", at=2.0), interaction("side", at=3.0, main_line=False)]
    )
    store.append_interactions([interaction("only-side", episode="e2", main_line=False)])
    store.append_verdicts([verdict(score=0.5), verdict("e2"), verdict(version="2", outcome=Outcome.ABSTAIN, score=0.0)])
    expected = Reward(
        episode_id="e1",
        interaction_id="b",
        verifier="numeric",
        version="1",
        policy="last-turn",
        value=0.5,
        created_at=9.0,
    )
    assert store.list_rewards() == [expected]
    other = replace(expected, interaction_id="a", policy="all-turns")
    assert store.add_reward(other)
    assert not store.add_reward(replace(other, value=0.0))
    assert store.list_rewards() == [other, expected]
    with pytest.raises(NotFoundError, match="'nowhere'"):
        store.add_reward(replace(other, interaction_id="nowhere"))


def test_a_manifest_is_kept_under_its_hash_and_never_changes(store: Store):
    assert store.get_manifest("h1") is None
    assert store.add_manifest("h1", {"ids": ["a"]}, time=1.0)
    assert not store.add_manifest("h1", {"ids": ["a"]}, time=2.0)
    with pytest.raises(ConflictError, match="'h1'"):
        store.add_manifest("h1", {"ids": ["b"]}, time=3.0)
    assert store.get_manifest("h1") == {"ids": ["a"]}
