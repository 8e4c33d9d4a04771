"""Laws of the evidence that may be read at any time, and simulations of the errors that it bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.statistics import EDetector, betting_p_value, canary_evidence, canary_paths, detector_paths

BETS = st.lists(st.floats(0.01, 0.95), min_size=1, max_size=5)
MARGINS = st.floats(0.0, 0.3)
DIFFERENCES = st.lists(st.floats(-1, 1), max_size=30)


@given(DIFFERENCES, MARGINS, BETS, st.floats(0, 1))
def test_evidence_is_fair_where_the_null_begins(d: list[float], margin: float, bets: list[float], share: float) -> None:
    """The next pair is a win, a loss or a tie with E[d] = -m for K+ and 0 for K-: no mean change, whatever the past."""
    before = canary_evidence(d, margin, bets)
    loss = margin + (1 - margin) / 2 * share
    after = canary_evidence([[*d, 1.0], [*d, -1.0], [*d, 0.0]], margin, bets)
    assert np.dot([loss - margin, loss, 1 - 2 * loss + margin], after.k_plus) == pytest.approx(before.k_plus, rel=1e-9)
    assert np.dot([share / 2, share / 2, 1 - share], after.k_minus) == pytest.approx(before.k_minus, rel=1e-9)


@given(DIFFERENCES.filter(bool), MARGINS, BETS)
def test_paths_end_in_the_evidence(d: list[float], margin: float, bets: list[float]) -> None:
    paths, evidence = canary_paths([d, d], margin, bets), canary_evidence(d, margin, bets)
    assert paths.k_plus.shape == paths.k_minus.shape == (2, len(d))
    np.testing.assert_allclose(paths.k_plus[:, -1], evidence.k_plus)
    np.testing.assert_allclose(paths.k_minus[:, -1], evidence.k_minus)


def test_no_pair_is_no_evidence_and_endless_wins_neither_warn_nor_turn_nan() -> None:
    nothing = canary_evidence([], 0.02, [0.1, 0.4])
    assert (nothing.k_plus, nothing.k_minus) == (1.0, 1.0)
    endless = canary_evidence(np.ones(100_000), 0.02, [0.1, 0.7])
    assert (endless.k_plus, endless.k_minus) == (math.inf, 0.0)


@given(DIFFERENCES.filter(bool), MARGINS, BETS)
def test_a_detector_sums_the_bets_that_begin_at_each_pair(d: list[float], margin: float, bets: list[float]) -> None:
    factors = [[1 - g * (x + margin) / (1 + margin) for x in d] for g in bets]
    wanted = np.mean([sum(math.prod(row[start:]) for start in range(len(d))) for row in factors])
    detector = EDetector(margin=margin, bets=tuple(bets), alarm_at=100.0)
    assert detector.run(d)[-1] == pytest.approx(wanted, rel=1e-9)
    half = len(d) // 2
    first = detector_paths(d[:half], margin, bets)
    start = first[-1] if half else 0.0
    assert detector_paths(d[half:], margin, bets, start=start)[-1].mean() == pytest.approx(wanted, rel=1e-9)


@given(DIFFERENCES, st.floats(-1, 1))
def test_one_step_is_a_run_of_one_pair_from_the_same_state(d: list[float], following: float) -> None:
    detector = EDetector(margin=0.01, bets=(0.05, 0.4), alarm_at=100.0)
    for x in d:
        detector = detector.update(x)
    assert detector.update(following).value == pytest.approx(detector.run([following])[0])
    assert EDetector(margin=0.01, bets=(0.05, 0.4), alarm_at=100.0).run(d).shape == (len(d),)


def test_an_alarm_stands_at_its_threshold_and_above() -> None:
    detector = EDetector(margin=0.0, bets=(0.5,), alarm_at=3.0)
    assert [detector.alarm, (detector := detector.update(-1.0)).alarm] == [False, False]
    assert detector.update(-1.0).value == pytest.approx(3.75)
    assert detector.update(-1.0).alarm
    assert replace(detector, processes=(3.0,)).alarm


def three_point(
    rng: np.random.Generator, mean: float, discordance: float, shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    drawn = rng.random(shape)
    win, loss = (discordance + mean) / 2, (discordance - mean) / 2
    return np.where(drawn < win, 1.0, np.where(drawn < win + loss, -1.0, 0.0))


@pytest.mark.parametrize("discordance", [0.14, 0.5])
def test_wrong_ends_of_a_canary_stay_below_their_bounds(discordance: float) -> None:
    """4,000 canaries of 1,000 pairs read after each one; tolerance three standard errors of a rate at its bound.

    Bounds are 1/5 and 1/10 here, so that a wrong factor shows: the rates come close to them.
    """
    rng, canaries, bets = np.random.default_rng(20261129), 4000, (0.05, 0.1, 0.2, 0.4, 0.7)
    for mean, side, threshold in ((-0.02, "k_plus", 5.0), (0.0, "k_minus", 10.0)):
        ever = np.zeros(canaries, dtype=bool)
        for part in np.split(np.arange(canaries), 8):
            paths = canary_paths(three_point(rng, mean, discordance, (part.size, 1000)), 0.02, bets)
            ever[part] = (getattr(paths, side) >= threshold).any(axis=-1)
        bound = 1 / threshold
        assert bound / 4 < ever.mean() <= bound + 3 * math.sqrt(bound * (1 - bound) / canaries)


@pytest.mark.parametrize("discordance", [0.14, 0.5])
def test_the_mean_time_to_a_false_alarm_is_the_threshold_at_least(discordance: float) -> None:
    """Alarm at 200 where the loss equals the margin, 2,000 streams; tolerance three standard errors of the mean."""
    rng, streams, margin, bets = np.random.default_rng(7), 2000, 0.05, (0.05, 0.1, 0.2, 0.4)
    times, running, state = np.zeros(streams), np.arange(streams), np.zeros((streams, len(bets)))
    for start in range(0, 100_000, 500):
        paths = detector_paths(three_point(rng, -margin, discordance, (running.size, 500)), margin, bets, start=state)
        alarmed = paths.mean(axis=-1) >= 200.0
        ended = alarmed.any(axis=-1)
        times[running[ended]] = start + alarmed[ended].argmax(axis=-1) + 1
        running, state = running[~ended], paths[~ended, -1]
        if not running.size:
            break
    assert not running.size
    standard_error = times.std() / math.sqrt(streams)
    assert 200.0 - 3 * standard_error <= times.mean() < 2000.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: canary_evidence([1.5], 0.02, [0.1]), r"outside \[-1, 1\]"),
        (lambda: canary_evidence([math.nan], 0.02, [0.1]), r"outside \[-1, 1\]"),
        (lambda: canary_paths([0.0], 1.0, [0.1]), "margin = 1.0"),
        (lambda: canary_evidence([0.0], 0.02, []), "at least one number"),
        (lambda: canary_evidence([0.0], 0.02, [1.0]), "at least one number"),
        (lambda: EDetector(margin=0.0, bets=(0.1,), alarm_at=1.0), "alarm_at = 1.0"),
        (lambda: EDetector(margin=0.0, bets=(0.1,), alarm_at=2.0, processes=(1.0, 2.0)), "1 numbers >= 0"),
        (lambda: EDetector(margin=0.0, bets=(0.1,), alarm_at=2.0, processes=(-1.0,)), "1 numbers >= 0"),
        (lambda: EDetector(margin=0.0, bets=(0.1,), alarm_at=2.0).update(2.0), r"outside \[-1, 1\]"),
    ],
)
def test_impossible_evidence_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_the_betting_test_is_the_canarys_evidence_without_a_margin() -> None:
    source = np.random.default_rng(3)
    differences = source.uniform(-1, 1, 200)
    evidence = canary_evidence(differences, 0.0, (0.05, 0.1, 0.2, 0.4, 0.7)).k_plus
    assert betting_p_value(differences) == pytest.approx(min(1.0, 1.0 / evidence))
    values, counts = np.unique(np.round(differences, 1), return_counts=True)
    one = betting_p_value(np.repeat(values, counts))
    assert betting_p_value(values, [counts, counts]) == pytest.approx([one, one])
    assert betting_p_value([1.0] * 5000) > 0.0 or betting_p_value([1.0] * 1000) > 0.0
    assert betting_p_value([-1.0] * 50) == 1.0


@pytest.mark.parametrize("level", [0.0077, 0.05])
def test_the_betting_test_keeps_its_level_where_sign_flips_do_not(level: float) -> None:
    """20,000 looks at 2,000 users of whom 11 % gain .25 and 2.75 % lose 1: the mean is zero; three standard errors."""
    source = np.random.default_rng(11)
    counts = source.multinomial(2000, [0.11, 0.0275, 0.8625], size=20_000)
    p = betting_p_value([0.25, -1.0, 0.0], counts)
    assert np.mean(p <= level) <= level + 3 * np.sqrt(level / p.size)


def test_the_betting_test_sees_a_graded_gain_of_three_points() -> None:
    """Differences of uniform size on 14 % of 2,000 users, mean +.03: the share found at .0077 is above .9."""
    source = np.random.default_rng(12)
    sizes = source.uniform(0, 1, (500, 2000)) * (source.uniform(size=(500, 2000)) < 0.14)
    signs = np.where(source.uniform(size=sizes.shape) < 0.5 + 0.03 / (2 * 0.07), 1.0, -1.0)
    found = [betting_p_value(row) <= 0.0077 for row in sizes * signs]
    assert np.mean(found) > 0.9
