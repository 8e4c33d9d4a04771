"""The gate's promises on simulated streams, in a smaller form than ``tidegate gate simulate`` prints.

Each bound is tested with three standard errors of a rate that sits on it, and each test also shows that a rule or a
way of counting that gives no such promise exceeds the bound by far.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tidegate.app.planning import simulate
from tidegate.cli.gate import markdown
from tidegate.cli.main import app
from tidegate.config import Settings
from tidegate.core.errors import ConfigError
from tidegate.core.gate.policy import CanaryRules, HoldbackRules, Policy
from tidegate.core.gate.simulation import TABLES, Setup, Table, live
from tidegate.core.gate.simulation.looks import (
    DISCORDANCE,
    PAIRS,
    graded,
    independent,
    mixed_gains,
    shared_sets,
    shifted,
    skewed,
    task_rates,
    unequal_traffic,
)
from tidegate.core.gate.simulation.rules import EACH_TIME, LEDGER, NOT_WORSE, measure, promotions, under_ledger
from tidegate.core.gate.simulation.stages import certified
from tidegate.core.statistics import Ledger, sign_test_power
from tidegate.gate import load_policy

ALPHA, WINDOWS, LOOKS = 0.10, 400, 13
SHAPE = (WINDOWS, LOOKS)
POLICY = load_policy()
CANARY: CanaryRules = POLICY.canary  # type: ignore[assignment] - the shipped policy has both stages
HOLDBACK: HoldbackRules = POLICY.holdback  # type: ignore[assignment]

GENERATORS: dict[str, Any] = {
    "independent": independent,
    "graded": graded,
    "skewed": skewed,
    "shared sets": shared_sets,
    "one unit a user": partial(unequal_traffic, one_unit=True),
    "all units": partial(unequal_traffic, one_unit=False),
}
BOUNDED = sorted(set(GENERATORS) - {"all units"})
GRADED = {"graded", "skewed"}
"""Streams of graded rewards, whose test asks for so much evidence that a false promotion is a rarity."""


def rng(seed: int = 20261129) -> np.random.Generator:
    return np.random.default_rng(seed)


def upper(bound: float, trials: int) -> float:
    return bound + 3 * math.sqrt(bound * (1 - bound) / trials)


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("gain", [-0.01, 0.0, 0.03])
def test_streams_have_the_gain_and_discordance_that_they_name(generator: Any, gain: float) -> None:
    """40 windows of 13 looks of 2,000 pairs; four standard errors of the mean over windows, which are independent."""
    looks = generator(np.full((40, LOOKS), gain), rng())
    assert looks.counts.sum(axis=-1).tolist() == [[PAIRS] * LOOKS] * 40
    windows = looks.means.mean(axis=-1)
    assert windows.mean() == pytest.approx(gain, abs=4 * windows.std() / math.sqrt(windows.size))
    if generator is skewed and gain:
        return
    differing = 1 - looks.counts[..., -1].mean() / PAIRS
    assert differing == pytest.approx(DISCORDANCE, abs=0.01)


def test_a_shift_of_log_odds_brings_the_gain_and_keeps_sure_tasks() -> None:
    rates = task_rates((3, 200_000), rng())
    gains = np.array([-0.05, 0.0, 0.10])
    moved = shifted(rates, gains)
    assert moved.mean(axis=-1) - rates.mean(axis=-1) == pytest.approx(gains, abs=2e-3)
    assert 2 * (rates * (1 - rates)).mean() == pytest.approx(DISCORDANCE, abs=2e-3)
    np.testing.assert_array_equal(shifted(np.array([[0.0, 1.0]]), np.array([0.1])), [[0.0, 1.0]])


def test_ledger_rows_are_the_golden_ones() -> None:
    p = np.array([[0.2, 0.004, 0.03, 0.6, 0.0005, 0.02]])
    assert under_ledger(p, Ledger()).tolist() == [[False, True, False, False, True, True]]


def test_rules_are_counted_by_window() -> None:
    gains = np.array([[0.03, 0.0, -0.01], [0.03, 0.03, -0.01]])
    found = measure(gains, np.array([[True, True, False], [False, True, False]]))
    assert (found.fdr, found.harmful, found.power, found.first_power) == (0.25, 0.0, 2 / 3, 0.5)
    assert found.drift == pytest.approx(0.03)
    nothing = measure(gains * 0 - 0.01, np.zeros((2, 3), dtype=bool))
    assert (nothing.fdr, nothing.harmful) == (0.0, 0.0)
    assert math.isnan(nothing.power)


@pytest.mark.parametrize("name", BOUNDED)
def test_the_ledger_bounds_false_promotions_and_testing_each_time_does_not(name: str) -> None:
    windows = 150 if name in GRADED else WINDOWS
    looks = GENERATORS[name](np.zeros((windows, LOOKS)), rng())
    promoted = promotions(looks, Ledger(), rng())
    false = measure(looks.gains, promoted[LEDGER]).fdr
    assert false <= upper(ALPHA, windows)
    assert name in GRADED or false > 0.0
    assert measure(looks.gains, promoted[EACH_TIME]).fdr > 2 * ALPHA


def test_no_ledger_helps_when_all_units_of_a_user_count() -> None:
    looks = unequal_traffic(np.zeros(SHAPE), rng(), one_unit=False)
    assert measure(looks.gains, promotions(looks, Ledger(), rng())[LEDGER]).fdr > 2 * ALPHA


def test_an_ordinary_stream_is_safe_and_its_gains_are_found() -> None:
    looks = independent(mixed_gains(SHAPE, rng(1)), rng(2))
    found = {name: measure(looks.gains, which) for name, which in promotions(looks, Ledger(), rng(3)).items()}
    assert found[LEDGER].fdr <= ALPHA / 2
    assert found[NOT_WORSE].fdr > 0.6
    assert found["score >= champion"].fdr == pytest.approx(0.43, abs=0.04)  # an independent simulation's figure
    assert found[LEDGER].power == pytest.approx(0.92, abs=0.03)  # likewise
    first = int((looks.gains[:, 0] > 0).sum())
    exact = sign_test_power(PAIRS, DISCORDANCE, 0.03, Ledger().level)
    assert found[LEDGER].first_power == pytest.approx(exact, abs=3 * math.sqrt(exact * (1 - exact) / first))
    assert found["p < .05 and bootstrap"].power <= found[EACH_TIME].power
    assert found["margin >= .17 on 8 probes"].power < 0.2


def test_small_losses_add_up_only_without_the_ledger_and_without_the_anchor() -> None:
    """30 streams of 100 looks at challengers of -0.5 pp."""
    gains = np.full((30, 100), -0.005)
    drift: dict[str, float] = {}
    for name, bounds in (("ledger", False), ("not worse", False), ("not worse", True)):
        promoted = certified(gains, POLICY, rng(), superiority=name, bounds=bounds)  # type: ignore[arg-type]
        drift[f"{name}, bounds: {bounds}"] = measure(gains, promoted).drift
    assert drift["ledger, bounds: False"] > -0.005
    assert drift["not worse, bounds: False"] < -0.30
    assert -0.015 < drift["not worse, bounds: True"] < 0.0


def test_the_anchor_alone_stops_small_losses_near_its_margin() -> None:
    """As above, with bounds against the champion so wide that only the one against the anchor can hold."""
    rules = replace(POLICY.non_inferiority, overall_margin=0.5, slice_margin=0.9)
    gains = np.full((30, 100), -0.005)
    promoted = certified(gains, replace(POLICY, non_inferiority=rules), rng(), superiority="not worse")
    assert -0.03 < measure(gains, promoted).drift < -0.005


def test_bounds_only_take_promotions_away() -> None:
    gains = mixed_gains((150, LOOKS), rng(4))
    alone = measure(gains, certified(gains, POLICY, rng(5), bounds=False))
    bounded = measure(gains, certified(gains, POLICY, rng(5)))
    assert alone.fdr <= upper(ALPHA, 150)
    assert 0.5 < bounded.power < alone.power


def test_a_canary_of_single_units_errs_as_rarely_as_it_promises() -> None:
    for gain, side, bound in ((0.0, "rolled_back", 1 / CANARY.rollback_at), (-0.02, "promoted", 1 / CANARY.promote_at)):
        ended = live.run_canaries(live.independent_units(gain, CANARY.horizon_pairs), CANARY, 300, rng())
        assert getattr(ended, side) <= upper(bound, 300)
        assert ended.promoted + ended.rolled_back + ended.inconclusive == pytest.approx(1.0)
    better = live.run_canaries(live.independent_units(0.03, CANARY.horizon_pairs), CANARY, 100, rng())
    worse = live.run_canaries(live.independent_units(-0.05, CANARY.horizon_pairs), CANARY, 100, rng())
    assert better.promoted > 0.9
    assert worse.rolled_back > 0.9
    assert 100 < better.median_pairs < CANARY.horizon_pairs


def test_counting_all_units_of_sticky_users_breaks_the_canary() -> None:
    equal = live.run_canaries(live.sticky_units(0.0, CANARY.horizon_pairs, 200), CANARY, 200, rng())
    assert equal.rolled_back > 0.1
    worse = live.run_canaries(live.sticky_units(-0.02, CANARY.horizon_pairs, 200), CANARY, 200, rng())
    assert worse.promoted > 0.15


def test_a_control_of_another_share_sees_another_time() -> None:
    ended = [
        live.run_canaries(live.changing_world(CANARY, 0.10, equal_shares=equal), CANARY, 200, rng()).rolled_back
        for equal in (False, True)
    ]
    assert ended[0] > 0.3
    assert ended[1] <= upper(1 / CANARY.rollback_at, 200)


def test_what_the_canary_left_over_is_in_order() -> None:
    taken = np.array([[2, 3, 9], [1, 2, 3]])
    assert live._others(taken, 3).tolist() == [[1, 4, 5], [4, 5, 6]]


def test_a_detector_is_slow_to_cry_wolf_and_quick_to_see_one() -> None:
    rules = replace(HOLDBACK, alarm_at=1000.0)
    false = live.run_detector(live.block_of(-rules.margin), rules, 200, 20_000, rng())
    assert 1000 * (1 - 3 / math.sqrt(200)) <= false.mean_pairs < 3000
    delays = [
        live.run_detector(live.block_of(-loss), rules, 100, 20_000, rng()).median_pairs for loss in (0.05, 0.1, 0.2)
    ]
    assert delays == sorted(delays, reverse=True)
    assert delays[-1] < 300
    silent = live.run_detector(live.block_of(0.1), rules, 20, 2_000, rng())
    assert (silent.alarmed, silent.mean_pairs, silent.median_pairs) == (0.0, math.inf, math.inf)


def test_a_holdback_of_the_same_users_cries_wolf_and_one_drawn_anew_does_not() -> None:
    alarmed: dict[str, float] = {}
    for counting in ("all", "once"):
        draw = live.holdback_units(counting, HOLDBACK.share, rng(1), streams=40, users=2000)  # type: ignore[arg-type]
        alarmed[counting] = live.run_detector(draw, HOLDBACK, 40, 10_000, rng(2)).alarmed
    assert alarmed["all"] > 0.2
    assert alarmed["once"] <= upper(0.1, 40)  # at most 10,000 of 100,000 pairs


def test_tables_come_again_from_their_seed_and_leave_out_stages_that_a_policy_has_not() -> None:
    bare: Policy = replace(POLICY, canary="none", holdback="none")
    setup = Setup(policy=bare, windows=3, seed=5)
    for name, make in TABLES.items():
        table = make(setup)
        if name in ("rules", "scenarios", "conditions"):
            assert table is not None
            assert table == make(setup)
            assert table != make(replace(setup, seed=6))
            assert all(len(row) == len(table.columns) for row in table.rows)
        else:
            assert table is None
    with pytest.raises(ValueError, match="windows = 0"):
        Setup(policy=bare, windows=0, seed=0)


def test_the_command_prints_every_table(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["gate", "simulate", "--windows", "2", "--seed", "3", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["windows"], report["seed"]) == (2, 3)
    assert [table["name"] for table in report["tables"]] == list(TABLES)
    refused = CliRunner().invoke(app, ["gate", "simulate", "--windows", "0"])
    assert refused.exit_code == 2


def test_a_policy_without_live_stages_has_fewer_tables_and_people_read_markdown(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = (resources.files("tidegate.gate") / "policies" / "default.toml").read_text(encoding="utf-8")
    kept = re.sub(r"^\[(canary|holdback)\]\n(?:(?!\[).*\n)*", "", shipped, flags=re.MULTILINE)
    bare = kept.replace('name = "default"', 'name = "bare"\ncanary = "none"\nholdback = "none"')
    (tmp_path / "bare.toml").write_text(bare, encoding="utf-8")
    (tmp_path / "tidegate.toml").write_text('policy = "bare.toml"\n', encoding="utf-8")
    shown = CliRunner().invoke(app, ["gate", "simulate", "--windows", "1", "--seed", "3"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("1 windows, seed 3\n\n**Rules on the same stream.**")
    assert "| the ledger |" in shown.stdout
    assert "canary" not in shown.stdout.lower()


def test_sizes_that_cannot_be_simulated_are_refused() -> None:
    with pytest.raises(ConfigError, match="windows = 0"):
        list(simulate(Settings(), windows=0, seed=0))


def test_a_table_is_shown_as_markdown() -> None:
    table = Table(title="T", notes="N.", columns=("a", "b", "c"), rows=(("x", 0.25, None), ("y", 12345.6, -2.5)))
    assert markdown(table) == (
        "**T.** N.\n\n| a | b | c |\n| --- | --- | --- |\n| x | 0.250 | - |\n| y | 12,346 | -2.50 |"
    )
