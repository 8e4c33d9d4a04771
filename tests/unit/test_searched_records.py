"""What a search at serving leaves: its answer is judged, shown and trained as what it is, its choices as a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from curation_world import TASK, Says, call, episode, reasons, run, shown, verdict
from rollout_world import RolloutWorld, asked, sum_task
from tidegate.core.searched import answer_of, is_searched, searched_groups
from tidegate.core.searches import Scored, Search, SearchKind, parse_search, pick_best, pick_majority
from tidegate.core.selection.replay import Earlier
from tidegate.core.strategy import episode_cluster, vote_of
from tidegate.core.types import Choice, Episode, FinishReason, Interaction, Sampling, Task
from tidegate.curation import read_batch
from tidegate.cycle.machine import Step
from tidegate.cycle.stages import traffic_decoding
from tidegate.signals import judge_answer, score_episodes

SEARCHED = Sampling(n=3, search="best-of-3")


def choices(*texts: str, delivered: int | None = 1) -> tuple[Choice, ...]:
    return tuple(
        Choice(
            index=index, token_ids=(30 + index, 2), logprobs=(-0.5, -0.25), text=text, delivered=index == delivered,
            finish_reason=FinishReason.CANCELLED if delivered is None else FinishReason.STOP,
        )
        for index, text in enumerate(texts)
    )  # fmt: skip


def searched(name: str = "e", *texts: str, **changes: Any) -> Episode:
    """Three choices, of which the second, which is right, was delivered."""
    made = choices(*(texts or ("5", "2", "2")), delivered=changes.pop("delivered", 1))
    return episode(name, call(f"i-{name}", episode_id=name, sampling=SEARCHED, choices=made, **changes))


def test_the_answer_of_a_call_is_what_its_client_got() -> None:
    made = searched()
    (interaction,) = made.interactions
    assert answer_of(interaction).index == 1
    assert answer_of(call("i")).index == 0
    assert answer_of(replace(interaction, choices=choices("a", "b", delivered=None))).index == 0
    assert is_searched(made)
    assert not is_searched(episode("e"))
    assert not is_searched(episode("e", replace(interaction, main_line=False), call("i2")))
    assert episode_cluster(made) == episode_cluster(episode("e"))  # "2" both times


def test_it_is_the_answer_that_is_judged() -> None:
    """The first choice is wrong, and nobody got it."""
    (found,) = score_episodes([searched()], {"says": Says()}, (), lambda: 1.0).verdicts
    assert found.score == 1.0


def test_supervised_training_takes_the_delivered_answer_without_its_log_probabilities() -> None:
    batch = run([searched()], [verdict("e")])
    (example,) = batch.examples
    assert (example.id, example.token_ids) == ("e", (5, 6, 31, 2))
    assert example.logprobs == ()  # the best of three is no draw of which they are the probabilities
    plain = run([episode("e")], [verdict("e")]).examples[0]
    assert plain.logprobs != ()


def test_objectives_that_compare_answers_take_all_choices_or_none() -> None:
    made = searched()
    groups = searched_groups([made, episode("plain")])
    assert [group.id for group in groups] == ["e 0", "e 1", "e 2"]
    judged = score_episodes(groups, {"says": Says()}, (), lambda: 1.0).verdicts
    batch = run([made, *groups], [verdict("e"), *judged], keep_failures=True)
    assert reasons(batch) == {"e": "searched", "e 0": "kept", "e 1": "kept", "e 2": "kept"}
    assert [(example.id, example.reward, example.token_ids[2]) for example in batch.examples] == [
        ("e 0", 0.0, 30), ("e 1", 1.0, 31), ("e 2", 1.0, 32),
    ]  # fmt: skip
    assert len({example.group for example in batch.examples}) == 1
    assert all(example.logprobs for example in batch.examples)  # each of the three is a draw


@pytest.mark.parametrize(
    "changed",
    [
        {"task": None},
        {"delivered": None},
        {"main_line": False},
    ],
)
def test_what_is_no_group_is_not_taken_apart(changed: dict[str, Any]) -> None:
    assert searched_groups([searched("e", **changed)]) == []


def test_what_an_agent_did_after_other_choices_is_not_known() -> None:
    first, second = searched("e").interactions[0], call("i2", task=None)
    assert searched_groups([episode("e", first, second)]) == []
    batch = run([episode("e", first, second)], [verdict("e")], keep_failures=True)
    assert reasons(batch) == {"e": "searched"}


def replayed(example_id: str, *, reward: float | None, keep_failures: bool) -> str:
    made = searched()
    old = run([made], [verdict("e")]).examples[0]
    item = Earlier(example=replace(old, id=example_id, reward=reward), episode=made)
    fresh = [
        episode(f"f{n}", call(f"i-f{n}", tokens=(40 + n, 2), messages=({"role": "user", "content": str(n)},)))
        for n in range(20)
    ]
    batch = run(
        fresh, [verdict("e"), *(verdict(each.id) for each in fresh)], replay=[item], keep_failures=keep_failures,
        settings={"max_per_user": 100},
    )  # fmt: skip
    (found,) = [entry for entry in batch.manifest["items"] if entry["source"] == "replay"]
    return found["reason"]


def test_a_choice_that_nobody_got_is_not_replayed_on_the_verdict_of_the_one_that_somebody_got() -> None:
    assert replayed("e", reward=1.0, keep_failures=False) == "kept"
    assert replayed("e 0", reward=0.0, keep_failures=False) == "searched"
    assert replayed("e", reward=1.0, keep_failures=True) == "searched"
    assert replayed("fb-1", reward=None, keep_failures=False) == "kept"  # a demonstration about the episode


def test_a_demonstration_on_a_searched_episode_trains() -> None:
    batch = run([searched()], [verdict("e", 0.0)], [shown("f1")])
    assert reasons(batch)["f1"] == "kept"


def test_the_gate_decodes_as_traffic_did_without_its_searches() -> None:
    assert traffic_decoding([searched()]) == Sampling()


@pytest.mark.parametrize(("objective", "kept"), [("sft", {"e-one"}), ("grpo", {"e-one 0", "e-one 1", "e-one 2"})])
async def test_a_cycle_judges_every_choice_where_its_objective_compares_them(
    tmp_path: Path, objective: str, kept: set[str]
) -> None:
    world = RolloutWorld(tmp_path, rollouts={"samples": 0})
    made = choices("5", "8", "no idea")
    world.record(asked(sum_task(7), name="one", sampling=SEARCHED, choices=made), passed=True)
    config = {"training": {**world.config["training"], "objective": objective}}
    result = await world.run(Step.CURATE, {Step.EXPLORE: {}}, **config)
    batch = read_batch(tmp_path / "batches" / result.output["path"])
    assert {example.id for example in batch.examples} == kept
    rewards = {example.id: example.reward for example in batch.examples}
    assert objective == "sft" or rewards == {"e-one 0": 0.0, "e-one 1": 1.0, "e-one 2": 0.0}


# --- picking ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "kind", "n"), [("best-of-2", "best", 2), ("majority-of-8", "majority", 8)])
def test_a_search_is_read_and_written(text: str, kind: str, n: int) -> None:
    assert parse_search(text, most=8) == Search(kind=SearchKind(kind), n=n)
    assert str(parse_search(text, most=8)) == text


@pytest.mark.parametrize("text", ["best-of-1", "best-of-9", "best-of--2", "Best-of-2", "best-of-2 ", "best-of-٣", "8"])
def test_what_is_no_search_is_refused_with_the_bounds(text: str) -> None:
    with pytest.raises(ValueError, match="N from 2 to 8"):
        parse_search(text, most=8)
    with pytest.raises(ValueError, match=r"server\.max_search"):
        parse_search(text, most=1)


@pytest.mark.parametrize(
    ("scores", "index", "support"),
    [
        ([0.0, 1.0, 1.0], 1, 2),
        ([0.2, 0.4, 0.1], 1, 0),
        ([None, 0.0, None], 1, 0),
        ([None, None, None], 0, 0),
        ([0.0, 0.0, 0.0], 0, 0),
    ],
)
def test_the_best_is_the_first_of_the_highest_score(scores: Sequence[float | None], index: int, support: int) -> None:
    picked = pick_best([Scored(score=score, passed=score == 1.0) for score in scores])
    assert (picked.index, picked.support) == (index, support)


@pytest.mark.parametrize(
    ("texts", "index", "support"),
    [(("a", "B.", "b", "c"), 1, 2), (("a", "b"), 0, 1), (("", "", "a"), 2, 1), (("", " "), 0, 0)],
)
def test_the_majority_is_of_those_that_answer(texts: Sequence[str], index: int, support: int) -> None:
    picked = pick_majority(choices(*texts, delivered=0))
    assert (picked.index, picked.support) == (index, support)


def test_calls_vote_by_name_and_arguments_whatever_their_order() -> None:
    def calling(arguments: str, name: str = "f", **changes: Any) -> Choice:
        made = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        return Choice(index=0, token_ids=(), logprobs=(), text="", tool_calls=(made,), **changes)

    votes = [vote_of(calling(text)) for text in ('{"a": 1, "b": 2}', '{"b":2,"a":1}', '{"a": 1}', "{broken")]
    assert votes[0] == votes[1]
    assert len({*votes, vote_of(calling('{"a": 1}', name="g"))}) == 4
    assert vote_of(calling("{}", invalid_tool_call=True)) is None
    halves = [replace(calling("{}"), text="half \ud83d"), calling('{"a": "\\ud83d"}')]
    assert len({vote_of(choice) for choice in halves}) == 2


def test_a_verifier_judges_one_transcript_now() -> None:
    answer = [{"role": "assistant", "content": "2"}]
    assert judge_answer({"says": Says()}, TASK, answer).score == 1.0

    class Raises(Says):
        def judge(self, task: Task, transcript: Any) -> Any:
            raise ZeroDivisionError("odd")

    assert judge_answer({"says": Raises()}, TASK, answer).detail.startswith("verifier_error")


def test_a_call_without_a_choice_has_no_answer() -> None:
    bare: Interaction = call("i", choices=())
    with pytest.raises(LookupError):
        answer_of(bare)
