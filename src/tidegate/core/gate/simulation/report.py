"""The tables of ``tidegate gate simulate``: every claim about error rates as a measurement.

A table is a pure function of policy, size and seed; each has random numbers of its own, so that tables can be made
apart from one another and in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from tidegate.core.gate.policy import Policy
from tidegate.core.gate.simulation import live
from tidegate.core.gate.simulation.looks import (
    DISCORDANCE,
    PAIRS,
    Floats,
    Generator,
    graded,
    independent,
    mixed_gains,
    shared_sets,
    skewed,
    unequal_traffic,
)
from tidegate.core.gate.simulation.rules import LEDGER, RuleResult, measure, promotions
from tidegate.core.gate.simulation.stages import Superiority, certified
from tidegate.core.gate.state import GateState
from tidegate.core.statistics import Ledger, sign_test_power

Cell: TypeAlias = str | float | None

DRIFT_GAIN = -0.005
DRIFT_LOOKS = 100
_POINTS = 100.0
_MORE = 4  # times as many windows where a look is cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One measured table. ``notes`` says under which conditions; a cell without a value is None."""

    title: str
    notes: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated: ``policy``, ``windows`` >= 1 of its looks, and the ``seed`` of all random numbers."""

    policy: Policy
    windows: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse sizes and seeds that cannot be used."""
        if self.windows < 1 or self.seed < 0:
            raise ValueError(f"windows = {self.windows!r}, seed = {self.seed!r}: windows >= 1, seed >= 0 are accepted")

    def rng(self, section: int) -> np.random.Generator:
        """The random numbers of a section."""
        return np.random.default_rng([self.seed, section])

    @property
    def ledger(self) -> Ledger:
        """A window before its first look."""
        return GateState().ledger(self.policy)

    @property
    def shape(self) -> tuple[int, int]:
        """Windows and looks."""
        return self.windows, self.policy.ledger.looks_per_window

    @property
    def drifting(self) -> Floats:
        """Streams of slightly worse challengers, as many looks in all as the windows hold."""
        return np.full((max(self.windows * self.shape[1] // DRIFT_LOOKS, 1), DRIFT_LOOKS), DRIFT_GAIN)


def rules_table(setup: Setup) -> Table:
    """What each rule does with an ordinary stream, and with one that gets worse in small steps."""
    rng = setup.rng(1)
    stream = independent(mixed_gains(setup.shape, rng), rng)
    drifting = independent(setup.drifting, rng)
    promoted = {name: measure(stream.gains, which) for name, which in promotions(stream, setup.ledger, rng).items()}
    drifted = {name: measure(drifting.gains, which) for name, which in promotions(drifting, setup.ledger, rng).items()}
    exact = sign_test_power(PAIRS, DISCORDANCE, 0.03, setup.ledger.level)
    return Table(
        title="Rules on the same stream",
        notes=(
            f"{setup.windows} windows of {setup.shape[1]} looks, {PAIRS} pairs a look, {DISCORDANCE:.0%} discordant; "
            "challengers gain -1 pp (half of them), 0 (a quarter) or +3 pp (a quarter). FDR is the mean over windows "
            "of false promotions over promotions. Power is the share of +3 pp challengers that are promoted; at a "
            f"window's first look the ledger's is {exact:.3f} exactly. Drift is what {DRIFT_LOOKS} looks of "
            f"{_points(DRIFT_GAIN)} challengers do to the champion in the mean of {len(setup.drifting)} streams."
        ),
        columns=("rule", "FDR", "harmful per 100 looks", "power", "power, first look", "drift, pp"),
        rows=tuple(
            (name, one.fdr, one.harmful, _number(one.power), _number(one.first_power), _POINTS * drifted[name].drift)
            for name, one in promoted.items()
        ),
    )


def scenarios_table(setup: Setup) -> Table:
    """The false discovery rate of every rule under conditions that strain it."""
    looks_per_set = setup.policy.ledger.looks_per_epoch
    sets = partial(shared_sets, looks_per_set=looks_per_set)
    equal, mixed = np.zeros(setup.shape), mixed_gains(setup.shape, setup.rng(2))
    more = (_MORE * setup.windows, setup.shape[1])
    scenarios: dict[str, tuple[Generator, Floats]] = {
        "none is better": (independent, np.zeros(more)),
        "mixed": (independent, mixed_gains(more, setup.rng(4))),
        f"all {_points(DRIFT_GAIN)}": (independent, np.full(more, DRIFT_GAIN)),
        "graded rewards, none is better": (graded, equal),
        "graded rewards, mixed": (graded, mixed),
        f"{looks_per_set} looks share a set, none is better": (sets, equal),
        f"{looks_per_set} looks share a set, mixed": (sets, mixed),
        "graded rewards, many small wins for few large losses, none is better": (skewed, equal),
        "unequal traffic, one unit a user, none is better": (partial(unequal_traffic, one_unit=True), equal),
        "unequal traffic, all units, none is better": (partial(unequal_traffic, one_unit=False), equal),
    }
    rows: list[tuple[Cell, ...]] = []
    names: tuple[str, ...] = ()
    for number, (scenario, (generator, gains)) in enumerate(scenarios.items()):
        rng = setup.rng(20 + number)
        promoted = promotions(generator(gains, rng), setup.ledger, rng)
        names = tuple(promoted)
        rows.append((scenario, *(measure(gains, which).fdr for which in promoted.values())))
    alpha = setup.policy.ledger.alpha
    error = math.sqrt(alpha * (1.0 - alpha) / setup.windows)
    exact = 1.0 - (1.0 - sign_test_power(PAIRS, DISCORDANCE, 0.0, setup.ledger.level)) ** setup.ledger.looks
    return Table(
        title="False discovery rate by scenario",
        notes=(
            f"The ledger's bound is {alpha:g} in every row but the last; a rate that sits on it has the standard "
            f"error {error:.3f}, half of that in the first three rows, which have {_MORE} times as many windows. In "
            f"the first row the ledger's rate is {exact:.3f} exactly. In the last row units of one user depend on each "
            "other, which is why a user gives one unit to a set. Graded rewards: the other rules take the sign-flip "
            "test, the ledger the betting test, because sign flips take differences to be symmetric."
        ),
        columns=("scenario", *names),
        rows=tuple(rows),
    )


def conditions_table(setup: Setup) -> Table:
    """Superiority with and without the other conditions of a promotion."""
    kinds: tuple[tuple[str, Superiority, bool], ...] = (
        (f"{LEDGER} alone", "ledger", False),
        (f"{LEDGER} and all bounds", "ledger", True),
        ("p < .05 and all bounds", "p < .05", True),
        ("not worse, and all bounds", "not worse", True),
    )
    equal, mixed = np.zeros(setup.shape), mixed_gains(setup.shape, setup.rng(3))
    rows: list[tuple[Cell, ...]] = []
    for number, (name, superiority, bounds) in enumerate(kinds):
        results: list[RuleResult] = []
        for part, gains in enumerate((equal, mixed, setup.drifting)):
            rng = setup.rng(30 + 3 * number + part)
            promoted = certified(gains, setup.policy, rng, superiority=superiority, bounds=bounds)
            results.append(measure(gains, promoted))
        null, stream, drift = results
        power, first = _number(stream.power), _number(stream.first_power)
        rows.append((name, null.fdr, stream.fdr, stream.harmful, power, first, _POINTS * drift.drift))
    rules = setup.policy.non_inferiority
    return Table(
        title="With the other conditions of a promotion",
        notes=(
            "All answers of the three arms are drawn, sealed sets close as the policy says, and a promoted challenger "
            f"is the next champion. Bounds: {_points(-rules.overall_margin)} against the champion, "
            f"{_points(-rules.anchor_margin)} against the anchor, {_points(-rules.slice_margin)} on each of "
            f"{max(PAIRS // rules.min_pairs_per_slice, 1)} slices."
        ),
        columns=(
            "promotes when",
            "FDR, none is better",
            "FDR, mixed",
            "harmful per 100 looks",
            "power",
            "power, first look",
            "drift, pp",
        ),
        rows=tuple(rows),
    )


def canary_table(setup: Setup) -> Table | None:
    """How a canary ends, by the true gain; None when the policy has no canary."""
    rules = setup.policy.canary
    if rules == "none":
        return None
    rows: list[tuple[Cell, ...]] = []
    for number, gain in enumerate((0.0, 0.03, -0.02, -0.05)):
        draw = live.independent_units(gain, rules.horizon_pairs)
        end = live.run_canaries(draw, rules, setup.windows, setup.rng(40 + number))
        rows.append((_points(gain), end.promoted, end.rolled_back, end.inconclusive, _number(end.median_pairs)))
    return Table(
        title="How a canary ends",
        notes=(
            f"{setup.windows} canaries, one unit a user, looked at after every pair up to {rules.horizon_pairs}; the "
            f"champion passes {live.SUCCESS:.0%} of its units. Bounds: promotion at {_points(-rules.margin)} or "
            f"less {1 / rules.promote_at:g}, rollback without a loss {1 / rules.rollback_at:g}."
        ),
        columns=("true gain", "promoted", "rolled back", "inconclusive", "median pairs to a decision"),
        rows=tuple(rows),
    )


def detector_table(setup: Setup) -> Table | None:
    """When the steady state's detector raises an alarm; None when the policy has no holdback."""
    rules = setup.policy.holdback
    if rules == "none":
        return None
    streams = max(setup.windows // 5, 2)
    pairs = int(3 * rules.alarm_at)
    rows: list[tuple[Cell, ...]] = []
    for number, gain in enumerate((-rules.margin, -0.03, -0.05, -0.10, -0.20)):
        found = live.run_detector(live.block_of(gain), rules, streams, pairs, setup.rng(50 + number))
        rows.append((_points(gain), found.alarmed, _number(found.mean_pairs), _number(found.median_pairs)))
    return Table(
        title="When the steady state raises an alarm",
        notes=(
            f"{streams} streams of at most {pairs:,} pairs, one unit a user and period. In the first row the loss is "
            "just what is tolerated, so that every alarm is false; the mean time to it must be at least "
            f"{rules.alarm_at:,.0f} pairs."
        ),
        columns=("true gain", "streams with an alarm", "mean pairs to an alarm", "median pairs to an alarm"),
        rows=tuple(rows),
    )


def dependence_table(setup: Setup) -> Table | None:
    """What the live decisions do when units of one user are all counted; None without canary and holdback."""
    canary, holdback = setup.policy.canary, setup.policy.holdback
    rows: list[tuple[Cell, ...]] = []
    if canary != "none":
        back, loss = 1 / canary.rollback_at, -canary.margin
        cases: dict[str, tuple[live.Draw, live.Draw]] = {
            f"all units of {users:,} users an arm": (
                live.sticky_units(0.0, canary.horizon_pairs, users),
                live.sticky_units(loss, canary.horizon_pairs, users),
            )
            for users in (200, 1000)
        }
        cases["one unit of each user"] = (
            live.independent_units(0.0, canary.horizon_pairs),
            live.independent_units(loss, canary.horizon_pairs),
        )
        for number, (name, (equal, worse)) in enumerate(cases.items()):
            same = live.run_canaries(equal, canary, setup.windows, setup.rng(60 + number))
            bad = live.run_canaries(worse, canary, setup.windows, setup.rng(70 + number))
            rows.append((f"canary, {name}: rolled back without a loss", same.rolled_back, back))
            rows.append((f"canary, {name}: promoted at {_points(loss)}", bad.promoted, 1 / canary.promote_at))
        for number, equal_shares in enumerate((False, True)):
            draw = live.changing_world(canary, 0.10, equal_shares=equal_shares)
            changed = live.run_canaries(draw, canary, setup.windows, setup.rng(80 + number))
            against = "a control of the same share" if equal_shares else "everybody else"
            rows.append((f"canary against {against}, success falls by 10 pp: rolled back", changed.rolled_back, back))
    if holdback != "none":
        streams, pairs = max(setup.windows // 10, 2), int(0.3 * holdback.alarm_at)
        kinds: tuple[tuple[live.Counting, str], ...] = (
            ("all", "all units of the same users"),
            ("once", "users drawn anew, one unit each"),
        )
        for number, (counting, name) in enumerate(kinds):
            rng = setup.rng(90 + number)
            draw = live.holdback_units(counting, holdback.share, rng, streams=streams, users=2000)
            found = live.run_detector(draw, holdback, streams, pairs, rng)
            rows.append((f"holdback, {name}: alarm within {pairs:,} pairs, no loss", found.alarmed, 0.3))
    if not rows:
        return None
    return Table(
        title="Units that depend on each other",
        notes=(
            "Users differ in success (standard deviation 0.26) and in traffic (lognormal, sigma 1.5), and stay in "
            "their arm. Both arms are equally good where no loss is named. One unit a user keeps the bounds; all units "
            "do not."
        ),
        columns=("case", "measured", "bound"),
        rows=tuple(rows),
    )


TABLES: Mapping[str, Callable[[Setup], Table | None]] = MappingProxyType(
    {
        "rules": rules_table,
        "scenarios": scenarios_table,
        "conditions": conditions_table,
        "canary": canary_table,
        "detector": detector_table,
        "dependence": dependence_table,
    }
)
"""Every table by name, in the order in which they are shown."""


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _points(gain: float) -> str:
    return f"{_POINTS * gain:+g} pp" if gain else "0"
