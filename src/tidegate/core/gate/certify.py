"""The decision over a sealed set: superiority at the ledger's level, non-inferiority everywhere else.

Differences are taken task by task, which is user by user: a user gives one task to an epoch. Where every verifier of
the epoch passes or fails, superiority is the exact sign test. Where some verifier grades, it is the betting test on
the differences of rewards (the sign-flip test would take their symmetry for granted), and bounds of rewards are Tango's
with sums of gains and losses in place of counts. Since
|d| <= 1, such a difference never varies more than one of -1, 0 and 1 with the same mean gain and mean loss, so that
the bound can only be wider than need be. Which of the two applies was written down when the epoch opened.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.core.gate.collapse import collapse_alarms, collapse_missing
from tidegate.core.gate.decisions import Abstain, Alarm, Bound, Decision, Measurements, Promote, Refuse
from tidegate.core.gate.evidence import Evidence, Flags, Outcomes, Pairs
from tidegate.core.gate.policy import CollapseRules, GuardrailRules, Policy
from tidegate.core.statistics import Ledger, betting_p_value, sign_test, tango_lower_bound

Differences: TypeAlias = NDArray[np.int8] | NDArray[np.float64]
"""(N,) a task each, the challenger less another arm: in {-1, 0, 1}, of graded rewards in [-1, 1]."""

UNSAMPLED = "further answers to some tasks, for the collapse tests"
"""What is missing when everything else speaks for the challenger."""

POOLED = "(pooled)"
"""Slice that holds the kinds with too few pairs for a test of their own."""


def certify(evidence: Evidence, policy: Policy, ledger: Ledger) -> Decision:
    """Decide about a challenger.

    Promote only if all hold: the one-sided test against the champion is at or below the ledger's level; the lower
    bound of the paired difference excludes a loss of the margin overall, on every slice, on every guardrail, and
    against the anchor; and no collapse test sounds an alarm. Too few pairs or too many engine errors abstain.

    Args:
        evidence: outcomes of challenger, champion and anchor on the same tasks.
        policy: thresholds.
        ledger: state before this look.

    Raises:
        ValueError: there are no outcomes of the anchor.
    """
    missing = _missing(evidence, policy)
    if missing:
        return Abstain(missing=missing)
    measured = _measure(evidence, policy, ledger)
    superior = measured.p <= measured.level
    mean = f", mean difference {measured.bounds[0].difference:+.3f}" if evidence.graded else ""
    test = (
        f"{measured.wins} wins, {measured.losses} losses over {measured.pairs} pairs{mean}: "
        f"p = {measured.p:.2g} {'<=' if superior else '>'} level {measured.level:.2g}"
    )
    broken = tuple(_broken(bound) for bound in measured.bounds if not bound.holds)
    if not superior or broken:
        return Refuse(reasons=((() if superior else (test,)) + broken), measured=measured)
    kept = (test, f"all {len(measured.bounds)} non-inferiority bounds hold")
    if policy.collapse == "none":
        return Promote(reasons=kept, measured=measured)
    return _unless_narrow(evidence, policy, policy.collapse, Promote(reasons=kept, measured=measured))


def _unless_narrow(evidence: Evidence, policy: Policy, rules: CollapseRules, promotion: Promote) -> Decision:
    """The promotion, unless further answers show that the challenger became narrow or are missing."""
    if evidence.samples is None:
        return Abstain(missing=(UNSAMPLED,))
    missing = collapse_missing(evidence.samples, rules, policy.sealed.max_error_share)
    if missing:
        return Abstain(missing=missing)
    pairs, sampled = evidence.pairs, frozenset(evidence.samples.task_ids)
    places = {task_id: place for place, task_id in enumerate(pairs.task_ids) if task_id in sampled}
    alarms = collapse_alarms(
        evidence.samples,
        [pairs.kinds[pairs.kind[places[task_id]]] for task_id in evidence.samples.task_ids],
        rules,
        level=policy.non_inferiority.level,
        seed=evidence.seed,
    )
    measured = replace(promotion.measured, alarms=alarms)
    fired = tuple(_fired(alarm) for alarm in alarms if alarm.fires)
    if fired:
        return Refuse(reasons=fired, measured=measured)
    return Promote(reasons=(*promotion.reasons, f"no alarm of {len(alarms)} against collapse"), measured=measured)


def engine_error_excess(pairs: Pairs, max_share: float) -> tuple[str, ...]:
    """One sentence for each arm whose answers were cut short more often than ``max_share``."""
    sentences: list[str] = []
    arms = {"challenger": pairs.challenger, "champion": pairs.champion, "anchor": pairs.anchor}
    for name, arm in arms.items():
        errors = 0 if arm is None else int(np.count_nonzero(arm.engine_error))
        if errors > max_share * len(pairs):
            sentences.append(
                f"{errors} of {len(pairs)} answers of the {name} ended in engine errors, "
                f"more than {max_share:.0%}: the engine was measured, not the model"
            )
    return tuple(sentences)


def slices(pairs: Pairs, min_pairs: int) -> dict[str, Flags]:
    """Tasks by kind as masks (N,); kinds with fewer than ``min_pairs`` tasks are pooled into one slice.

    When even the pool is too thin it joins the smallest slice that is not, because a bound over a handful of
    pairs could never hold: thin slices dilute, they are never left out.
    """
    sizes = np.bincount(pairs.kind, minlength=len(pairs.kinds))
    thick = {pairs.kinds[place]: pairs.kind == place for place in np.flatnonzero(sizes >= min_pairs)}
    pool = (sizes < min_pairs)[pairs.kind]
    pooled = int(np.count_nonzero(pool))
    if pooled and thick and pooled < min_pairs:
        smallest = min(thick, key=lambda kind: (np.count_nonzero(thick[kind]), kind))
        thick[f"{smallest} {POOLED}"] = thick.pop(smallest) | pool
    elif pooled:
        thick[POOLED] = pool
    return thick


def _missing(evidence: Evidence, policy: Policy) -> tuple[str, ...]:
    rules = policy.sealed
    if evidence.available < rules.min_pairs:
        return (f"{evidence.available} of {rules.min_pairs} pairs",)
    if len(evidence.pairs) < rules.min_pairs:
        return (f"answers to {len(evidence.pairs)} of {rules.min_pairs} pairs",)
    return engine_error_excess(evidence.pairs, rules.max_error_share)


def _measure(evidence: Evidence, policy: Policy, ledger: Ledger) -> Measurements:
    pairs, rules = evidence.pairs, policy.non_inferiority
    if pairs.anchor is None:
        raise ValueError("the pairs hold no outcomes of the anchor; certify needs all three arms")
    rewards = _rewards(pairs.challenger, pairs.champion, graded=evidence.graded)

    def bound(name: str, differences: Differences, margin: float) -> Bound:
        better, worse = _sums(differences)
        lower = tango_lower_bound(better, worse, len(differences), rules.level)
        return Bound(name=name, better=better, worse=worse, pairs=len(differences), lower=lower, margin=margin)

    bounds = [bound("overall against the champion", rewards, rules.overall_margin)]
    for name, members in slices(pairs, rules.min_pairs_per_slice).items():
        bounds.append(bound(f"slice {name!r}", rewards[members], rules.slice_margin))
    for name, differences, margin in _guardrails(pairs.challenger, pairs.champion, policy.guardrails, rewards):
        bounds.append(bound(f"guardrail {name!r}", differences, margin))
    against_anchor = _rewards(pairs.challenger, pairs.anchor, graded=evidence.graded)
    bounds.append(bound("overall against the anchor", against_anchor, rules.anchor_margin))
    wins, losses = int(np.count_nonzero(rewards > 0)), int(np.count_nonzero(rewards < 0))
    return Measurements(
        pairs=len(pairs),
        wins=wins,
        losses=losses,
        test="betting test" if evidence.graded else "sign test",
        p=betting_p_value(rewards) if evidence.graded else sign_test(wins, losses),
        level=ledger.level,
        bounds=tuple(bounds),
    )


def _rewards(ours: Outcomes, theirs: Outcomes, *, graded: bool) -> Differences:
    """(N,) reward of the challenger less that of an opponent, in [-1, 1]."""
    if not graded:
        return _less(ours.won, theirs.held)
    return np.where(ours.engine_error, 0.0, ours.rewards) - np.where(theirs.engine_error, 1.0, theirs.rewards)


def _guardrails(
    ours: Outcomes, theirs: Outcomes, rules: GuardrailRules, rewards: Differences
) -> tuple[tuple[str, Differences, float], ...]:
    """Name, differences (N,) in {-1, 0, 1} and margin of each behaviour that may not get worse.

    A refusal that the verifier passes is what the task asks for and does not count. Length and speed have no
    measure of their own: each arm is held to the other's on the same task, and where either answer was cut short the
    challenger is taken to be the worse one. Length that brought the higher reward is not overlong: a failure that gives
    up after one call is always shorter than a success of two.
    """
    cut = ours.engine_error | theirs.engine_error

    def without(ours_bad: Flags, theirs_bad: Flags) -> Differences:
        return _less(~ours_bad & ~ours.engine_error, ~theirs_bad | theirs.engine_error)

    def within(first: NDArray[np.float64], second: NDArray[np.float64], factor: float, *, paid: bool) -> Differences:
        over, other_over = first > factor * second, second > factor * first
        if paid:
            over, other_over = over & ~(rewards > 0), other_over & ~(rewards < 0)
        return _less(~over & ~cut, ~other_over | cut)

    length, other_length = np.maximum(ours.tokens, 1.0), np.maximum(theirs.tokens, 1.0)
    pace, other_pace = ours.milliseconds / length, theirs.milliseconds / other_length
    return (
        ("replies", without(ours.no_reply, theirs.no_reply), rules.no_reply_margin),
        (
            "valid tool calls",
            without(ours.invalid_tool_call, theirs.invalid_tool_call),
            rules.invalid_tool_call_margin,
        ),
        (
            "no refusals",
            without(ours.refused & ~ours.passed, theirs.refused & ~theirs.passed),
            rules.refusal_margin,
        ),
        ("length", within(length, other_length, rules.length_factor, paid=True), rules.length_margin),
        ("speed", within(pace, other_pace, rules.latency_factor, paid=False), rules.latency_margin),
    )


def _less(first: Flags, second: Flags) -> NDArray[np.int8]:
    return first.astype(np.int8) - second.astype(np.int8)


def _sums(differences: Differences) -> tuple[float, float]:
    """Sum of the gains and sum of the losses: of whole differences, the pairs better and worse."""
    gains, losses = differences[differences > 0].sum().item(), abs(differences[differences < 0].sum().item())
    return gains, losses


def _broken(bound: Bound) -> str:
    return (
        f"{bound.name}: {_amount(bound.better)} better, {_amount(bound.worse)} worse over {bound.pairs} pairs: "
        f"the difference may be as low as {bound.lower:+.1%}, below the margin -{bound.margin:.1%}"
    )


def _fired(alarm: Alarm) -> str:
    return (
        f"collapse: {alarm.name} {alarm.challenger:.3g}, the anchor's {alarm.anchor:.3g} over {alarm.tasks} tasks; "
        f"{alarm.limit} is accepted (p = {alarm.p:.2g} <= {alarm.level:.2g})"
    )


def _amount(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.1f}"
