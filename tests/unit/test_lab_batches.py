"""Batches of the collapse lab: weights by kind and strategy, replay that accumulates, demonstrations that are right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tidegate.lab.agent import CHANCES, KINDS, TRAFFIC, Tasks, draw_tasks
from tidegate.lab.batches import CURATIONS, Batch, Curation, mixed, successes

AGGRESSIVE, ALL, FULL = CURATIONS
SOLVED_BY_ALL = np.ones((9, 4), dtype=bool)


def batch(kinds: list[int], strategies: list[int]) -> Batch:
    return Batch(np.array(kinds), np.array(strategies), np.ones(len(kinds)))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_only_verified_answers_train() -> None:
    tasks = Tasks(np.array([0, 1, 2]), np.array([[True] * 4, [False] * 4, [False, True, False, False]]))
    kept = successes(tasks, np.array([3, 3, 1]), ALL)
    assert (kept.kinds.tolist(), kept.strategies.tolist(), kept.weights.tolist()) == ([0, 2], [3, 1], [1.0, 1.0])


def test_aggressive_filtering_keeps_the_strategy_that_succeeded_most_often() -> None:
    tasks = Tasks(np.array([0, 0, 1, 1, 2]), np.array([[True] * 4] * 3 + [[False] * 4] * 2))
    kept = successes(tasks, np.array([1, 1, 2, 2, 2]), AGGRESSIVE)
    assert (kept.kinds.tolist(), kept.strategies.tolist()) == ([0, 0], [1, 1])


def test_full_curation_weighs_kinds_alike_and_rare_strategies_more() -> None:
    kinds, strategies = np.array([0] * 5 + [1] * 3 + [2]), np.array([0, 0, 0, 0, 1, 2, 2, 2, 3])
    kept = successes(Tasks(kinds, SOLVED_BY_ALL), strategies, FULL)
    sums = [math.fsum(kept.weights[kinds == kind]) for kind in range(3)]
    assert sums == pytest.approx([3.0, 3.0, 3.0])
    assert kept.weights[4] / kept.weights[0] == pytest.approx(2.0)  # frequencies 1 and 4
    assert kept.weights.mean() == pytest.approx(1.0)


def test_shares_of_the_mix_hold() -> None:
    fresh = batch([0] * 300, [0] * 300)
    earlier = [batch([1] * 50, [2] * 50)]
    done = mixed(fresh, earlier, Curation(name="x", replay_share=0.15, demonstration_share=0.0), rng())
    assert len(done.kinds) == round(300 / 0.85)
    assert (done.kinds == 1).mean() == pytest.approx(0.15, abs=0.002)
    shown = mixed(fresh, [], Curation(name="x", demonstration_share=0.10), rng())
    assert 0.06 < len(shown.kinds[300:]) / len(shown.kinds) <= 0.10  # what nothing solves can't be shown
    assert shown.kinds[:300].tolist() == fresh.kinds.tolist()


def test_the_first_round_has_nothing_to_replay_and_other_curations_mix_nothing_in() -> None:
    fresh, earlier = batch([0] * 30, [0] * 30), [batch([1], [2])]
    assert len(mixed(fresh, [], Curation(name="x", replay_share=0.15), rng()).kinds) == 30
    assert len(mixed(fresh, [batch([], [])], Curation(name="x", replay_share=0.15), rng()).kinds) == 30
    assert len(mixed(fresh, earlier, ALL, rng()).kinds) == len(mixed(fresh, earlier, AGGRESSIVE, rng()).kinds) == 30


def test_replay_reaches_back_to_every_earlier_round_and_balances_kinds() -> None:
    fresh = batch([3] * 8_000, [3] * 8_000)
    earlier = [batch([0] * 90, [0] * 90), batch([1] * 10, [1] * 10), batch([0] * 90, [2] * 90)]
    done = mixed(fresh, earlier, Curation(name="x", replay_share=0.2), rng())
    replayed = done.strategies[8_000:]
    shares = np.bincount(replayed, minlength=4) / len(replayed)
    assert len(replayed) == 2_000
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.25, 0.0], atol=0.04)


def test_demonstrations_are_right_balanced_and_use_every_strategy() -> None:
    fresh = batch([0] * 40_000, [0] * 40_000)
    done = mixed(fresh, [], Curation(name="x", demonstration_share=0.2), rng())
    kinds, strategies = done.kinds[40_000:], done.strategies[40_000:]
    shares = np.bincount(kinds) / len(kinds)
    solvable = 1.0 - np.prod(1.0 - CHANCES, axis=1)
    np.testing.assert_allclose(shares, solvable / solvable.sum(), atol=0.02)
    useful = [
        set(np.flatnonzero(np.bincount(strategies[kinds == kind], minlength=4) > 50)) for kind in range(len(KINDS))
    ]
    assert useful == [set(range(4))] * 4
    dates = np.bincount(strategies[kinds == 3], minlength=4) / (kinds == 3).sum()
    assert dates[3] > dates[2] > dates[1] > dates[0]


def test_a_demonstration_is_of_a_strategy_that_solves_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.lab.agent.CHANCES", np.tile([0.0, 1.0, 0.0, 0.0], (4, 1)))
    assert draw_tasks(TRAFFIC, 3, rng()).solved_by.tolist() == [[False, True, False, False]] * 3
    done = mixed(batch([0] * 90, [0] * 90), [], Curation(name="x", demonstration_share=0.1), rng())
    assert done.strategies[90:].tolist() == [1] * 10


@pytest.mark.parametrize(("replay", "shown"), [(-0.1, 0.0), (0.0, -0.1), (0.5, 0.5), (math.nan, 0.0)])
def test_shares_that_leave_no_room_are_refused(replay: float, shown: float) -> None:
    with pytest.raises(ValueError, match="sum below 1"):
        Curation(name="x", replay_share=replay, demonstration_share=shown)
