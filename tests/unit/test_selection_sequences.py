"""Token sequences come from the engine's own tokens, and train exactly what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tidegate.core.selection.sequences import prompt_key, token_sequences
from tidegate.core.strategy import episode_cluster, strategy_cluster
from tidegate.core.types import Choice, Episode, Interaction, Sampling, Split

EOS = 2


def call(prompt: Sequence[int], completion: Sequence[int], number: int = 0) -> Interaction:
    choice = Choice(index=0, token_ids=tuple(completion), logprobs=tuple(-0.1 for _ in completion), text="x")
    return Interaction(
        id=f"i{number}",
        episode_id="e",
        user_key="u",
        split=Split.TRAIN,
        created_at=float(number),
        messages=({"role": "user", "content": "?"},),
        tools=(),
        sampling=Sampling(),
        prompt_token_ids=tuple(prompt),
        choices=(choice,),
        release_id="r0",
        engine_replica="e0",
        latency_s=0.1,
    )


def episode(*calls: Interaction) -> Episode:
    return Episode(id="e", user_key="u", split=Split.TRAIN, interactions=calls)


def test_selection_calls_that_continue_each_other_are_one_sequence() -> None:
    sifted = token_sequences([episode(call([5, 6], [7, EOS]), call([5, 6, 7, EOS, 8, 9], [10, EOS], 1))])
    (fresh,) = sifted.kept
    assert fresh.example.id == "e"
    assert fresh.example.token_ids == (5, 6, 7, EOS, 8, 9, 10, EOS)
    assert fresh.example.loss_mask == (0, 0, 1, 1, 0, 0, 1, 1)
    assert sifted.dropped == ()


def test_selection_calls_whose_prompt_was_tokenised_otherwise_are_a_sequence_each() -> None:
    # The second prompt spells the first completion with other tokens.
    sifted = token_sequences([episode(call([5, 6], [7, EOS]), call([5, 6, 77, EOS, 8], [10, EOS], 1))])
    assert [(item.example.id, item.example.token_ids, item.example.loss_mask) for item in sifted.kept] == [
        ("e 0", (5, 6, 7, EOS), (0, 0, 1, 1)),
        ("e 1", (5, 6, 77, EOS, 8, 10, EOS), (0, 0, 0, 0, 0, 1, 1)),
    ]


def test_selection_a_prompt_that_lacks_the_end_of_turn_does_not_continue() -> None:
    sifted = token_sequences([episode(call([5], [7, EOS]), call([5, 7], [10, EOS], 1))])
    assert [item.example.id for item in sifted.kept] == ["e 0", "e 1"]


@pytest.mark.parametrize(
    "broken",
    [
        replace(call([5], [7, EOS]), prompt_token_ids=()),
        replace(call([5], [7, EOS]), choices=()),
        call([5], []),
        replace(call([5], [7]), choices=(replace(call([5], [7]).choices[0], logprobs=()),)),
        replace(call([5], [7]), choices=(replace(call([5], [7]).choices[0], logprobs=(-0.1, -0.2)),)),
    ],
)
def test_selection_an_episode_without_all_its_tokens_is_dropped(broken: Interaction) -> None:
    sifted = token_sequences([episode(call([4], [5, EOS]), broken)])
    assert sifted.kept == ()
    assert [(item.id, item.reason) for item in sifted.dropped] == [("e", "no_token_ids")]


def test_selection_logprobs_are_those_recorded_and_zero_where_nothing_is_trained() -> None:
    (item,) = token_sequences([episode(call([5, 6], [7, EOS]), call([5, 6, 7, EOS, 8, 9], [10, EOS], 1))]).kept
    assert item.example.logprobs == (0.0, 0.0, -0.1, -0.1, 0.0, 0.0, -0.1, -0.1)
    assert item.example.sampled_at == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.95},
        {"top_k": 40},
        {"temperature": 0.0},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
    ],
)
def test_selection_logprobs_of_another_distribution_are_left_out(changes: dict[str, float]) -> None:
    filtered = replace(call([5, 6, 7, EOS, 8], [10, EOS], 1), sampling=Sampling(**changes))  # type: ignore[arg-type]
    (item,) = token_sequences([episode(call([5, 6], [7, EOS]), filtered)]).kept
    assert item.example.logprobs == ()
    assert len(item.example.token_ids) == 7
    (item,) = token_sequences([episode(replace(filtered, sampling=Sampling(temperature=0.7)))]).kept
    assert len(item.example.logprobs) == 7


@pytest.mark.parametrize("odd", [float("nan"), float("-inf"), 0.5])
def test_selection_what_is_no_log_probability_is_left_out(odd: float) -> None:
    made = call([5], [7, EOS])
    made = replace(made, choices=(replace(made.choices[0], logprobs=(-0.1, odd)),))
    (item,) = token_sequences([episode(made)]).kept
    assert item.example.logprobs == ()


def test_selection_groups_are_of_equal_prompt_tokens() -> None:
    one, same, other = (
        token_sequences([episode(call(prompt, completion))]).kept[0].example
        for prompt, completion in (([5, 6], [7, EOS]), ([5, 6], [8, EOS]), ([5, 7], [7, EOS]))
    )
    assert one.group == same.group != other.group
    assert one.group == prompt_key(one)
    sifted = token_sequences([episode(call([5, 6], [7, EOS]), call([9, 6], [10, EOS], 1))])
    assert len({item.example.group for item in sifted.kept}) == 2


def test_selection_rewards_and_strategies_go_along() -> None:
    made = episode(call([5], [7, EOS]))
    (item,) = token_sequences([made], rewards={"e": 0.25}, cluster_of=lambda seen: f"way of {seen.id}").kept
    assert (item.example.reward, item.example.cluster) == (0.25, "way of e")
    assert token_sequences([made]).kept[0].example.reward is None
    (gone,) = token_sequences([episode(call([5], []))], rewards={"e": 0.25}).dropped
    assert (gone.reason, gone.reward) == ("no_token_ids", 0.25)


# --- strategies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("It is 42.", "  it is\n-7 ", True),
        ("It is 1,250.5", "it is 3/4", True),
        ("12 - 5 = 7", "3 - 4 = -1", True),
        ("12-5=7", "3-4=9", True),
        ("It is 42.", "42", False),
        ("It is 42.", "It is forty-two.", False),
        ("n", "7", False),
    ],
)
def test_strategies_are_told_apart_by_form_and_not_by_number(one: str, other: str, same: bool) -> None:
    assert (strategy_cluster((), one) == strategy_cluster((), other)) is same


def test_strategies_are_told_apart_by_the_tools_in_order() -> None:
    clusters = {strategy_cluster(tools, "7") for tools in ((), ("a",), ("a", "a"), ("a", "b"), ("b", "a"), ("a>b",))}
    assert len(clusters) == 6
    assert strategy_cluster(("a", "b"), "7").startswith("a>b:")


def test_selection_a_cluster_names_no_tool_at_any_length() -> None:
    """A model may write whatever a user said where a tool's name stands, and names of clusters stand in manifests."""
    names = [f"{'secret' * 40}{n}" for n in range(2)]
    clusters = {strategy_cluster(("add", name), "7") for name in names}
    assert len(clusters) == 2
    assert all(cluster.startswith("add>#") and len(cluster) < 40 for cluster in clusters)
    assert not any("secret" in cluster for cluster in clusters)
    assert strategy_cluster(("x" * 64,), "7").startswith("x" * 64 + ":")


def test_the_strategy_of_an_episode_is_its_tools_and_last_text() -> None:
    asks = call([5], [7, EOS])
    called = ({"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}},)
    asks = replace(asks, choices=(replace(asks.choices[0], text="Let me see.", tool_calls=called),))
    assert episode_cluster(episode(asks, call([6], [8], 1))) == strategy_cluster(("add",), "x")
    assert episode_cluster(episode(replace(asks, choices=()))) == strategy_cluster((), "")
    (item,) = token_sequences([episode(asks)]).kept
    assert item.answer == "Let me see. add {}"


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"top_p": 0.99},
        {"top_k": 1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
    ],
)
def test_selection_sampling_is_unfiltered_when_nothing_changes_the_distribution(changes: dict[str, float]) -> None:
    assert Sampling(temperature=0.7, stop=("x",), seed=3, max_tokens=1).unfiltered
    assert not Sampling(**changes).unfiltered  # type: ignore[arg-type]
