"""Weights, draws and near-copies: the rules hold, against oracles that are slower and simpler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from tidegate.core.selection.balance import balanced, normalised_weights, within_user_share
from tidegate.core.selection.demonstrations import allowance, per_kind
from tidegate.core.selection.episodes import near_success_floor
from tidegate.core.selection.limits import per_user
from tidegate.core.selection.near_copies import near_distinct
from tidegate.core.selection.near_duplicates import jaccard, shingles, text_shingles
from tidegate.core.selection.replay import replay_size
from tidegate.core.selection.sampling import balanced_draw, weighted_sample
from tidegate.core.selection.sequences import Fresh
from tidegate.core.selection.weights import exploration_weights
from tidegate.core.types import Example

SEEDS = 3000
LEAST_P = 0.001


def item(
    identifier: str,
    *,
    weight: float = 1.0,
    kind: str = "k",
    cluster: str = "c",
    user: str = "u",
    prompt: str = "",
    answer: str = "",
) -> Fresh:
    return Fresh(
        example=Example(id=identifier, weight=weight, source="episode", kind=kind, token_ids=(1,), cluster=cluster),
        user_key=user,
        prompt=({"role": "user", "content": prompt},),
        answer=answer,
    )


def weights(items: Sequence[Fresh]) -> list[float]:
    return [made.example.weight for made in items]


def ids(items: Sequence[Fresh]) -> list[str]:
    return [made.example.id for made in items]


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=30)
heavy = st.floats(0.01, 20.0)


# --- balance ------------------------------------------------------------------------------------------------


def test_exploration_weights_golden() -> None:
    assert exploration_weights(["a", "a", "a", "a", "b"]) == pytest.approx([5 / 6] * 4 + [5 / 3])
    assert exploration_weights([]) == ()


@given(names)
def test_exploration_weights_are_one_over_the_root_of_the_frequency(clusters: list[str]) -> None:
    made = exploration_weights(clusters)
    counts = Counter(clusters)
    assert math.fsum(made) / len(made) == pytest.approx(1.0)
    products = [weight * math.sqrt(counts[cluster]) for weight, cluster in zip(made, clusters, strict=True)]
    assert products == pytest.approx([products[0]] * len(products))
    assert exploration_weights(clusters[::-1]) == made[::-1]


def test_balance_golden() -> None:
    made = [item(f"a{n}", kind="a", cluster="x" if n < 4 else "y") for n in range(5)]
    made += [item(f"b{n}", kind="b", cluster="z", weight=0.3) for n in range(5)]
    assert weights(balanced(made, by_cluster=False)) == pytest.approx([1.0] * 5 + [0.3] * 5)
    assert weights(balanced(made, by_cluster=True)) == pytest.approx([5 / 6] * 4 + [5 / 3] + [0.3] * 5)
    made = [item(f"a{n}", kind="a") for n in range(9)] + [item("b", kind="b")]
    assert weights(balanced(made, by_cluster=True)) == pytest.approx([10 / 12] * 9 + [10 / 4])


@given(st.lists(st.tuples(st.sampled_from("kl"), st.sampled_from("xyz")), min_size=1, max_size=30))
def test_balance_a_kind_weighs_the_root_of_its_count_whatever_its_strategies(pairs: list[tuple[str, str]]) -> None:
    made = balanced([item(str(n), kind=k, cluster=c) for n, (k, c) in enumerate(pairs)], by_cluster=True)
    counts = Counter(kind for kind, _ in pairs)
    shares = {k: math.fsum(m.example.weight for m in made if m.example.kind == k) for k in counts}
    total = math.fsum(math.sqrt(count) for count in counts.values())
    assert shares == pytest.approx({k: len(pairs) * math.sqrt(n) / total for k, n in counts.items()})


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d", "e"]), heavy), min_size=1, max_size=25),
    st.sampled_from([0.005, 0.1, 0.3, 0.5, 1.0]),
)
def test_no_user_has_more_than_the_share_or_one_examples_worth(pairs: list[tuple[str, float]], share: float) -> None:
    before = [item(str(n), user=user, weight=weight) for n, (user, weight) in enumerate(pairs)]
    after = within_user_share(before, share=share)
    whole = math.fsum(weights(after))
    for user in {made.user_key for made in before}:
        was = [made.example.weight for made in before if made.user_key == user]
        now = [made.example.weight for made in after if made.user_key == user]
        factor = now[0] / was[0]
        assert now == pytest.approx([weight * factor for weight in was])
        if user == "":
            assert now == was
        else:
            allowed = max(share * whole, *was)
            assert math.fsum(now) == pytest.approx(min(math.fsum(was), allowed))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.sampled_from([0.02, 0.1, 0.25]))
def test_the_capped_total_is_the_largest_that_agrees_with_itself(counts: list[int], share: float) -> None:
    made = [item(f"{u}.{n}", user=f"u{u}") for u, count in enumerate(counts) for n in range(count)]
    whole = float(len(made))
    for _ in range(3000):  # the iteration from above cannot pass the largest fixed point
        whole = math.fsum(min(count, max(share * whole, 1.0)) for count in counts)
    assert math.fsum(weights(within_user_share(made, share=share))) == pytest.approx(whole, rel=1e-6)


def test_a_user_share_golden() -> None:
    # 20 examples of one user beside 80 users with one: at 5 % W = 80 + .05 W
    made = [item(f"a{n}", user="a") for n in range(20)] + [item(f"b{n}", user=f"b{n}") for n in range(80)]
    after = weights(within_user_share(made, share=0.05))
    assert after[20:] == [1.0] * 80
    assert after[:20] == pytest.approx([80 / 0.95 * 0.05 / 20] * 20)
    assert weights(within_user_share(made, share=0.005))[:20] == pytest.approx([1 / 20] * 20)
    assert within_user_share((), share=0.5) == ()


@given(st.lists(heavy, min_size=1, max_size=20))
def test_normalised_weights_have_mean_one(values: list[float]) -> None:
    made = weights(normalised_weights([item(str(n), weight=value) for n, value in enumerate(values)]))
    assert math.fsum(made) / len(made) == pytest.approx(1.0, abs=1e-8)
    assert all(weight > 0 for weight in made)
    assert normalised_weights(()) == ()


# --- draws --------------------------------------------------------------------------------------------------


def test_a_sample_keeps_everything_as_it_is_up_to_the_budget() -> None:
    made = tuple(item(str(n), weight=n + 1.0) for n in range(5))
    assert weighted_sample(made, budget=5, seed=0).kept == made
    assert weighted_sample(made, budget=5, seed=0).dropped == ()


def test_a_sample_draws_first_in_proportion_to_the_weights() -> None:
    values = [1.0, 2.0, 3.0, 10.0]
    made = [item(f"e{n}", weight=value) for n, value in enumerate(values)]
    first = Counter(ids(weighted_sample(made, budget=1, seed=seed).kept)[0] for seed in range(SEEDS))
    expected = [SEEDS * value / sum(values) for value in values]
    assert chisquare([first[f"e{n}"] for n in range(4)], expected).pvalue > LEAST_P


def test_a_sample_draws_the_second_in_proportion_to_what_is_left() -> None:
    values = [1.0, 2.0, 5.0]
    made = [item(f"e{n}", weight=value) for n, value in enumerate(values)]
    left_out = Counter(weighted_sample(made, budget=2, seed=seed).dropped[0].id for seed in range(SEEDS))
    total = sum(values)
    expected = [
        SEEDS * sum(values[i] / total * values[j] / (total - values[i]) for i, j in ((i, 3 - out - i) for i in others))
        for out in range(3)
        for others in [[n for n in range(3) if n != out]]
    ]
    assert chisquare([left_out[f"e{n}"] for n in range(3)], expected).pvalue > LEAST_P


def test_a_sample_keeps_the_expected_weight_of_every_example() -> None:
    values = [0.5] * 12 + [1.0] * 12 + [6.0, 9.0]
    made = [item(f"e{n}", weight=value) for n, value in enumerate(values)]
    sums: dict[str, list[float]] = {made_.example.id: [] for made_ in made}
    for seed in range(SEEDS):
        kept = {k.example.id: k.example.weight for k in weighted_sample(made, budget=6, seed=seed).kept}
        for identifier, seen in sums.items():
            seen.append(kept.get(identifier, 0.0))
    for value, seen in zip(values, sums.values(), strict=True):
        mean = math.fsum(seen) / SEEDS
        error = math.sqrt(math.fsum((weight - mean) ** 2 for weight in seen) / SEEDS / (SEEDS - 1))
        assert abs(mean - value) < 4.5 * error


def test_a_sample_does_not_shun_what_a_cap_left_over() -> None:
    # caps rank by hashes too; were they the same, survivors of a crowded user would all have small ones
    made = [item(f"a{n}", user="a") for n in range(200)] + [item(f"b{n}", user=f"b{n}") for n in range(20)]
    kept: Counter[bool] = Counter()
    for seed in range(300):
        capped = per_user(made, most=20, seed=seed).kept
        kept.update(name.startswith("a") for name in ids(weighted_sample(capped, budget=20, seed=seed).kept))
    assert chisquare([kept[True], kept[False]]).pvalue > LEAST_P


@given(st.lists(heavy, min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 5), st.randoms())
def test_a_sample_depends_on_ids_alone(values: list[float], budget: int, seed: int, random: object) -> None:
    made = [item(f"e{n}", weight=value) for n, value in enumerate(values)]
    shuffled = random.sample(made, len(made))  # type: ignore[attr-defined]
    one, other = (weighted_sample(order, budget=budget, seed=seed) for order in (made, shuffled))
    assert {kept.example.id: kept.example.weight for kept in one.kept} == {
        kept.example.id: kept.example.weight for kept in other.kept
    }
    assert len(one.kept) == min(budget, len(made))
    assert sorted([*ids(one.kept), *(gone.id for gone in one.dropped)]) == sorted(ids(made))
    assert all(
        weight >= value * (1 - 1e-9) for weight, value in zip(weights(one.kept), _of(one.kept, made), strict=True)
    )


def _of(kept: Sequence[Fresh], made: Sequence[Fresh]) -> list[float]:
    known = {one.example.id: one.example.weight for one in made}
    return [known[one.example.id] for one in kept]


@given(names, st.integers(0, 30), st.integers(0, 5))
def test_a_balanced_draw_takes_kinds_in_turns(kinds: list[str], size: int, seed: int) -> None:
    made = [item(str(n), kind=kind) for n, kind in enumerate(kinds)]
    sifted = balanced_draw(made, size=size, seed=seed)
    assert len(sifted.kept) == min(size, len(made))
    assert len(sifted.kept) + len(sifted.dropped) == len(made)
    there, drawn = Counter(kinds), Counter(kept.example.kind for kept in sifted.kept)
    most = max(drawn.values(), default=0)
    assert all(drawn[kind] >= min(most - 1, there[kind]) for kind in there)


@given(st.integers(0, 400), st.floats(0.0, 0.95))
def test_replay_is_at_most_its_share_and_no_less_than_it_may_be(others: int, share: float) -> None:
    size = replay_size(others, share=share)
    assert size <= share * (others + size) + 1e-6
    assert size + 1 > share * (others + size + 1) - 1e-6
    assert replay_size(17, share=0.15) == 3


# --- demonstrations -----------------------------------------------------------------------------------------


def test_an_allowance_falls_from_everything_to_the_share() -> None:
    given_ = [allowance(solved, enough=12, share=0.1, most=36) for solved in (0, 1, 6, 9, 12, 36)]
    assert given_ == [36, 33, 18, 10, 1, 4]
    assert allowance(9, enough=1, share=0.1, most=400) == 1
    assert allowance(5, enough=1, share=0.99, most=36) == 36


@given(st.integers(1, 30), st.floats(0.0, 0.5), st.integers(1, 100))
def test_an_allowance_is_within_bounds_and_falls_until_there_is_enough(enough: int, share: float, most: int) -> None:
    made = [allowance(solved, enough=enough, share=share, most=most) for solved in range(enough + 1)]
    assert made[0] == most
    assert all(0 <= count <= most for count in made)
    if share / (1 - share) * enough <= most:
        assert made == sorted(made, reverse=True)
        assert made[-1] <= share * (made[-1] + enough) + 1e-6


@given(names, st.dictionaries(st.sampled_from("abcd"), st.integers(0, 8)), st.integers(1, 10), st.integers(0, 3))
def test_every_kind_keeps_what_its_allowance_gives(
    kinds: list[str], solved: dict[str, int], most: int, seed: int
) -> None:
    made = [item(str(n), kind=kind) for n, kind in enumerate(kinds)]
    kept = per_kind(made, solved=solved, enough=4, share=0.1, most=most, seed=seed).kept
    there, trained = Counter(kinds), Counter(one.example.kind for one in kept)
    for kind, count in there.items():
        assert trained[kind] == min(count, allowance(solved.get(kind, 0), enough=4, share=0.1, most=most))


# --- near-successes -----------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.0, 0.98), st.floats(0.0, 1.0))
def test_with_two_scores_nothing_is_a_near_success(passed: list[bool], low: float, quantile: float) -> None:
    scores = [1.0 if success else low for success in passed]
    floor = near_success_floor(scores, threshold=0.99, quantile=quantile)
    assert not [score for score in scores if floor < score < 0.99 and any(passed)]


def test_near_successes_golden() -> None:
    graded = [0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0]
    assert near_success_floor(graded, threshold=1.0, quantile=0.55) == 0.8  # the sixth of ten
    assert near_success_floor([0.0] * 8 + [0.1, 1.0], threshold=1.0, quantile=0.55) == 0.5
    assert near_success_floor(graded, threshold=1.0, quantile=1.0) == 1.0
    assert near_success_floor([], threshold=0.7, quantile=0.5) == 0.7


# --- near-copies --------------------------------------------------------------------------------------------

texts = st.lists(st.sampled_from(["add the numbers", "of the list", "and tell", "7", "8"]), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(texts, texts, st.sampled_from(["x:1", "x:2", "y:1"])), max_size=10),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_near_copies_are_limited_and_nothing_else_goes(
    made: list[tuple[list[str], list[str], str]], threshold: float, most: int, seed: int
) -> None:
    items = [
        item(f"e{n}", prompt=" ".join(asked), answer=" ".join(said), cluster=cluster)
        for n, (asked, said, cluster) in enumerate(made)
    ]

    def near(one: Fresh, other: Fresh) -> bool:
        prompts, answers = (
            jaccard(shingles(one.prompt), shingles(other.prompt)),
            jaccard(text_shingles(one.answer), text_shingles(other.answer)),
        )
        tools = {fresh.example.cluster.partition(":")[0] for fresh in (one, other)}
        return len(tools) == 1 and min(prompts, answers) >= threshold

    sifted = near_distinct(items, most=most, seed=seed, threshold=threshold)
    for group in combinations(sifted.kept, most + 1):
        assert not all(near(one, other) for one, other in combinations(group, 2))
    by_id = {one.example.id: one for one in items}
    for gone in sifted.dropped:
        assert gone.reason == "near_duplicate"
        assert sum(near(by_id[gone.id], kept) for kept in sifted.kept) >= most
    assert len(sifted.kept) + len(sifted.dropped) == len(items)
    again = near_distinct(sifted.kept, most=most, seed=seed, threshold=threshold)
    assert again.kept == sifted.kept
    turned = near_distinct(items[::-1], most=most, seed=seed, threshold=threshold)
    assert ids(turned.kept)[::-1] == ids(sifted.kept)


LONG = "Please tell me how many apples {name} has after buying {count} of them at the market of the town on a Sunday"


def test_near_copies_need_the_same_numbers_a_near_prompt_a_near_answer_and_the_same_strategy() -> None:
    said = "First I look at what is there, then I add what was bought, and so the answer is {count} apples in all."

    def copy(identifier: str, *, count: int = 7, prompt: str = LONG, answer: str = said, cluster: str = "c") -> Fresh:
        text = answer.format(count=count)
        return item(identifier, prompt=prompt.format(name="Ann", count=count), answer=text, cluster=cluster)

    def kept(*others: Fresh) -> int:
        return len(near_distinct([copy("one"), *others], most=1, seed=0).kept)

    assert kept(copy("again")) == 1
    assert kept(copy("cased", answer=said.upper().replace("{COUNT}", "{count}"))) == 1
    assert kept(copy("numbers", count=8)) == 2
    assert kept(copy("asked", prompt="How many apples does {name} have, having bought {count}?")) == 2
    assert kept(copy("told", answer="{count}")) == 2
    # a long text that is the same does not hide a short one that is not
    long = " ".join(f"word{chr(97 + n)}" for n in range(26))
    for one, other in ((("one thing", long), ("something else", long)), ((long, "yes"), (long, "no"))):
        pair = [item(str(n), prompt=prompt, answer=answer) for n, (prompt, answer) in enumerate((one, other))]
        assert len(near_distinct(pair, most=1, seed=0).kept) == 2
    assert kept(copy("way", cluster="other_tool:c")) == 2
    assert kept(copy("form", cluster=":d")) == 1  # one other word in the answer is another form


def test_what_is_no_text_is_compared_with_nothing() -> None:
    image = Fresh(
        example=item("a").example,
        user_key="u",
        prompt=({"role": "user", "content": [{"type": "image_url"}]},),
        answer="A cat.",
    )
    for prompt in (image.prompt, ()):
        pair = [replace(image, prompt=prompt), replace(image, prompt=prompt, example=item("b").example)]
        assert len(near_distinct(pair, most=1, seed=0).kept) == 2
