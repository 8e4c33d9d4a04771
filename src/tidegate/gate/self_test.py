"""The gate examines itself: at every start, and on ``tidegate doctor``.

A gate whose arithmetic is off, that lets an equal pair through, or that lets a degraded adapter through must
not decide anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tidegate.core.errors import GateError
from tidegate.core.gate.certify import certify
from tidegate.core.gate.decisions import Decision, Promote, Refuse, describe
from tidegate.core.gate.evidence import Evidence, Flags, Outcomes, Pairs
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.samples import SampleEvidence, Samples
from tidegate.core.gate.state import ledger_from
from tidegate.core.statistics import (
    Ledger,
    paired_e_value,
    pass_at_k,
    required_pairs,
    sign_test,
    tango_interval,
)

_LEVELS = (0.007692, 0.007692, 0.015385, 0.015385, 0.015385, 0.023077)
_P_VALUES = (0.2, 0.004, 0.03, 0.6, 0.0005, 0.02)
_RELATIVE_TOLERANCE = 1e-4


def self_test(policy: Policy) -> None:
    """Check the arithmetic against known values and the policy against staged challengers.

    Raises:
        GateError: names what came out and what is right.
    """
    _check_values(_golden_values())
    _check_decisions(policy, certify)


def _check_values(golden: Sequence[tuple[str, float, float]]) -> None:
    for name, value, right in golden:
        if not math.isclose(value, right, rel_tol=_RELATIVE_TOLERANCE):
            raise GateError(f"gate self-test: {name} is {value!r}; {right!r} is right. Reinstall Tidegate and scipy")


def _check_decisions(policy: Policy, decide: Callable[[Evidence, Policy, Ledger], Decision]) -> None:
    pairs = max(policy.sealed.min_pairs, 2 * policy.non_inferiority.min_pairs_per_slice)
    ledger = ledger_from([], policy)
    stages = [
        ("an A/A pair", 0.5, 0.5, 1.0, Refuse),
        ("a degraded challenger", 0.3, 0.6, 1.0, Refuse),
        ("a challenger that solves everything", 1.0, 0.2, 1.0, Promote),
    ]
    if policy.collapse != "none":
        stages.append(("a challenger that solves everything in one way", 1.0, 0.2, 0.1, Refuse))
    for name, challenger, champion, breadth, wanted in stages:
        decision = decide(_staged(policy, pairs, challenger, champion, breadth), policy, ledger)
        if not isinstance(decision, wanted):
            raise GateError(
                f"gate self-test: {name} over {pairs} pairs ends in {describe(decision)!r}; {wanted.__name__} is "
                f"right. Policy {policy.name!r} can't decide"
            )


def _golden_values() -> Sequence[tuple[str, float, float]]:
    levels: list[float] = []
    ledger = Ledger(alpha=0.10, looks=13, error_rate="fdr")
    for p in _P_VALUES:
        level, _, ledger = ledger.record(p)
        levels.append(level)
    lower, upper = tango_interval(1, 7, 21, 0.95)
    return (
        ("sign_test(12, 3)", sign_test(12, 3), 0.017578125),
        ("sign_test(150, 86)", sign_test(150, 86), 1.85797e-05),
        ("sign_test(0, 0)", sign_test(0, 0), 1.0),
        ("paired_e_value(30, 10)", paired_e_value(30, 10), 63.227924),
        ("tango_interval(1, 7, 21)[0]", lower, -0.517232),
        ("tango_interval(1, 7, 21)[1]", upper, -0.026003),
        ("pass_at_k(10, 3, 5)", pass_at_k(10, 3, 5), 0.916667),
        ("required_pairs(.14, .03, .0077)", required_pairs(0.14, 0.03, 0.0077, 0.8), 1655),
        *((f"ledger level {h}", level, right) for h, (level, right) in enumerate(zip(levels, _LEVELS, strict=True), 1)),
    )


def _staged(policy: Policy, pairs: int, challenger: float, champion: float, breadth: float) -> Evidence:
    """Pairs in which the two arms pass the given shares of tasks; the better one passes all that the other does.

    ``breadth``: how varied the challenger is in further answers, as a share of the anchor.
    """
    numbers = np.arange(pairs)
    members = Pairs(
        task_ids=tuple(f"task-{number:06}" for number in numbers),
        kinds=("kind-0", "kind-1"),
        kind=numbers % 2,
        challenger=_outcomes(numbers < challenger * pairs),
        champion=_outcomes(numbers < champion * pairs),
        anchor=_outcomes(numbers < champion * pairs),
    )
    samples = None if policy.collapse == "none" else _samples(members.task_ids[: policy.collapse.tasks], breadth)
    return Evidence(pairs=members, available=pairs, samples=samples)


def _samples(task_ids: tuple[str, ...], breadth: float) -> SampleEvidence:
    """Further answers that all pass."""
    two = np.full(len(task_ids), 2, dtype=np.int64)

    def arm(share: float) -> Samples:
        varied = np.full(len(task_ids), 2.0 * share)
        return Samples(
            passed=two,
            cut_short=two - two,
            tokens=two,
            surprisal=varied,
            strategies=varied,
            distinct=varied,
            vendi=varied,
        )

    return SampleEvidence(task_ids=task_ids, per_task=2, challenger=arm(breadth), anchor=arm(1.0))


def _outcomes(passed: Flags) -> Outcomes:
    """Flawless answers of one length and pace, of which some pass."""
    no, one = np.zeros_like(passed), np.ones(len(passed), dtype=np.int64)
    return Outcomes(
        passed=passed,
        rewards=passed.astype(np.float64),
        no_reply=no,
        invalid_tool_call=no,
        refused=no,
        engine_error=no,
        verifier_error=no,
        tokens=one,
        milliseconds=one,
    )
