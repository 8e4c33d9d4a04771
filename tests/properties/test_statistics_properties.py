"""Laws of the gate's arithmetic, and a simulation of the promise that rests on it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from tidegate.core.statistics import (
    ErrorRate,
    Ledger,
    detectable_gain,
    distinct_n,
    effective_strategies,
    exact_pairs,
    paired_e_value,
    pass_at_k,
    required_pairs,
    sign_test,
    sign_test_power,
    tango_excludes_loss,
    tango_interval,
    tango_lower_bound,
    vendi_score,
)

COUNTS = st.integers(0, 60)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, int, int]:
    b, c, ties = draw(COUNTS), draw(COUNTS), draw(st.integers(0, 400))
    return b, c, max(b + c + ties, 1)


@given(COUNTS, COUNTS)
def test_sign_test_is_scipys_exact_binomial_test(wins: int, losses: int) -> None:
    expected = stats.binomtest(wins, wins + losses, alternative="greater").pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 80), st.floats(0.001, 0.5))
def test_sign_test_keeps_its_level(discordant: int, level: float) -> None:
    wins = np.arange(discordant + 1)
    rejected = sign_test(wins, discordant - wins) <= level
    assert stats.binom.pmf(wins, discordant, 0.5)[rejected].sum() <= level + 1e-12


@given(COUNTS, COUNTS)
def test_e_value_is_a_martingale_under_equal_arms(wins: int, losses: int) -> None:
    after = (paired_e_value(wins + 1, losses) + paired_e_value(wins, losses + 1)) / 2
    assert after == pytest.approx(paired_e_value(wins, losses), rel=1e-9)
    assert paired_e_value(0, 0) == pytest.approx(1.0)


def test_extreme_e_values_neither_warn_nor_turn_nan() -> None:
    assert paired_e_value(100_000, 0) == math.inf
    assert paired_e_value(0, 100_000) == 0.0


@pytest.mark.parametrize(("wins", "losses"), [(-1, 0), (0, -1), (0.5, 1), (math.nan, 1)])
def test_impossible_counts_are_refused(wins: Any, losses: Any) -> None:
    with pytest.raises(ValueError, match="whole numbers >= 0 are accepted"):
        sign_test(wins, losses)
    with pytest.raises(ValueError, match="whole numbers >= 0 are accepted"):
        paired_e_value(wins, losses)


@given(tables(), st.floats(0.5, 0.99))
def test_tango_interval_is_antisymmetric_and_holds_the_estimate(table: tuple[int, int, int], level: float) -> None:
    b, c, n = table
    lower, upper = tango_interval(b, c, n, level)
    assert -1.0 <= lower <= (b - c) / n <= upper <= 1.0
    assert tango_interval(c, b, n, level) == pytest.approx((-upper, -lower), abs=1e-9)
    wider = tango_interval(b, c, n, level + 0.005)
    assert wider[0] <= lower
    assert upper <= wider[1]


def score_by_likelihood(b: int, c: int, n: int, difference: float) -> float:
    """The score statistic with the nuisance parameter from a numerical search for the maximum likelihood."""

    def loss(p_c: float) -> float:
        p_b = p_c + difference
        parts = ((b, p_b), (c, p_c), (n - b - c, 1 - p_b - p_c))
        return -sum(count * math.log(max(p, 1e-300)) for count, p in parts if count)

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    p_c = float(optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x)
    return (b - c - n * difference) / math.sqrt(n * (2 * p_c + difference * (1 - difference)))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 200), st.sampled_from([0.8, 0.9, 0.95]))
def test_tango_ends_solve_the_score_equation(b: int, c: int, ties: int, level: float) -> None:
    n = b + c + ties
    z = stats.norm.isf((1 - level) / 2)
    lower, upper = tango_interval(b, c, n, level)
    assert score_by_likelihood(b, c, n, lower) == pytest.approx(z, abs=2e-3)
    assert score_by_likelihood(b, c, n, upper) == pytest.approx(-z, abs=2e-3)


@pytest.mark.parametrize(
    ("table", "interval"),
    [((0, 0, 0), (-1.0, 1.0)), ((5, 0, 5), (None, 1.0)), ((0, 5, 5), (-1.0, None))],
)
def test_tango_interval_at_the_edges(table: tuple[int, int, int], interval: tuple[float | None, float | None]) -> None:
    for end, wanted in zip(tango_interval(*table), interval, strict=True):
        assert -1.0 <= end <= 1.0
        if wanted is not None:
            assert end == wanted


@given(st.lists(tables(), min_size=1, max_size=8), st.floats(0.005, 0.3), st.sampled_from([0.025, 0.05, 0.1]))
def test_many_tables_are_judged_as_each_by_its_bound(
    some: list[tuple[int, int, int]], margin: float, alpha: float
) -> None:
    b, c, n = np.array(some).T
    bounds = np.array([tango_lower_bound(*table, alpha) for table in some])
    sure = np.abs(bounds + margin) > 1e-9
    np.testing.assert_array_equal(tango_excludes_loss(b, c, n, margin, alpha)[sure], (bounds > -margin)[sure])


def test_no_pair_excludes_no_loss_and_impossible_tables_are_refused() -> None:
    assert not tango_excludes_loss(0, 0, 0, 0.5)
    with pytest.raises(ValueError, match="a table is impossible"):
        tango_excludes_loss([1, 3], [1, 3], 5, 0.1)
    with pytest.raises(ValueError, match="margin = 0"):
        tango_excludes_loss(1, 1, 5, 0.0)


def test_tango_bound_keeps_its_level_at_the_margin() -> None:
    """Exact error of the non-inferiority test where the true loss equals the margin (asymptotic: within 0.01)."""
    n, margin, p_b = 100, 0.1, 0.05
    b, c = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    possible = b + c <= n
    probability = stats.multinomial.pmf(
        np.stack([b, c, np.where(possible, n - b - c, 0)], axis=-1), n=n, p=[p_b, p_b + margin, 1 - 2 * p_b - margin]
    )
    error = sum(
        float(probability[i, j])
        for i, j in itertools.product(range(30), range(50))
        if possible[i, j] and probability[i, j] > 1e-9 and tango_lower_bound(i, j, n, 0.05) > -margin
    )
    assert 0.02 < error < 0.06


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((3, 3, 5, 0.9), "b \\+ c <= n"), ((-1, 3, 5, 0.9), "b, c >= 0"), ((1, 1, 5, 1.0), "confidence in \\(0, 1\\)")],
)
def test_impossible_tables_are_refused(arguments: tuple[int, int, int, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tango_interval(*arguments)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(5, 6, 1), (5, -1, 1), (5, 1, 6), (5, 1, 0)])
def test_impossible_samples_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="are accepted"):
        pass_at_k(n, c, k)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(lambda weights: sum(weights) > 0.1))
def test_effective_strategies_lies_between_one_and_all(weights: list[float]) -> None:
    shares = np.array(weights) / sum(weights)
    value = effective_strategies(shares)
    assert 1.0 - 1e-9 <= value <= len(shares) + 1e-9
    assert effective_strategies(np.append(shares, 0.0)) == pytest.approx(value)


@pytest.mark.parametrize("shares", [[], [0.5, 0.4], [1.5, -0.5], [[1.0]], [math.nan, 1.0]])
def test_what_is_no_distribution_is_refused(shares: Any) -> None:
    with pytest.raises(ValueError, match="sum 1 is accepted"):
        effective_strategies(shares)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_vendi_score_of_groups_of_equal_answers_is_their_effective_number(groups: list[int]) -> None:
    member = np.repeat(np.arange(len(groups)), groups)
    similarity = (member[:, None] == member[None, :]).astype(np.float64)
    assert vendi_score(similarity) == pytest.approx(effective_strategies(np.array(groups) / sum(groups)), rel=1e-6)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_vendi_score_ignores_order_and_lies_between_one_and_all(n: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    embeddings = rng.normal(size=(n, width))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    similarity = embeddings @ embeddings.T
    value = vendi_score(similarity)
    assert 1.0 - 1e-6 <= value <= min(n, width) + 1e-6
    order = rng.permutation(n)
    assert vendi_score(similarity[np.ix_(order, order)]) == pytest.approx(value)


@pytest.mark.parametrize(
    ("similarity", "words"),
    [
        ([[1.0, 0.5]], "square"),
        ([[math.nan]], "finite"),
        ([[1.0, 0.5], [0.2, 1.0]], "symmetric"),
        ([[2.0]], "diagonal"),
        ([[1.0, 2.0], [2.0, 1.0]], "eigenvalue -1"),
    ],
)
def test_what_is_no_similarity_is_refused(similarity: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vendi_score(similarity)


def test_distinct_n_counts_within_answers() -> None:
    answers = ["abab", "ab", "c"]
    assert distinct_n(answers, 1) == pytest.approx(3 / 7)
    assert distinct_n(answers, 2) == pytest.approx(2 / 4)  # ab, ba of ab, ba, ab, ab; "bc" crosses answers
    assert distinct_n(answers, 5) == 0.0
    with pytest.raises(ValueError, match="n = 0"):
        distinct_n(answers, 0)


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=6), st.integers(1, 3))
def test_repeating_answers_halves_distinct_n(answers: list[list[int]], n: int) -> None:
    assert distinct_n(answers + answers, n) == pytest.approx(distinct_n(answers, n) / 2)


@given(st.floats(0.05, 1.0), st.floats(0.01, 0.9), st.floats(0.001, 0.2))
def test_more_gain_needs_fewer_pairs_and_the_inverse_agrees(discordance: float, part: float, level: float) -> None:
    gain = discordance * part
    pairs = required_pairs(discordance, gain, level)
    assert required_pairs(discordance, discordance * (part + 0.1), level) <= pairs
    assert required_pairs(discordance, gain, level / 2) >= pairs
    found = detectable_gain(pairs, discordance, level)
    assert found is not None
    assert found <= gain + 1e-6


@given(st.integers(1, 40), st.floats(0.05, 1.0), st.floats(-1.0, 1.0), st.floats(0.001, 0.6))
def test_power_of_the_sign_test_counts_all_outcomes(pairs: int, discordance: float, part: float, level: float) -> None:
    gain = discordance * part
    win, loss = (discordance + gain) / 2, (discordance - gain) / 2
    wins, losses = np.meshgrid(np.arange(pairs + 1), np.arange(pairs + 1), indexing="ij")
    possible = wins + losses <= pairs
    ties = np.where(possible, pairs - wins - losses, 0)
    outcomes = np.stack([wins, losses, ties], axis=-1)
    probability = stats.multinomial.pmf(outcomes, n=pairs, p=[win, loss, 1.0 - win - loss])
    significant = possible & (np.asarray(sign_test(wins, losses)) <= level)
    assert sign_test_power(pairs, discordance, gain, level) == pytest.approx(probability[significant].sum(), abs=1e-8)


@given(st.floats(0.05, 1.0), st.floats(0.05, 0.9), st.floats(0.001, 0.2), st.sampled_from([0.8, 0.9]))
def test_exact_pairs_have_the_power_and_the_formula_is_a_little_below(
    discordance: float, part: float, level: float, power: float
) -> None:
    gain = discordance * part
    pairs = exact_pairs(discordance, gain, level, power)
    assert sign_test_power(pairs, discordance, gain, level) >= power
    assert pairs >= required_pairs(discordance, gain, level, power)
    assert pairs <= 1.1 * required_pairs(discordance, gain, level, power) + 40


def test_a_plan_beyond_a_million_pairs_is_the_formulas() -> None:
    assert exact_pairs(0.14, 1e-6, 0.01) == required_pairs(0.14, 1e-6, 0.01)


def test_too_few_pairs_detect_nothing_and_endless_ones_everything() -> None:
    assert detectable_gain(3, 0.1, 0.02) is None
    assert detectable_gain(10**16, 1.0, 0.5) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: required_pairs(0.1, 0.2, 0.02),
        lambda: required_pairs(0.1, 0.05, 0.6),
        lambda: required_pairs(0.1, 0.05, 0.02, 0.3),
        lambda: detectable_gain(0, 0.1, 0.02),
        lambda: sign_test_power(0, 0.1, 0.05, 0.02),
        lambda: sign_test_power(9, 0.1, 0.05, 1.0),
        lambda: sign_test_power(9, 0.1, -0.2, 0.02),
        lambda: sign_test_power(9, 0.0, 0.0, 0.02),
    ],
)
def test_impossible_plans_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="accepted"):
        call()


P_VALUES = st.lists(st.floats(0, 1), max_size=40)


@given(P_VALUES, st.floats(0.01, 0.5), st.integers(1, 15), st.sampled_from(["fdr", "fwer"]))
def test_ledger_levels_follow_the_rule(ps: list[float], alpha: float, looks: int, error_rate: ErrorRate) -> None:
    ledger = Ledger(alpha=alpha, looks=looks, error_rate=error_rate)
    promotions = 0
    for number, p in enumerate(ps):
        if number % looks == 0:
            promotions = 0
        factor = promotions + 1 if error_rate == "fdr" else 1
        assert ledger.window == number // looks + 1
        assert ledger.look == number % looks + 1
        level, promoted, ledger = ledger.record(p)
        assert level == min(alpha, alpha / looks * factor)
        assert promoted == (p <= level)
        promotions += promoted


def test_an_ineligible_challenger_uses_a_look_but_never_promotes() -> None:
    _, promoted, after = Ledger().record(0.0, eligible=False)
    assert (promoted, after.used, after.promotions) == (False, 1, 0)


RULES = st.fixed_dictionaries(
    {"alpha": st.floats(0.01, 0.5), "looks": st.integers(1, 20), "error_rate": st.sampled_from(["fdr", "fwer"])}
)


@given(RULES, st.lists(RULES, max_size=40))
def test_no_change_of_policy_spends_more_than_a_window_promised(first: Any, later: list[Any]) -> None:
    ledger = Ledger(**first)
    spent: dict[int, float] = {}
    promised: dict[int, float] = {}
    for rules in later:
        ledger = ledger.tightened(**rules)
        promised.setdefault(ledger.window, ledger.alpha)
        assert ledger.spend_per_look <= rules["alpha"] / rules["looks"] + 1e-15
        spent[ledger.window] = spent.get(ledger.window, 0.0) + ledger.spend_per_look
        ledger = ledger.after(promoted=False)
    for window, total in spent.items():
        assert total <= promised[window] + 1e-12


def test_fdr_waits_for_the_next_window_when_a_window_began_under_fwer() -> None:
    ledger = Ledger(alpha=0.1, looks=2, error_rate="fwer").after(promoted=True)
    assert ledger.tightened(alpha=0.1, looks=2, error_rate="fdr").level == pytest.approx(0.05)
    fresh = ledger.after(promoted=False).tightened(alpha=0.2, looks=4, error_rate="fdr")
    assert (fresh.window, fresh.alpha, fresh.looks, fresh.error_rate) == (2, 0.2, 4, "fdr")


@pytest.mark.parametrize(
    "values",
    [
        {"alpha": 0.0},
        {"looks": 0},
        {"error_rate": "none"},
        {"used": 13},
        {"promotions": 1},
        {"window": 0},
        {"spend": 0.05},
    ],
)
def test_impossible_ledgers_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="accepted"):
        Ledger(**values)


@pytest.mark.parametrize("share_of_real_gains", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("error_rate", ["fdr", "fwer"])
def test_false_promotions_stay_below_alpha(share_of_real_gains: float, error_rate: ErrorRate) -> None:
    """Windows of 13 looks with n = 500 pairs at 14 % discordance; a real challenger gains 8 points.

    3,000 windows; the tolerance is three standard errors of the observed mean (about 0.014). Levels twice as high
    overshoot it.
    """
    rng = np.random.default_rng(20261101)
    windows, looks, alpha = 3000, 13, 0.10
    real = rng.random((windows, looks)) < share_of_real_gains
    discordant = rng.binomial(500, 0.14, (windows, looks))
    wins = rng.binomial(discordant, np.where(real, 0.5 + 0.08 / 0.28, 0.5))
    p = np.asarray(sign_test(wins, discordant - wins))
    outcomes = np.empty(windows)
    promoted_real = 0
    for window in range(windows):
        ledger = Ledger(alpha=alpha, looks=looks, error_rate=error_rate)
        false = true = 0
        for look in range(looks):
            _, promoted, ledger = ledger.record(float(p[window, look]))
            false += promoted and not real[window, look]
            true += promoted and bool(real[window, look])
        promoted_real += true
        outcomes[window] = false / max(false + true, 1) if error_rate == "fdr" else false > 0
    standard_error = outcomes.std() / math.sqrt(windows)
    assert outcomes.mean() <= alpha + 3 * standard_error
    assert outcomes.mean() > 0.0  # the simulation can fail: false promotions do happen
    if real.any():
        assert promoted_real / real.sum() > 0.8
