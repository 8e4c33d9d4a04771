"""The decision over a sealed set: superiority at the ledger's level, non-inferiority everywhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidegate.core.gate.decisions import Abstain, Bound, Decision, Measurements, Promote, Refuse
from tidegate.core.gate.evidence import (
    ArmOutcome,
    Evidence,
    Pair,
    Reading,
    challenger_reading,
    opponent_reading,
)
from tidegate.core.gate.policy import Policy
from tidegate.core.statistics import Ledger, sign_test, tango_lower_bound

POOLED = "(pooled)"
"""Slice that holds the kinds with too few pairs for a test of their own."""


def certify(evidence: Evidence, policy: Policy, ledger: Ledger) -> Decision:
    """Decide about a challenger.

    Promote only if all hold: the exact one-sided sign test against the champion is at or below the ledger's
    level; the lower bound of the paired difference excludes a loss of the margin overall, on every slice, on
    every guardrail, and against the anchor. Too few pairs or too many engine errors abstain.

    Args:
        evidence: outcomes of challenger, champion and anchor on the same tasks.
        policy: thresholds.
        ledger: state before this look.

    Raises:
        ValueError: a pair has no outcome of the anchor.
    """
    missing = _missing(evidence, policy)
    if missing:
        return Abstain(missing=missing)
    measured = _measure(evidence.pairs, policy, ledger)
    superior = measured.p <= measured.level
    sign = (
        f"{measured.wins} wins, {measured.losses} losses over {measured.pairs} pairs: "
        f"p = {measured.p:.2g} {'<=' if superior else '>'} level {measured.level:.2g}"
    )
    broken = tuple(_broken(bound) for bound in measured.bounds if not bound.holds)
    if superior and not broken:
        kept = f"all {len(measured.bounds)} non-inferiority bounds hold"
        return Promote(reasons=(sign, kept), measured=measured)
    return Refuse(reasons=((() if superior else (sign,)) + broken), measured=measured)


def _missing(evidence: Evidence, policy: Policy) -> tuple[str, ...]:
    rules = policy.sealed
    if evidence.available < rules.min_pairs:
        return (f"{evidence.available} of {rules.min_pairs} pairs",)
    if len(evidence.pairs) < rules.min_pairs:
        return (f"answers to {len(evidence.pairs)} of {rules.min_pairs} pairs",)
    return engine_error_excess(evidence.pairs, rules.max_error_share)


def engine_error_excess(pairs: Sequence[Pair], max_share: float) -> tuple[str, ...]:
    """One sentence for each arm whose answers were cut short more often than ``max_share``."""
    sentences: list[str] = []
    for arm in ("challenger", "champion", "anchor"):
        outcomes: list[ArmOutcome | None] = [getattr(pair, arm) for pair in pairs]
        errors = sum(outcome is not None and outcome.engine_error for outcome in outcomes)
        if errors > max_share * len(pairs):
            sentences.append(
                f"{errors} of {len(pairs)} answers of the {arm} ended in engine errors, "
                f"more than {max_share:.0%}: the engine was measured, not the model"
            )
    return tuple(sentences)


def _measure(pairs: Sequence[Pair], policy: Policy, ledger: Ledger) -> Measurements:
    rules, guardrails = policy.non_inferiority, policy.guardrails
    wins, losses = discordant(pairs)
    against_champion = [(pair.challenger, pair.champion) for pair in pairs]

    def bound(name: str, counts: tuple[int, int], n: int, margin: float) -> Bound:
        lower = tango_lower_bound(*counts, n, rules.level)
        return Bound(name=name, better=counts[0], worse=counts[1], pairs=n, lower=lower, margin=margin)

    bounds = [bound("overall against the champion", (wins, losses), len(pairs), rules.overall_margin)]
    for name, members in slices(pairs, rules.min_pairs_per_slice).items():
        bounds.append(bound(f"slice {name!r}", discordant(members), len(members), rules.slice_margin))
    for name, margin, fault in (
        ("replies", guardrails.no_reply_margin, "no_reply"),
        ("valid tool calls", guardrails.invalid_tool_call_margin, "invalid_tool_call"),
    ):
        counts = _compared(against_champion, *_without(fault))
        bounds.append(bound(f"guardrail {name!r}", counts, len(pairs), margin))
    bounds.append(bound("overall against the anchor", _against_anchor(pairs), len(pairs), rules.anchor_margin))
    return Measurements(
        pairs=len(pairs),
        wins=wins,
        losses=losses,
        p=sign_test(wins, losses),
        level=ledger.level,
        bounds=tuple(bounds),
    )


def slices(pairs: Sequence[Pair], min_pairs: int) -> dict[str, list[Pair]]:
    """Pairs by kind; kinds with fewer than ``min_pairs`` pairs are pooled into one slice.

    When even the pool is too thin it joins the smallest slice that is not, because a bound over a handful of
    pairs could never hold: thin slices dilute, they are never left out.
    """
    by_kind: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_kind.setdefault(pair.kind, []).append(pair)
    thick = {kind: members for kind, members in sorted(by_kind.items()) if len(members) >= min_pairs}
    pool = [pair for pair in pairs if pair.kind not in thick]
    if pool and thick and len(pool) < min_pairs:
        smallest = min(thick, key=lambda kind: len(thick[kind]))
        thick[f"{smallest} {POOLED}"] = thick.pop(smallest) + pool
    elif pool:
        thick[POOLED] = pool
    return thick


def discordant(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Wins and losses of the challenger against the champion."""
    return _compared([(pair.challenger, pair.champion) for pair in pairs], challenger_reading, opponent_reading)


def _against_anchor(pairs: Sequence[Pair]) -> tuple[int, int]:
    arms: list[tuple[ArmOutcome, ArmOutcome]] = []
    for pair in pairs:
        if pair.anchor is None:
            raise ValueError(f"task {pair.task_id!r} has no outcome of the anchor; certify needs all three arms")
        arms.append((pair.challenger, pair.anchor))
    return _compared(arms, challenger_reading, opponent_reading)


def _compared(arms: Sequence[tuple[ArmOutcome, ArmOutcome]], ours: Reading, theirs: Reading) -> tuple[int, int]:
    """Pairs that only the first arm does well on, and those that only the second does."""
    counts = Counter((ours(first), theirs(second)) for first, second in arms)
    return counts[True, False], counts[False, True]


def _without(fault: str) -> tuple[Reading, Reading]:
    """Readings of challenger and opponent that a guardrail compares; a cut-short answer hurts the challenger."""

    def ours(outcome: ArmOutcome) -> bool:
        return not getattr(outcome, fault) and not outcome.engine_error

    def theirs(outcome: ArmOutcome) -> bool:
        return not getattr(outcome, fault) or outcome.engine_error

    return ours, theirs


def _broken(bound: Bound) -> str:
    return (
        f"{bound.name}: {bound.better} better, {bound.worse} worse over {bound.pairs} pairs: "
        f"the difference may be as low as {bound.lower:+.1%}, below the margin -{bound.margin:.1%}"
    )
