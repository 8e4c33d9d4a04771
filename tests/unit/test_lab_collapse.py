"""The collapse lab: what the gate's tests say of a policy that was trained on its own successes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.app.laboratory import collapse
from tidegate.config import Settings
from tidegate.core.errors import ConfigError
from tidegate.core.gate.collapse import collapse_alarms
from tidegate.core.gate.policy import CollapseRules
from tidegate.gate import load_policy
from tidegate.lab.agent import (
    BALANCED,
    CHANCES,
    KINDS,
    STRATEGIES,
    TRAFFIC,
    Policy,
    Tasks,
    draw_tasks,
    first_policy,
    softmax,
)
from tidegate.lab.batches import CURATIONS, Batch, Curation, mixed
from tidegate.lab.collapse import CollapseRun, run_collapse, sampled

RULES = load_policy().collapse
assert isinstance(RULES, CollapseRules)
LEVEL = load_policy().non_inferiority.level
SEEDS = range(5)
AGGRESSIVE, SUCCESSES, FULL = CURATIONS


def run(curation: Curation, *, seed: int = 0, rounds: int = 20) -> CollapseRun:
    assert isinstance(RULES, CollapseRules)
    return run_collapse(seed=seed, curation=curation, rounds=rounds, rules=RULES, level=LEVEL)


@cache
def runs() -> dict[str, list[CollapseRun]]:
    """What ``tidegate lab collapse`` runs, by curation."""
    done = collapse(Settings(), seeds=SEEDS, rounds=20)
    return {curation.name: [run for run in done if run.curation == curation.name] for curation in CURATIONS}


def test_alarms_fire_on_aggressive_filtering_and_not_on_full_curation() -> None:
    assert [len(found) for found in runs().values()] == [5, 5, 5]
    for aggressive, full in zip(runs()["aggressive"], runs()["full"], strict=True):
        assert set(aggressive.firing) >= {"pass@8", "effective strategies", "Vendi score", "token entropy (nats)"}
        assert full.firing == ()
        assert len(full.alarms) == 6


def test_held_out_success_is_higher_with_full_curation_on_every_seed() -> None:
    for aggressive, full in zip(runs()["aggressive"], runs()["full"], strict=True):
        assert full.standings[-1].held_out > aggressive.standings[-1].held_out + 0.03
        assert full.standings[-1].held_out > full.standings[0].held_out + 0.1
        assert full.standings[-1].strategies > 2.0
        assert aggressive.standings[-1].strategies < 1.5


def test_aggressive_filtering_looks_like_progress_in_the_traffic() -> None:
    for aggressive in runs()["aggressive"]:
        assert aggressive.standings[-1].traffic > aggressive.standings[0].traffic + 0.05
    falls = [run.standings[-1].held_out < run.standings[0].held_out - 0.05 for run in runs()["aggressive"]]
    assert sum(falls) == 4  # seed 4 begins with "code" ahead, the one strategy that is of use everywhere


def test_training_on_all_successes_wins_one_answer_and_loses_the_others() -> None:
    """The price of variety: one answer is right less often than with the narrow policy, some of eight more often."""
    for successes, full in zip(runs()["successes"], runs()["full"], strict=True):
        assert "effective strategies" in successes.firing
        assert successes.standings[-1].held_out > full.standings[-1].held_out
        assert successes.alarms[0].challenger < full.alarms[0].challenger


def test_curations_of_a_seed_start_from_the_same_policy() -> None:
    for trio in zip(*runs().values(), strict=True):
        assert len({run.standings[0] for run in trio}) == 1
        assert len({run.alarms[0].anchor for run in trio}) == 1
    assert len({run.standings[0] for run in runs()["full"]}) == len(SEEDS)


def test_a_run_repeats_and_one_round_is_the_beginning_of_two() -> None:
    assert run(FULL, rounds=3) == run(FULL, rounds=3)
    assert run(FULL, rounds=2).standings == run(FULL, rounds=3).standings[:3]


def test_earlier_rounds_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Batch, ...]] = []

    def watched(fresh: Batch, earlier: list[Batch], *rest: Any) -> Batch:
        seen.append((*earlier, fresh))
        return mixed(fresh, earlier, *rest)

    monkeypatch.setattr("tidegate.lab.collapse.mixed", watched)
    run(FULL, rounds=4)
    assert [len(batches) for batches in seen] == [1, 2, 3, 4]
    assert seen[0] == seen[3][:1]


def test_the_weights_keep_the_variety_and_the_mix_alone_does_not() -> None:
    weights = run(Curation(name="weights", balanced=True))
    mix = run(replace(FULL, name="mix", balanced=False))
    assert weights.firing == ()
    assert "effective strategies" in mix.firing
    assert mix.standings[-1].strategies > run(SUCCESSES).standings[-1].strategies


def test_an_untrained_policy_sounds_no_alarm() -> None:
    assert isinstance(RULES, CollapseRules)
    policy = first_policy(np.random.default_rng(0))
    tasks = draw_tasks(TRAFFIC, RULES.tasks, np.random.default_rng(1))
    evidence = sampled(tasks, challenger=policy, anchor=policy, per_task=RULES.samples, seed=2)
    kinds = [KINDS[kind] for kind in tasks.kinds]
    assert not any(alarm.fires for alarm in collapse_alarms(evidence, kinds, RULES, level=LEVEL, seed=3))


def test_samples_hold_what_the_policies_answered() -> None:
    """The challenger always recalls, the anchor always codes."""
    policies = [Policy(np.eye(4)[place] * 50.0, np.zeros((4, 4))) for place in (0, 3)]
    tasks = Tasks(np.array([0, 1]), np.array([[True, False, False, True], [False, True, True, True]]))
    evidence = sampled(tasks, challenger=policies[0], anchor=policies[1], per_task=4, seed=0)
    assert evidence.challenger.passed.tolist() == [4, 0]
    assert evidence.anchor.passed.tolist() == [4, 4]
    assert evidence.anchor.strategies.tolist() == [1.0, 0.0]  # a task that both do not pass has no value
    assert evidence.challenger.surprisal == pytest.approx([0.0, 0.0], abs=1e-9)


def test_a_strategy_is_drawn_as_often_as_its_probability() -> None:
    policy = first_policy(np.random.default_rng(5))
    kinds = np.repeat(np.arange(len(KINDS)), 20_000)
    drawn = policy.draw(kinds, np.random.default_rng(6))
    shares = [np.bincount(drawn[kinds == kind], minlength=len(STRATEGIES)) / 20_000 for kind in range(len(KINDS))]
    np.testing.assert_allclose(shares, policy.probabilities, atol=0.012)


def test_expected_success_is_what_answers_to_many_tasks_achieve() -> None:
    policy = first_policy(np.random.default_rng(7))
    rng = np.random.default_rng(8)
    for mix in (TRAFFIC, BALANCED):
        tasks = draw_tasks(mix, 40_000, rng)
        right = tasks.solved_by[np.arange(40_000), policy.draw(tasks.kinds, rng)]
        assert policy.success(mix) == pytest.approx(right.mean(), abs=0.01)


@given(st.integers(0, 1000), st.integers(1, 12))
def test_a_training_step_is_the_gradient_of_the_log_likelihood(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    policy = first_policy(rng)
    kinds, strategies = (rng.integers(0, 4, size) for _ in range(2))
    weights = rng.random(size) + 0.1

    def likelihood(shared: np.ndarray, own: np.ndarray) -> float:
        logs = np.log(softmax(shared + own))
        return float(np.sum(weights * logs[kinds, strategies]) / weights.sum())

    moved = policy.trained(kinds, strategies, weights, lr=1.0, steps=1)
    step = 1e-5
    for place in range(4):
        nudge = step * np.eye(4)[place]
        slope = (likelihood(policy.shared + nudge, policy.own) - likelihood(policy.shared - nudge, policy.own)) / 2e-5
        assert (moved.shared - policy.shared)[place] == pytest.approx(slope, abs=1e-8)
        row = np.zeros((4, 4))
        row[1] = nudge
        slope = (likelihood(policy.shared, policy.own + row) - likelihood(policy.shared, policy.own - row)) / 2e-5
        assert (moved.own - policy.own)[1, place] == pytest.approx(slope, abs=1e-8)


def test_nothing_to_train_on_changes_nothing() -> None:
    policy = first_policy(np.random.default_rng(0))
    none = np.zeros(0, dtype=np.int64)
    assert policy.trained(none, none, np.zeros(0), lr=1.0, steps=5) is policy


@pytest.mark.parametrize("curation", CURATIONS, ids=lambda curation: curation.name)
def test_rounds_without_a_success_leave_the_policy_as_it_is(
    curation: Curation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.lab.agent.CHANCES", np.zeros_like(CHANCES))
    done = run(curation, rounds=2)
    assert len(set(done.standings)) == 1
    assert done.standings[0].traffic == 0.0
    assert done.firing == ()


def test_a_policy_without_collapse_tests_and_impossible_runs_are_refused(tmp_path: Path) -> None:
    shipped = (resources.files("tidegate.gate") / "policies" / "default.toml").read_text(encoding="utf-8")
    before, _, after = shipped.partition("[collapse]")
    file = tmp_path / "gate.toml"
    file.write_text(f"collapse = 'none'\n{before}[canary]{after.partition('[canary]')[2]}", encoding="utf-8")
    with pytest.raises(ConfigError, match='has collapse = "none", so that there is no test to watch'):
        collapse(Settings(policy=file), seeds=[0], rounds=1)
    with pytest.raises(ConfigError, match="rounds = 0"):
        collapse(Settings(), seeds=[0], rounds=0)
    with pytest.raises(ConfigError, match="seed = -1"):
        collapse(Settings(), seeds=[-1], rounds=1)
