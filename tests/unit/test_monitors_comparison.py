"""When a release is called narrower than the anchor: an equal one is not, a narrowed one is, each measure by itself."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from monitor_world import drawn, one
from tidegate.core.gate.policy import CollapseRules
from tidegate.core.monitors import SHIPPED_LIMITS, Comparison, RecordedAnswer, compare
from tidegate.core.monitors.comparison import BLOCK, LEVEL, MIN_KIND_VERDICTS, MIN_PAIRS, MIN_PROMPTS, paired
from tidegate.core.selection.sifting import rank
from tidegate.gate import load_policy


def compared(release: list[RecordedAnswer], anchor: list[RecordedAnswer], **limits: Any) -> dict[str, Comparison]:
    rows = compare(release, anchor, replace(SHIPPED_LIMITS, **limits), seed=7)
    return {row.measure.split("@")[0]: row for row in rows}


def flagged(release: list[RecordedAnswer], anchor: list[RecordedAnswer]) -> set[str]:
    return {measure for measure, row in compared(release, anchor).items() if row.narrower}


def test_the_default_limits_are_those_of_the_policy_that_ships() -> None:
    assert load_policy().collapse == SHIPPED_LIMITS
    assert isinstance(SHIPPED_LIMITS, CollapseRules)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompts": 15},
        {"prompts": 4, "episodes": 500},
        {"skill": 0.1, "kinds": 10},
        {"ways": 2},
        {"kinds": 1, "episodes": 150},
    ],
)
def test_an_equal_release_is_hardly_ever_called_narrower(options: dict[str, Any]) -> None:
    flags: Counter[str] = Counter()
    for seed in range(20):
        flags.update(flagged(drawn("r1", 2 * seed, **options), drawn("r0", 2 * seed + 1, **options)))
    assert sum(flags.values()) <= 1, flags


@pytest.mark.parametrize(
    ("narrow", "common", "measures"),
    [
        ({"ways": 1}, {}, {"effective strategies", "distinct-2", "Vendi score"}),
        ({"entropy": 0.3}, {}, {"token entropy (nats)"}),
        ({"unsolved": 2}, {}, {"kinds solved"}),
        ({"skill": 0.2}, {"prompts": 15, "episodes": 900}, {"pass"}),
    ],
)
def test_a_narrowed_release_is_found_by_the_measure_that_shows_it(
    narrow: dict[str, Any], common: dict[str, Any], measures: set[str]
) -> None:
    for seed in range(3):
        assert flagged(drawn("r1", seed, **common, **narrow), drawn("r0", seed + 50, **common)) == measures


def test_a_release_that_answers_the_same_few_prompts_over_and_over_is_not_narrow_for_it() -> None:
    """Its prompts are fewer, so its answers are less varied; the pairing takes each prompt once."""
    few = [replace(answer, prompt=f"{answer.kind}-{n % 3}") for n, answer in enumerate(drawn("r1", 0, episodes=400))]
    for answer, place in zip(few, range(len(few)), strict=True):
        few[place] = replace(answer, strategy=((), f"answer {answer.prompt}"))
    rows = compared(few, drawn("r0", 1, episodes=400))
    assert rows["effective strategies"].count < rows["effective strategies"].needed
    assert not any(row.narrower for row in rows.values())


def test_below_the_least_counts_nothing_is_said() -> None:
    few = [one(f"{name}{i}", release=name, kind=f"k{i}", prompt=f"p{i}") for name in ("r1", "r0") for i in range(9)]
    rows = compared(few[:9], few[9:])
    for row in rows.values():
        assert row.count < row.needed
        assert (row.value, row.anchor, row.change, row.p, row.narrower) == (None,) * 5
    assert rows["tokens"].count == 9
    assert (rows["pass"].needed, rows["kinds solved"].unit) == (
        MIN_PROMPTS, f"kinds with {MIN_KIND_VERDICTS} verdicts of both",
    )  # fmt: skip
    nothing = compared([], few[9:])
    assert {row.count for row in nothing.values()} == {0}


def test_the_least_counts_are_enough() -> None:
    both = [
        [one(f"{name}{i}", release=name, prompt=f"{name}{i}", strategy=((), text)) for i in range(MIN_PAIRS)]
        for name, text in (("r1", "same"), ("r0", ""))
    ]
    both[1] = [replace(answer, strategy=((), f"{n} {n * n}")) for n, answer in enumerate(both[1])]
    rows = compared(*both)
    strategies = rows["effective strategies"]
    assert (strategies.count, strategies.value, strategies.anchor) == (MIN_PAIRS // BLOCK, 1.0, pytest.approx(BLOCK))
    assert strategies.change == pytest.approx(1 / BLOCK)
    assert strategies.narrower
    assert strategies.p is not None
    assert strategies.p <= LEVEL
    assert rows["token entropy (nats)"].narrower is False


def verdicts(release: str, passes: list[list[bool]]) -> list[RecordedAnswer]:
    """Answers with these verdicts, a list for each prompt."""
    return [
        one(f"{release}-{prompt}-{n}", release=release, prompt=f"p{prompt}", passed=passed)
        for prompt, found in enumerate(passes)
        for n, passed in enumerate(found)
    ]


def test_pass_at_k_by_hand() -> None:
    """Of 12 prompts: the anchor passes two of three, so one at least of any two; the release none of two."""
    release, anchor = verdicts("r1", [[False, False]] * 12), verdicts("r0", [[True, True, False]] * 12)
    row = compared(release, anchor)["pass"]
    assert (row.measure, row.count, row.value, row.anchor, row.change) == ("pass@2", 12, 0.0, 1.0, -1.0)
    assert row.p == pytest.approx(0.5**12)
    assert row.narrower
    assert compared(release, anchor, max_pass_at_k_drop=1.0)["pass"].narrower is False
    assert compared(release[:20], anchor)["pass"].count == MIN_PROMPTS
    assert compared(release[:18], anchor)["pass"].narrower is None


def test_pass_at_k_of_more_verdicts_than_k_is_over_all_draws_of_k() -> None:
    """Nine prompts have three verdicts of both, too few for pass@3; two draws miss one pass of three in a third."""
    release = verdicts("r1", [[False] * 3] * 9 + [[False] * 2] * 3)
    anchor = verdicts("r0", [[True, False, False]] * 9 + [[True, False]] * 3)
    row = compared(release, anchor)["pass"]
    assert (row.measure, row.count, row.value) == ("pass@2", 12, 0.0)
    assert row.anchor == pytest.approx((9 * 2 / 3 + 3) / 12)


def test_of_unequal_numbers_of_verdicts_those_that_stay_are_chosen_by_id() -> None:
    release, anchor = verdicts("r1", [[False] * 2] * 12), verdicts("r0", [[True, False, False]] * 12)
    stays = [sorted((rank(0, f"r0-{prompt}-{n}"), n) for n in range(3))[2][1] != 0 for prompt in range(12)]
    assert 0 < sum(stays) < 12
    assert compared(release, anchor)["pass"].anchor == pytest.approx(sum(stays) / 12)


@pytest.mark.parametrize("more", ["release", "anchor"])
def test_pass_at_k_does_not_flag_equal_policies_asked_unequally_often(more: str) -> None:
    """The expected number of flags in 60 comparisons is below 60 * LEVEL = 0.5."""
    counts = {"release": 800, "anchor": 100} if more == "release" else {"release": 100, "anchor": 800}
    common: dict[str, Any] = {"kinds": 1, "prompts": 20, "skill": 0.25}
    flags = 0
    for seed in range(60):
        release = drawn("r1", 2 * seed, episodes=counts["release"], **common)
        flags += "pass" in flagged(release, drawn("r0", 2 * seed + 1, episodes=counts["anchor"], **common))
    assert flags <= 2


def test_a_kind_is_lost_only_beyond_chance() -> None:
    def kind(name: str, passed: int, asked: int) -> list[RecordedAnswer]:
        return [one(f"{name}{i}", release=name, passed=i < passed) for i in range(asked)]

    lost = compared(kind("r1", 0, 20), kind("r0", 10, 20))["kinds solved"]
    assert (lost.count, lost.anchor, lost.value, lost.change, lost.narrower) == (1, 1.0, 0.0, -1.0, True)
    assert lost.p == pytest.approx(184756 / 847660528)  # C(20, 10) / C(40, 10)
    chance = compared(kind("r1", 0, 20), kind("r0", 2, 20))["kinds solved"]
    assert (chance.value, chance.narrower) == (1.0, False)
    assert compared(kind("r1", 0, 9), kind("r0", 9, 9))["kinds solved"].narrower is None
    assert compared(kind("r1", 3, 20), kind("r0", 0, 20))["kinds solved"].narrower is False


def test_shares_and_lengths_are_shown_and_say_nothing_of_narrowness() -> None:
    release = [one(f"a{i}", tokens=8, refused=i % 2 == 0, passed=i % 4 == 0) for i in range(80)]
    anchor = [one(f"b{i}", release="r0", tokens=4, no_reply=i % 4 == 0) for i in range(80)]
    rows = compared(release, anchor)
    assert (rows["tokens"].change, rows["tokens"].change_is) == (2.0, "ratio")
    assert (rows["refused"].change, rows["no reply"].change, rows["success"].change) == (0.5, -0.25, -0.75)
    assert {rows[name].narrower for name in ("tokens", "refused", "no reply", "invalid tool call", "success")} == {None}
    silent = compared(release, [replace(answer, tokens=0, surprisal=None, temperature=None) for answer in anchor])
    assert silent["tokens"].change is None
    assert silent["token entropy (nats)"].count == 0


def test_entropy_is_compared_at_the_same_temperature_only() -> None:
    cold = [replace(answer, temperature=0.2, surprisal=0.01) for answer in drawn("r1", 0)]
    assert compared(cold, drawn("r0", 1))["token entropy (nats)"].count == 0


def test_pairs_are_of_one_kind_and_of_one_prompt_where_both_have_it() -> None:
    release = [one(f"a{i}", kind=f"k{i % 2}", prompt=f"p{i % 6}") for i in range(24)]
    anchor = [one(f"b{i}", kind=f"k{i % 2}", prompt=f"p{i % 4}" if i < 8 else f"q{i}") for i in range(24)]
    pairs = paired(release, anchor, lambda answer: answer.kind)
    assert all(mine.kind == other.kind for mine, other in pairs)
    shared = [pair for pair in pairs if pair[0].prompt == pair[1].prompt]
    assert len(shared) == 8  # p0 to p3, two of each
    alone = [pair for pair in pairs if pair[0].prompt != pair[1].prompt]
    assert {mine.prompt for mine, _ in alone} == {"p4", "p5"}
    assert len(alone) == 2
    assert len({mine.id for mine, _ in pairs}) == len({other.id for _, other in pairs}) == len(pairs)


def test_the_order_of_the_answers_makes_no_difference() -> None:
    release, anchor = drawn("r1", 0, prompts=20), drawn("r0", 1, prompts=20)
    expected = compare(release, anchor, SHIPPED_LIMITS, seed=3)
    shuffle = random.Random(5)
    for _ in range(3):
        ours, theirs = (shuffle.sample(arm, len(arm)) for arm in (release, anchor))
        assert compare(ours, theirs, SHIPPED_LIMITS, seed=3) == expected
