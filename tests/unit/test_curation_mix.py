"""Near-successes, failures for rewards, weights, demonstrations beside successes, and replay of earlier batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from curation_world import TASK, call, episode, reasons, run, said, shown, task_demonstration, verdict
from tidegate.core.selection.replay import Earlier
from tidegate.core.selection.sequences import Fresh
from tidegate.core.types import Episode, Example, Feedback, Outcome, Split, Task, Verdict
from tidegate.curation import Batch, read_batch, write_batch

LEGS = replace(TASK, kind="legs")


def solved(name: str, count: int, *, task: Task = TASK) -> list[Episode]:
    """So many episodes of other users, each with another answer."""
    return [
        episode(f"{name}{n}", said(f"i-{name}{n}", f"It is {n}.", task=task), user=f"u-{name}{n}") for n in range(count)
    ]


def passed(episodes: Sequence[Episode]) -> list[Verdict]:
    return [verdict(made.id) for made in episodes]


def demonstrations(name: str, count: int, *, task: Task = LEGS) -> tuple[list[Episode], list[Feedback]]:
    """So many failed episodes with other prompts, and what would have been right."""
    asked = [replace(task, id=f"{name}{n}", messages=({"role": "user", "content": f"{n}?"},)) for n in range(count)]
    failed = [
        episode(f"{name}{n}", call(f"i-{name}{n}", task=each, messages=each.messages), user=f"u-{name}{n}")
        for n, each in enumerate(asked)
    ]
    return failed, [shown(f"f-{name}{n}", episode_id=f"{name}{n}") for n in range(count)]


def weights(batch: Batch) -> dict[str, float]:
    return {example.id: example.weight for example in batch.examples}


def sources(batch: Batch) -> dict[str, int]:
    return dict(Counter(example.source for example in batch.examples))


# --- near-successes -----------------------------------------------------------------------------------------


def test_curation_near_successes_train_at_less_weight_and_are_no_fresh_successes() -> None:
    made = solved("e", 10)
    scores = [0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0]
    judged = [verdict(each.id, score) for each, score in zip(made, scores, strict=True)]
    batch = run(made, judged, settings={"max_user_share": 1.0})
    assert set(weights(batch)) == {"e6", "e7", "e8", "e9"}
    assert batch.fresh == 3
    assert weights(batch)["e6"] / weights(batch)["e7"] == pytest.approx(0.3)
    assert sum(weights(batch).values()) == pytest.approx(4.0)
    rewards = {item["id"]: item["reward"] for item in batch.manifest["items"]}
    assert rewards == {f"e{n}": score for n, score in enumerate(scores)}


@pytest.mark.parametrize(
    ("answers", "user", "cap", "reason"),
    [
        (["Two."] * 3, "", "max_per_prompt", "duplicate"),
        (["It is two.", "it is two.", "IT IS TWO."], "", "max_per_cluster", "near_duplicate"),
        (["It is 2", "Two", "1 + 1 = 2"], "u", "max_per_user", "user_cap"),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_curation_a_near_success_takes_no_successes_place(
    answers: list[str], user: str, cap: str, reason: str, seed: int
) -> None:
    low = solved("low", 9)
    made = [episode(f"e{n}", said(f"i{n}", text), user=user or f"u{n}") for n, text in enumerate(answers)]
    judged = [*(verdict(each.id, 0.0) for each in low), verdict("e0", 0.9), verdict("e1", 1.0), verdict("e2", 0.9)]
    settings = {"near_success_quantile": 0.5, "max_user_share": 1.0, "max_per_prompt": 9, "max_per_cluster": 9, cap: 1}
    found = reasons(run([*low, *made], judged, settings=settings, seed=seed))
    assert (found["e0"], found["e1"], found["e2"]) == (reason, "kept", reason)


def test_curation_where_failures_train_a_users_cap_prefers_no_success() -> None:
    """Objectives that compare answers would take the lost failures for a higher mean."""
    made = [replace(each, user_key="u") for each in solved("e", 8)]
    judged = [verdict(each.id, float(n % 2)) for n, each in enumerate(made)]
    successes = 0.0
    for seed in range(30):
        batch = run(made, judged, settings={"max_per_user": 4}, seed=seed, keep_failures=True)
        successes += sum(example.reward or 0.0 for example in batch.examples)
    assert 45 <= successes <= 75  # of 120, four of eight each time; 120 would be a preference


@pytest.mark.parametrize("low", [0.0, 0.01, 0.4])
def test_curation_binary_scores_have_no_near_successes(low: float) -> None:
    made = solved("e", 10)
    judged = [verdict(each.id, low if n < 7 else 1.0) for n, each in enumerate(made)]
    for quantile in (0.0, 0.55, 0.9, 1.0):
        batch = run(made, judged, settings={"near_success_quantile": quantile})
        assert batch.counts == {"below_threshold": 7, "kept": 3}


def test_curation_crumbs_for_wrong_answers_are_no_near_successes() -> None:
    made = solved("e", 10)
    judged = [verdict(each.id, score) for each, score in zip(made, [0.0] * 7 + [0.01, 0.3, 1.0], strict=True)]
    assert run(made, judged).counts == {"below_threshold": 9, "kept": 1}


# --- failures that stay -------------------------------------------------------------------------------------


def test_curation_keeps_failures_for_objectives_that_learn_from_rewards() -> None:
    copies = [episode(f"c{n}", user=f"u{n}") for n in range(6)]
    judged = [verdict(each.id, float(n % 2)) for n, each in enumerate(copies)]
    batch = run(copies, judged, keep_failures=True)
    assert weights(batch) == {f"c{n}": 1.0 for n in range(6)}
    assert [example.reward for example in batch.examples] == [0.0, 1.0] * 3
    assert len({example.group for example in batch.examples}) == 1
    assert batch.fresh == 3
    assert batch.manifest["keep_failures"] is True
    assert run(copies, judged).counts == {"below_threshold": 3, "kept": 3}
    dropped = [verdict("c0", 0.0, outcome=Outcome.ABSTAIN), *judged[1:]]
    assert run(copies, dropped, keep_failures=True).counts == {"abstained": 1, "kept": 5}


def test_curation_no_strategy_weighs_more_where_rewards_count() -> None:
    made = [*solved("m", 4), episode("odd", said("i-odd", "Seven, I think"), user="u-odd"), *solved("f", 1, task=LEGS)]
    found = weights(run(made, passed(made), keep_failures=True))
    assert found["odd"] == found["m0"] < found["f0"]
    found = weights(run(made, passed(made)))
    assert found["odd"] > found["m0"]


# --- weights ------------------------------------------------------------------------------------------------


def test_curation_rare_kinds_and_rare_strategies_weigh_more() -> None:
    many, few = solved("m", 9), solved("f", 1, task=LEGS)
    odd = [episode("odd", said("i-odd", "Seven, I think", task=TASK), user="u-odd")]
    made = [*many, *few, *odd]
    found = weights(run(made, passed(made)))
    kind = {"sums": 11 / (10**0.5 + 1) / 10**0.5, "legs": 11 / (10**0.5 + 1)}
    assert found["f0"] == pytest.approx(kind["legs"])
    assert found["m0"] == pytest.approx(kind["sums"] * 10 / (3 * 4))
    assert found["odd"] == pytest.approx(kind["sums"] * 10 / 4)


def test_curation_another_notion_of_strategy_may_be_plugged_in() -> None:
    made = solved("e", 4)
    batch = run(made, passed(made), cluster_of=lambda seen: "first" if seen.id == "e0" else "rest")
    assert [example.cluster for example in batch.examples] == ["first", "rest", "rest", "rest"]
    assert weights(batch)["e0"] / weights(batch)["e1"] == pytest.approx(3**0.5)


def test_curation_one_users_weight_is_scaled_and_none_of_the_examples_dropped() -> None:
    made = solved("e", 10)
    made = [replace(each, user_key="one") if n < 5 else each for n, each in enumerate(made)]
    batch = run(made, passed(made))
    assert batch.counts == {"kept": 10}
    found = weights(batch)
    assert sum(found[f"e{n}"] for n in range(5)) == pytest.approx(found["e9"])


def test_curation_near_copies_are_limited() -> None:
    text = "well, it is the sum of both and that is 2"
    told = [text, text.upper(), text.title(), text.capitalize(), text.replace("sum", "SUM")]
    made = [episode(f"e{n}", said(f"i{n}", each), user=f"u{n}") for n, each in enumerate(told)]
    batch = run(made, passed(made), settings={"max_per_cluster": 2})
    assert batch.counts == {"kept": 2, "near_duplicate": 3}


# --- demonstrations beside fresh successes ------------------------------------------------------------------


def test_curation_a_kind_that_is_never_solved_keeps_all_its_demonstrations() -> None:
    made = solved("e", 36)
    failed, told = demonstrations("d", 20)
    batch = run(
        [*made, *failed],
        [*passed(made), *(verdict(each.id, 0.0) for each in failed)],
        told,
        settings={"max_examples": 36, "min_fresh": 12},
    )
    assert sources(batch) == {"episode": 36, "feedback": 20}
    assert batch.counts == {"below_threshold": 20, "kept": 56}
    assert set(weights(batch).values()) == {1.0}


@pytest.mark.parametrize(("successes", "trained"), [(0, 30), (1, 30), (6, 18), (9, 10), (12, 1), (18, 2)])
def test_curation_successes_of_a_kind_take_the_place_of_its_demonstrations(successes: int, trained: int) -> None:
    own = solved("e", successes, task=LEGS)
    failed, told = demonstrations("d", 30)
    settings = {"max_examples": 36, "min_fresh": 12}
    batch = run([*own, *failed], passed(own), told, settings=settings)
    assert sources(batch).get("feedback", 0) == trained
    assert batch.counts.get("demonstration_share", 0) == 30 - trained


def test_curation_what_was_found_with_a_hint_keeps_no_demonstration_away_and_is_under_the_caps() -> None:
    own = solved("e", 12, task=LEGS)
    found = run(own, passed(own)).examples
    aided = [
        Fresh(example=replace(example, source="rationalized", logprobs=()), user_key="u", prompt=LEGS.messages)
        for example in found
    ]
    failed, told = demonstrations("d", 30)
    batch = run(failed, [], told, rationalized=aided, settings={"max_per_user": 9, "max_per_cluster": 12})
    assert sources(batch) == {"rationalized": 9, "feedback": 30}
    assert batch.fresh == 0
    batch = run(failed, [], told, rationalized=aided, quarantined={"e0"})
    assert sources(batch) == {"rationalized": 3, "feedback": 30}
    assert (batch.counts["quarantined"], batch.counts["near_duplicate"]) == (1, 8)


def test_curation_given_demonstrations_are_under_no_share() -> None:
    made = solved("e", 20)
    given = [
        task_demonstration(
            replace(TASK, id=f"g{n}", messages=({"role": "user", "content": f"{n}"},)),
            ({"role": "assistant", "content": "2"},),
        )
        for n in range(30)
    ]
    assert sources(run(made, passed(made), demonstrations=given)) == {"episode": 20, "demonstration": 30}


# --- replay -------------------------------------------------------------------------------------------------


def earlier(episodes: Sequence[Episode], batch: Batch) -> list[Earlier]:
    by_id = {made.id: made for made in episodes}
    return [Earlier(example=example, episode=by_id[example.id]) for example in batch.examples]


def test_curation_replays_a_share_of_earlier_batches_balanced_by_kind() -> None:
    before = [*solved("a", 30), *solved("b", 4, task=LEGS)]
    old = run(before, passed(before))
    made = solved("e", 34)
    pool = earlier(before, old)
    batch = run(made, [*passed(before), *passed(made)], replay=pool)
    assert sources(batch) == {"episode": 34, "replay": 6}
    again = [example for example in batch.examples if example.source == "replay"]
    assert Counter(example.kind for example in again) == {"sums": 3, "legs": 3}
    known = {example.id: example for example in old.examples}
    for example in again:
        same = known[example.id]
        assert replace(example, weight=1.0, source="episode") == replace(same, weight=1.0)
    assert {example.weight for example in again} == {1.0} < {example.weight for example in old.examples} | {1.0}
    assert batch.counts == {"kept": 40, "not_drawn": 28}
    assert batch.fresh == 34
    other = run(made, [*passed(before), *passed(made)], replay=pool, seed=1)
    assert {e.id for e in other.examples} != {e.id for e in batch.examples}


def test_curation_replay_accumulates_over_windows() -> None:
    windows = [solved(name, 40) for name in "abc"]
    judged = [verdict for window in windows for verdict in passed(window)]
    pool: dict[str, Earlier] = {}
    sizes: list[int] = []
    for window in windows:
        batch = run(window, judged, replay=list(pool.values()))
        sizes.append(sources(batch).get("replay", 0))
        origin = {made.id: made for each in windows for made in each}
        pool |= {e.id: Earlier(example=e, episode=origin[e.id]) for e in batch.examples}
    assert sizes == [0, 7, 7]
    drawn = Counter(e.id[0] for e in batch.examples if e.source == "replay")
    assert drawn["a"] > 0
    assert drawn["b"] > 0
    assert len(pool) == 120


@pytest.mark.parametrize(
    ("changed", "judged", "options", "reason"),
    [
        ({}, [verdict("a0")], {}, "kept"),
        ({}, [verdict("a0")], {"quarantined": {"a0"}}, "quarantined"),
        ({}, [verdict("a0"), verdict("a0", 0.0, version="2", created_at=2.0)], {}, "below_threshold"),
        ({}, [], {}, "below_threshold"),
        ({}, [], {"keep_failures": True}, "kept"),
        ({"split": Split.DEV}, [verdict("a0")], {}, "not_train"),
        ({"interactions": (call("i", consent=False),)}, [verdict("a0")], {}, "no_consent"),
        ({}, [verdict("a0")], {"settings": {"replay_share": 0.0}}, "not_drawn"),
        ({}, [verdict("a0")], {"settings": {"max_age_days": 1e-9}}, "kept"),
    ],
)
def test_curation_every_reason_against_replay(
    changed: dict[str, Any], judged: list[Verdict], options: dict[str, Any], reason: str
) -> None:
    before = solved("a", 1)
    old = run(before, passed(before))
    (item,) = earlier(before, old)
    item = replace(item, episode=replace(item.episode, **changed))
    made = solved("e", 20)
    batch = run(made, [*passed(made), *judged], replay=[item], **options)
    (found,) = [entry for entry in batch.manifest["items"] if entry["source"] == "replay"]
    assert (found["id"], found["reason"]) == ("a0", reason)


def test_curation_what_lies_in_the_window_is_not_replayed() -> None:
    made = solved("e", 20)
    old = run(made, passed(made))
    batch = run(made, [verdict(each.id, 0.0) for each in made[:3]] + passed(made[3:]), replay=earlier(made, old))
    assert batch.counts == {"below_threshold": 3, "in_window": 20, "kept": 17}


def test_curation_near_successes_are_not_replayed() -> None:
    before = solved("a", 10)
    judged = [verdict(each.id, 0.9 if n == 9 else 0.0) for n, each in enumerate(before)]
    old = run(before, judged)
    assert [example.reward for example in old.examples] == [0.9]
    made = solved("e", 20)
    batch = run(made, [*judged, *passed(made)], replay=earlier(before, old))
    assert reasons(batch)["a9"] == "below_threshold"


def test_curation_copies_and_users_are_counted_with_the_fresh() -> None:
    before = [replace(each, user_key="one") for each in solved("a", 3)]
    before += [episode("copy", said("i-copy", "It is 0."), user="other")]
    old = run(before, passed(before))
    made = [replace(each, user_key="one") if n == 0 else each for n, each in enumerate(solved("e", 20))]
    batch = run(
        made,
        [*passed(before), *passed(made)],
        replay=earlier(before, old),
        settings={"max_per_user": 2, "max_per_prompt": 1, "max_per_cluster": 1},
    )
    found = {item["id"]: item["reason"] for item in batch.manifest["items"] if item["source"] == "replay"}
    # each answer of "one" was given again, by e0 to e2, and so was the copy
    assert found == dict.fromkeys(("a0", "a1", "a2", "copy"), "duplicate")
    batch = run(
        made,
        [*passed(before), *passed(made)],
        replay=earlier(before, old),
        settings={"max_per_user": 2, "max_per_prompt": 3},
    )
    found = Counter(item["reason"] for item in batch.manifest["items"] if item["source"] == "replay")
    assert found == {"kept": 2, "user_cap": 2}


def test_curation_demonstrations_of_earlier_windows_are_replayed() -> None:
    failed, told = demonstrations("d", 1)
    old = run(failed, [], told)
    assert [example.messages[-1]["content"] for example in old.examples] == ["2"]
    made = solved("e", 20)
    (example,) = old.examples
    batch = run(made, passed(made), told, replay=[Earlier(example=example, episode=failed[0])])
    items = [(item["source"], item["reason"]) for item in batch.manifest["items"] if item["id"] == example.id]
    assert items == [("replay", "kept"), ("feedback", "unknown_episode")]


def test_curation_a_batch_with_every_source_reads_back_as_written(tmp_path: Any) -> None:
    before = solved("a", 3)
    old = run(before, passed(before))
    made = solved("e", 20)
    failed, told = demonstrations("d", 2)
    given: list[Example] = [task_demonstration(TASK, ({"role": "assistant", "content": "2"},))]
    batch = run(
        [*made, *failed],
        [*passed(before), *passed(made)],
        told,
        replay=earlier(before, old),
        demonstrations=given,
    )
    assert sources(batch) == {"episode": 20, "feedback": 2, "demonstration": 1, "replay": 3}
    assert read_batch(write_batch(batch, tmp_path)) == batch
