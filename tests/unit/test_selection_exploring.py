"""Which tasks are asked again, in which order, and which right answers are beyond what may train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_world import asked, sum_task, verdict_on
from tidegate.core.selection.episodes import verdicts_by_episode
from tidegate.core.selection.exploring import Asked, is_success, surplus, tasks_to_explore
from tidegate.core.selection.sifting import Sifted
from tidegate.core.types import Episode, Interaction, Outcome, Split


def episode_of(*calls: Interaction) -> Episode:
    return Episode(id=calls[0].episode_id, user_key=calls[0].user_key, split=calls[0].split, interactions=calls)


def explore(traffic: Sequence[tuple[Interaction, bool | None]], **options: Any) -> Sifted[Asked]:
    verdicts = [verdict_on(call, passed=passed) for call, passed in traffic if passed is not None]
    fields: dict[str, Any] = {
        "reserved": (), "objection": lambda task: None, "threshold": 1.0, "most": 100, "seed": 0,
    }  # fmt: skip
    return tasks_to_explore(
        [episode_of(call) for call, _ in traffic], verdicts_by_episode(verdicts), **{**fields, **options}
    )


def test_failures_come_first_and_what_is_known_little_lies_between() -> None:
    often = [(asked(sum_task(1), user=f"a{n}"), n > 0) for n in range(3)]
    traffic = [
        *often,
        (asked(sum_task(2), user="b"), True),
        (asked(sum_task(3), user="c"), False),
        (asked(sum_task(4), user="d"), None),
        (asked(sum_task(5), user="e0"), False),
        (asked(sum_task(5), user="e1"), False),
    ]
    kept = explore(traffic).kept
    assert [(item.task.id, item.solved, item.judged) for item in kept] == [
        ("task-5", 0, 2), ("task-3", 0, 1), ("task-4", 0, 0), ("task-1", 2, 3), ("task-2", 1, 1),
    ]  # fmt: skip
    assert [item.chance for item in kept] == [1 / 4, 1 / 3, 1 / 2, 3 / 5, 2 / 3]


def test_an_abstention_is_no_judgement() -> None:
    call = asked(sum_task(1))
    abstained = replace(verdict_on(call, passed=True), outcome=Outcome.ABSTAIN)
    (kept,) = tasks_to_explore(
        [episode_of(call)], {call.episode_id: [abstained]}, reserved=(), objection=lambda task: None,
        threshold=0.0, most=1, seed=0,
    ).kept  # fmt: skip
    assert (kept.solved, kept.judged) == (0, 0)


@pytest.mark.parametrize(
    ("outcome", "score", "expected"),
    [
        (Outcome.PASS, 1.0, True),
        (Outcome.PASS, 0.69, False),
        (Outcome.FAIL, 0.7, True),
        (Outcome.ABSTAIN, 1.0, False),
    ],
)
def test_a_success_is_what_curation_takes_for_one(outcome: Outcome, score: float, expected: bool) -> None:
    verdict = replace(verdict_on(asked(sum_task(1)), passed=True), outcome=outcome, score=score)
    assert is_success(verdict, threshold=0.7) is expected


def test_a_task_belongs_to_the_user_who_asked_it_first() -> None:
    traffic = [
        (asked(sum_task(1), user="late", created_at=30.0), False),
        (asked(sum_task(1), user="early", created_at=20.0), False),
    ]
    (kept,) = explore(traffic).kept
    assert (kept.user_key, kept.judged) == ("early", 2)


def test_the_seed_decides_between_equals_and_the_cap_drops_the_rest() -> None:
    traffic = [(asked(sum_task(number), user=f"u{number}"), False) for number in range(30)]
    chosen = {seed: [item.task.id for item in explore(traffic, most=5, seed=seed).kept] for seed in range(3)}
    assert len({tuple(ids) for ids in chosen.values()}) == 3
    assert [item.task.id for item in explore(traffic[::-1], most=5, seed=1).kept] == chosen[1]
    dropped = explore(traffic, most=5, seed=1).dropped
    assert {item.reason for item in dropped} == {"task_cap"}
    assert {item.id for item in dropped} == {f"task-{n}" for n in range(30)} - set(chosen[1])


def test_episodes_without_consent_of_other_splits_or_without_a_task_are_dropped() -> None:
    mixed = asked(sum_task(4), name="mixed")
    dev_call = replace(mixed, id="i-dev", split=Split.DEV)
    sifted = tasks_to_explore(
        [
            episode_of(asked(sum_task(1), name="private", consent=False)),
            episode_of(asked(sum_task(2), name="dev", split=Split.DEV)),
            episode_of(asked(sum_task(3), name="sealed", split=Split.SEALED)),
            Episode(id="e-mixed", user_key="u", split=Split.TRAIN, interactions=(mixed, dev_call)),
            episode_of(asked(None, name="chat")),
        ],
        {}, reserved=(), objection=lambda task: None, threshold=1.0, most=9, seed=0,
    )  # fmt: skip
    assert sifted.kept == ()
    assert {item.id: item.reason for item in sifted.dropped} == {
        "e-private": "no_consent", "e-dev": "not_train", "e-sealed": "not_train", "e-mixed": "not_train",
        "e-chat": "no_task",
    }  # fmt: skip


def test_what_dev_users_asked_in_nearly_the_same_words_is_never_asked() -> None:
    words = "a farmer has so many sheep in a field by the river and sells a few of them on the market today"
    near = sum_task(1, messages=({"role": "user", "content": f"Hello! {words}"},))
    traffic = [(asked(near, user="a"), False), (asked(sum_task(2), user="b"), False)]
    sifted = explore(traffic, reserved=[({"role": "user", "content": words},)])
    assert [item.task.id for item in sifted.kept] == ["task-2"]
    assert [(item.id, item.reason, item.source) for item in sifted.dropped] == [("task-1", "asked_by_dev", "task")]


def test_an_objection_is_the_reason() -> None:
    sifted = explore([(asked(sum_task(1)), False)], objection=lambda task: f"no {task.id}")
    assert [(item.id, item.reason, item.kind) for item in sifted.dropped] == [("task-1", "no task-1", "sums")]


@pytest.mark.parametrize(
    ("answers", "most", "expected"),
    [
        ("abc", 3, set()),
        ("abc", 2, {2}),
        ("aab", 2, {1}),
        ("aabb", 3, {3}),
        ("aaaa", 2, {2, 3}),
        ("", 1, set()),
    ],
)
def test_copies_are_surplus_before_the_latest(answers: str, most: int, expected: set[int]) -> None:
    assert surplus(answers, most=most) == expected


@given(st.lists(st.sampled_from("abcd"), max_size=8), st.integers(1, 8))
def test_as_many_different_answers_stay_as_there_is_room_for(answers: list[str], most: int) -> None:
    left = [answer for position, answer in enumerate(answers) if position not in surplus(answers, most=most)]
    assert len(left) == min(most, len(answers))
    assert len(set(left)) == min(most, len(set(answers)))
