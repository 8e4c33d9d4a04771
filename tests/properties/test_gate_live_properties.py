"""Live trials under simulation: error rates with a look after every pair, assignments, and a world that changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from live_log import CANARY, LiveLog, live_policy
from tidegate.core.gate.live import ERROR_EVIDENCE, Continue, Findings, decide_canary, fall_evidence, measure
from tidegate.core.gate.live_assignment import Assignment, LiveArm, unit_id
from tidegate.core.gate.live_state import Calls, LiveUnit, Trial
from tidegate.core.statistics import canary_paths

USERS = [f"user-{number}" for number in range(20_000)]


@given(share=st.floats(0.01, 0.6), draw=st.text(max_size=5), low=st.sampled_from(LiveArm))
@settings(max_examples=20, deadline=None)
def test_arms_are_disjoint_and_have_the_share_that_was_asked_for(share: float, draw: str, low: LiveArm) -> None:
    assignment = Assignment(draw=draw, share=share, low=low)
    arms = [assignment.arm_of(user) for user in USERS[:4000]]
    other = LiveArm.CONTROL if low is LiveArm.SUBJECT else LiveArm.SUBJECT
    assert abs(arms.count(low) / 4000 - share) < 4.5 * np.sqrt(share * (1 - share) / 4000)
    rest = min(share, 1.0 - share)
    assert abs(arms.count(other) / 4000 - rest) < 4.5 * np.sqrt(rest * (1 - rest) / 4000)
    assert all(assignment.is_low(user) == (arm is low) for user, arm in zip(USERS, arms, strict=False))


def test_a_wider_canary_keeps_its_users_and_its_controls() -> None:
    arms: list[dict[str, LiveArm]] = []
    for share in (0.05, 0.25, 0.5):
        assignment = Assignment(draw="canary-1", share=share, low=LiveArm.SUBJECT)
        found = {user: assignment.arm_of(user) for user in USERS[:2000]}
        arms.append({user: arm for user, arm in found.items() if arm is not None})
    assert arms[0].items() < arms[1].items() < arms[2].items()
    assert len(arms[2]) == 2000


def test_draws_are_independent() -> None:
    first, second = (Assignment(draw=draw, share=0.3, low=LiveArm.CONTROL) for draw in ("t/0", "t/1"))
    both = sum(first.is_low(user) and second.is_low(user) for user in USERS)
    assert abs(both / len(USERS) - 0.09) < 4.5 * np.sqrt(0.09 * 0.91 / len(USERS))
    assert unit_id("t/0", "u") != unit_id("t/1", "u")


def _fresh(subject: NDArray[np.float64], control: NDArray[np.float64]) -> Trial:
    log = LiveLog(policy=live_policy())
    log.start()
    units = [
        LiveUnit(user=f"{arm}{i}", arm=arm, outcome=float(x), time=0.0)
        for arm, outcomes in ((LiveArm.SUBJECT, subject), (LiveArm.CONTROL, control))
        for i, x in enumerate(outcomes)
    ]
    return log.trial.with_units(units)


@given(seed=st.integers(0, 2**32 - 1), length=st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_a_trial_measures_what_the_paths_say(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    subject, control = rng.random((2, length)).round(2)
    trial = _fresh(subject, control)
    paths = canary_paths(np.concatenate([[0.0], subject - control]), CANARY.margin, CANARY.bets)
    measured = measure(trial)
    assert measured.k_minus == pytest.approx(paths.k_minus[-1])
    # one more pair of equals, at the front, gives K+ its gain of that pair
    gain = np.log1p(np.asarray(CANARY.bets) * CANARY.margin / (1 - CANARY.margin))
    logs = np.log1p(np.multiply.outer(CANARY.bets, (subject - control + CANARY.margin) / (1 - CANARY.margin)))
    assert measured.k_plus == pytest.approx(np.exp(logs.sum(axis=-1)).mean())
    assert paths.k_plus[-1] == pytest.approx(np.exp(logs.sum(axis=-1) + gain).mean())


def _ends(rng: np.random.Generator, subject: float, control: float, runs: int, pairs: int) -> tuple[float, float]:
    """Shares of canaries that are promoted, and rolled back, with a look after every pair up to the horizon."""
    d = (rng.random((runs, pairs)) < subject).astype(float) - (rng.random((runs, pairs)) < control)
    paths = canary_paths(d, CANARY.margin, CANARY.bets)
    up = np.where((paths.k_plus >= CANARY.promote_at).any(-1), (paths.k_plus >= CANARY.promote_at).argmax(-1), pairs)
    down = np.where(
        (paths.k_minus >= CANARY.rollback_at).any(-1), (paths.k_minus >= CANARY.rollback_at).argmax(-1), pairs
    )
    return float(np.mean(up < down)), float(np.mean(down < up))


def test_looking_after_every_pair_keeps_both_error_rates() -> None:
    """2,000 canaries of 400 pairs; three standard errors of Monte Carlo above each bound."""
    rng = np.random.default_rng(11)
    runs = 2000
    promoted, _ = _ends(rng, 0.68, 0.70, runs, 400)
    assert promoted <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)
    _, rolled_back = _ends(rng, 0.70, 0.70, runs, 400)
    assert rolled_back <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / runs)
    assert _ends(rng, 0.85, 0.60, 200, 400)[0] > 0.95
    assert _ends(rng, 0.30, 0.70, 200, 400)[1] > 0.95


def test_a_tolerated_error_rate_is_rarely_taken_for_a_worse_one() -> None:
    """Exactly the tolerated ratio, 60 looks each; 1,000 trials, three standard errors above 1 in 100."""
    rng = np.random.default_rng(5)
    log = LiveLog()
    log.start()
    start = log.trial
    ratio, alarms, runs = log.policy.triggers.max_error_ratio, 0, 1000
    subject, control = rng.binomial(40, ratio * 0.02, (runs, 60)), rng.binomial(40, 0.02, (runs, 60))
    for run in range(runs):
        trial = start
        for errors, others in zip(subject[run], control[run], strict=True):
            trial = trial.with_calls(
                Calls(subject=40, control=40, subject_errors=int(errors), control_errors=int(others))
            )
            if np.exp(trial.error_logs).mean() >= ERROR_EVIDENCE:
                alarms += 1
                break
    assert alarms / runs <= 1 / ERROR_EVIDENCE + 3 * np.sqrt(0.01 * 0.99 / runs)


def test_evidence_for_a_fall_keeps_its_level_and_finds_falls() -> None:
    rng = np.random.default_rng(8)
    below, runs = 0.7, 1000

    def alarmed(rate: float) -> float:
        outcomes = (rng.random((runs, 300)) < rate).astype(float)
        gains = np.log1p(np.multiply.outer((below - outcomes) / (1 - below), np.asarray(CANARY.bets)))
        paths = np.exp(gains.cumsum(axis=1)).mean(axis=-1)
        assert fall_evidence(outcomes[0], below, CANARY.bets) == pytest.approx(paths[0, -1])
        return float(np.mean((paths >= 100.0).any(axis=-1)))

    assert alarmed(below) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / runs)
    assert alarmed(0.5) > 0.95


def _rolled_back(arm_of: Callable[[float], str | None], rng: np.random.Generator, runs: int) -> float:
    """Share of equal canaries that are rolled back while the rate of the whole world falls from 0.9 to 0.6."""
    users, bad = 4000, 0
    for _ in range(runs):
        position = rng.random(users)
        outcome = (rng.random(users) < np.linspace(0.6, 0.9, users)).astype(float)
        arms = [arm_of(x) for x in position]
        subject = outcome[[arm == "subject" for arm in arms]]
        control = outcome[[arm == "control" for arm in arms]]
        n = min(len(subject), len(control))
        paths = canary_paths(control[:n] - subject[:n], CANARY.margin, CANARY.bets)
        bad += bool((paths.k_minus >= CANARY.rollback_at).any())
    return bad / runs


def test_arms_of_equal_shares_stand_a_world_that_changes() -> None:
    """A small arm against everybody else pairs units with others of long ago, and takes the change for a loss."""
    rng = np.random.default_rng(2)
    assignment = Assignment(draw="d", share=0.05, low=LiveArm.SUBJECT)
    edge = 1.0 - assignment.share

    def matched(x: float) -> str | None:
        return "subject" if x < assignment.share else "control" if x >= edge else None

    def everybody_else(x: float) -> str:
        return "subject" if x < assignment.share else "control"

    assert _rolled_back(matched, rng, 200) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / 200)
    assert _rolled_back(everybody_else, rng, 200) > 0.2


def test_missing_data_never_promotes() -> None:
    trial = _fresh(np.ones(300), np.zeros(0))
    assert isinstance(decide_canary(trial, Findings()), Continue)
