"""What a gate policy costs in pairs and weeks, and how often it errs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tidegate.app.gates import build_policy
from tidegate.config import Settings
from tidegate.core.errors import ConfigError
from tidegate.core.gate.simulation import TABLES, Setup, Table
from tidegate.core.gate.state import GateState
from tidegate.core.statistics import detectable_gain, exact_pairs, required_pairs, sign_test_power
from tidegate.core.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is asked: to show ``gain`` with ``power`` where the arms differ on ``discordance`` of the pairs.

    ``level``: one-sided level; None takes that of the first look of a window of the policy. ``pairs_per_week``: sealed
    tasks of different users that a week brings; None leaves the weeks out.
    """

    gain: float
    discordance: float = 0.14
    power: float = 0.9
    level: float | None = None
    pairs_per_week: float | None = None


def plan(settings: Settings, options: PlanOptions) -> JsonObject:
    """Pairs and weeks for a gain, and what the policy's smallest sealed set shows.

    Returns:
        ``pairs`` for the exact sign test and ``pairs_by_formula``; ``weeks`` of one sealed set; and of a set of
        ``min_pairs`` the power for this gain and the smallest gain that it shows with the wanted power.

    Raises:
        ConfigError: a value is outside its range.
        PolicyError: the policy is not usable.
    """
    policy = build_policy(settings)
    rules = policy.ledger
    ledger = GateState().ledger(policy)
    level = ledger.level if options.level is None else options.level
    if options.pairs_per_week is not None and not options.pairs_per_week > 0.0:
        raise ConfigError(f"pairs a week = {options.pairs_per_week!r}; a number above 0 is accepted")
    question = (options.discordance, options.gain, level, options.power)
    try:
        pairs = exact_pairs(*question)
        by_formula = required_pairs(*question)
    except ValueError as error:
        raise ConfigError(f"no plan can be made: {error}") from error
    smallest = policy.sealed.min_pairs
    answer: JsonObject = {
        "policy": policy.name,
        "gain": options.gain,
        "discordance": options.discordance,
        "power": options.power,
        "level": level,
        "pairs": pairs,
        "pairs_by_formula": by_formula,
        "min_pairs": smallest,
        "power_at_min_pairs": round(sign_test_power(smallest, options.discordance, options.gain, level), 4),
        "gain_at_min_pairs": detectable_gain(smallest, options.discordance, level, options.power),
        "looks_per_sealed_set": rules.looks_per_epoch,
    }
    if options.pairs_per_week is not None:
        answer["weeks"] = round(max(pairs, smallest) / options.pairs_per_week, 2)
    return answer


def simulate(settings: Settings, *, windows: int, seed: int) -> Iterator[tuple[str, Table]]:
    """Measure the policy's error rates and those of other rules, table by table as they are shown.

    The tables are made at the same time, one process each and as many as there are processors.

    Args:
        settings: name the policy.
        windows: windows of looks, canaries, and streams in proportion; >= 1.
        seed: of all random numbers, >= 0.

    Raises:
        ConfigError: windows or seed are out of range.
        PolicyError: the policy is not usable.
    """
    try:
        setup = Setup(policy=build_policy(settings), windows=windows, seed=seed)
    except ValueError as error:
        raise ConfigError(f"nothing can be simulated: {error}") from error
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        pending = [(name, processes.submit(make, setup)) for name, make in TABLES.items()]
        for name, future in pending:
            table = future.result()
            if table is not None:
                yield name, table
