"""Decisions about a release that answers live traffic: the canary's, and those of the steady state.

One unit a user and draw, pairs in arrival order of both arms' units; every decision may be taken after every pair.
A hard guardrail (trigger 2) comes before the evidence (trigger 1): it acts at once, whatever the units say. A fall of
both arms (trigger 4) stops learning and takes nothing back, because the release is not the cause.

Source: gate specification, "Canary", "Steady state", "Rollback triggers"; betting processes of Waudby-Smith and Ramdas
(2024); Shiryaev-Roberts e-detector of Shin, Ramdas and Rinaldo (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy import stats

from tidegate.core.gate.live_state import MIN_REFERENCE, Trial, Trigger
from tidegate.core.statistics import EDetector, canary_evidence

ERROR_EVIDENCE = 100.0
"""Evidence at which an error rate counts as more than tolerated: one canary in a hundred is taken back wrongly."""

_LARGEST = 1e300  # records hold finite numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Nothing is decided; ``share`` of users are in the small arm from now on."""

    share: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteCanary:
    """The canary becomes the champion."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """The release before it is served again."""

    trigger: Trigger
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inconclusive:
    """The trial ends without a winner; a canary is rejected."""

    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """The world changed for both arms: learning stops, serving and the trial go on."""

    share: float
    reasons: tuple[str, ...]


CanaryDecision: TypeAlias = Continue | PromoteCanary | RollBack | Inconclusive | Freeze
SteadyDecision: TypeAlias = Continue | RollBack | Inconclusive | Freeze

_WORDS = {
    Continue: "continue",
    PromoteCanary: "promote",
    RollBack: "roll_back",
    Inconclusive: "inconclusive",
    Freeze: "freeze",
}


def live_word(decision: CanaryDecision) -> str:
    """The word that records use for a decision."""
    return _WORDS[type(decision)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a look found beside units and calls.

    ``wrong_prompts`` names canary prompts that were answered wrongly, ``open_prompts`` counts those not answered yet,
    ``leaks`` are kinds of personal data that the subject let out. ``interruption`` says why the trial can't go on
    (another release is served), None while it can. ``frozen``: learning is stopped, so nothing is promoted or widened.
    """

    wrong_prompts: tuple[str, ...] = ()
    open_prompts: int = 0
    leaks: tuple[str, ...] = ()
    interruption: str | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The evidence of a trial as numbers; ``drift`` is (subject, control), None without a rate to compare with.

    ``k_plus`` and ``k_minus`` are a canary's, ``detector`` the steady state's value; the others are None.
    """

    k_plus: float | None
    k_minus: float | None
    detector: float | None
    errors: float
    drift_below: float | None
    drift: tuple[float, float] | None


def measure(trial: Trial) -> Measured:
    """Every process of a trial as it stands."""
    k_plus = k_minus = detector = None
    if trial.kind == "canary":
        evidence = canary_evidence(trial.differences, trial.canary.margin, trial.canary.bets)
        k_plus, k_minus = _finite(evidence.k_plus), _finite(evidence.k_minus)
    else:
        rules = trial.holdback
        value = EDetector(margin=rules.margin, bets=rules.bets, alarm_at=rules.alarm_at, processes=trial.detector).value
        detector = _finite(value)
    errors = _mean_of_exp(trial.error_logs)
    below = drift_threshold(trial)
    bets = trial.canary.bets if trial.kind == "canary" else trial.holdback.bets
    drift = None if below is None else tuple(fall_evidence(arm, below, bets) for arm in (trial.subject, trial.control))
    return Measured(
        k_plus=k_plus,
        k_minus=k_minus,
        detector=detector,
        errors=errors,
        drift_below=below,
        drift=None if drift is None else (drift[0], drift[1]),
    )


def decide_canary(trial: Trial, found: Findings) -> CanaryDecision:
    """Decide about a canary after a look.

    Promote when the evidence against a loss of the margin reaches ``promote_at``, roll back when that for a loss
    reaches ``rollback_at``; at the horizon it is inconclusive. A canary prompt that has no answer yet holds back a
    promotion: missing data never promotes.
    """
    rules, measured = trial.canary, measure(trial)
    assert measured.k_plus is not None  # noqa: S101 - a canary has both
    assert measured.k_minus is not None  # noqa: S101
    stop = _interrupted(found) or _guardrails(trial, found, measured)
    if stop is not None:
        return stop
    counted = f"{trial.pairs} pairs, mean difference {_mean(trial.differences):+.3f}"
    if measured.k_minus >= rules.rollback_at:
        reason = f"{counted}: evidence for a loss K- = {measured.k_minus:.4g} >= {rules.rollback_at:g}"
        return RollBack(trigger=Trigger.EVIDENCE, reasons=(reason,))
    fallen = _fallen(trial, measured)
    if fallen is not None:
        return Freeze(share=trial.share, reasons=(fallen,))
    plus = f"evidence against a loss of {rules.margin:.1%} K+ = {measured.k_plus:.4g}"
    if measured.k_plus >= rules.promote_at and not found.frozen and not found.open_prompts:
        return PromoteCanary(reasons=(f"{counted}: {plus} >= {rules.promote_at:g}",))
    if trial.pairs >= rules.horizon_pairs:
        reason = f"inconclusive: {counted} at the horizon of {rules.horizon_pairs}: {plus}, K- = {measured.k_minus:.4g}"
        return Inconclusive(reasons=(reason,))
    waits = (
        *(("learning is frozen: not widened, not promoted",) if found.frozen else ()),
        *((f"{found.open_prompts} canary prompts have no answer yet",) if found.open_prompts else ()),
    )
    share = trial.share if found.frozen or trial.drifted else _weight(trial)
    going = f"{counted} of {rules.horizon_pairs}: {plus} of {rules.promote_at:g}, K- = {measured.k_minus:.4g} of "
    return Continue(share=share, reasons=(f"{going}{rules.rollback_at:g}; weight {share:.0%}", *waits))


def decide_steady(trial: Trial, found: Findings) -> SteadyDecision:
    """Decide about a champion that is compared with the release before it.

    The e-detector's alarm rolls it back; nothing else ends the comparison but another champion.
    """
    rules, measured = trial.holdback, measure(trial)
    assert measured.detector is not None  # noqa: S101 - the steady state has one
    stop = _interrupted(found) or _guardrails(trial, found, measured)
    if stop is not None:
        return stop
    pairs = trial.earlier_pairs + trial.pairs
    detector = f"{pairs} pairs: the detector of a loss of {rules.margin:.1%} is at {measured.detector:.4g}"
    if measured.detector >= rules.alarm_at:
        return RollBack(trigger=Trigger.EVIDENCE, reasons=(f"{detector} >= {rules.alarm_at:g}",))
    fallen = _fallen(trial, measured)
    if fallen is not None:
        return Freeze(share=trial.share, reasons=(fallen,))
    return Continue(share=trial.share, reasons=(f"{detector} of {rules.alarm_at:g}; holdback {trial.share:.0%}",))


def drift_threshold(trial: Trial) -> float | None:
    """The rate that both arms must have fallen below, None when the rate before is not known well enough.

    The lower 95 % Clopper-Pearson bound of the rate before, less ``drift_drop``: an estimate that happened to be
    high would show a fall where nothing fell.
    """
    if trial.reference is None or trial.reference[1] < MIN_REFERENCE:
        return None
    total, count = trial.reference
    lower = float(stats.beta.ppf(0.05, total, count - total + 1.0)) if total > 0.0 else 0.0
    below = lower - trial.policy.triggers.drift_drop
    return below if below > 0.0 else None


def fall_evidence(outcomes: Sequence[float], below: float, bets: Sequence[float]) -> float:
    """Evidence that outcomes in [0, 1] have a mean under ``below``, readable after each of them.

    Mean over bets g of prod(1 + g (m - x) / (1 - m)): a supermartingale while E[x | past] >= m, so that it reaches c
    with probability at most 1 / c.
    """
    x = np.asarray(outcomes, dtype=np.float64)
    gains = np.multiply.outer(np.asarray(bets, dtype=np.float64), (below - x) / (1.0 - below))
    return _mean_of_exp(np.log1p(gains).sum(axis=-1))


def _interrupted(found: Findings) -> Inconclusive | None:
    return Inconclusive(reasons=(found.interruption,)) if found.interruption is not None else None


def _guardrails(trial: Trial, found: Findings, measured: Measured) -> RollBack | None:
    reasons: list[str] = []
    if found.leaks:
        reasons.append(f"an answer let out personal data that its conversation did not hold: {', '.join(found.leaks)}")
    if found.wrong_prompts:
        reasons.append(f"canary prompts answered wrongly: {', '.join(map(repr, found.wrong_prompts))}")
    triggers, calls = trial.policy.triggers, trial.calls
    enough = min(calls.subject, calls.control) >= triggers.min_calls
    if enough and measured.errors >= ERROR_EVIDENCE:
        reasons.append(
            f"{calls.subject_errors} users with a failed call over {calls.subject} calls, the control "
            f"{calls.control_errors} over {calls.control}: evidence for more than {triggers.max_error_ratio:g} times "
            f"the control's rate {measured.errors:.4g} >= {ERROR_EVIDENCE:g}"
        )
    return RollBack(trigger=Trigger.GUARDRAIL, reasons=tuple(reasons)) if reasons else None


def _fallen(trial: Trial, measured: Measured) -> str | None:
    at = trial.policy.triggers.drift_at
    if measured.drift is None or trial.drifted or min(measured.drift) < at:
        return None
    subject, control = measured.drift
    return (
        f"both arms fell below {measured.drift_below:.1%}: evidence {subject:.4g} and {control:.4g} >= {at:g}; the "
        "world changed, not the release"
    )


def _weight(trial: Trial) -> float:
    """The share that applies after so many pairs; it never shrinks."""
    weights = trial.canary.weights
    return max(trial.share, weights[min(trial.pairs // trial.canary.pairs_per_weight, len(weights) - 1)])


def _mean(differences: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(differences.mean()) if differences.size else 0.0


def _mean_of_exp(logs: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    with np.errstate(over="ignore"):
        return _finite(float(np.exp(np.asarray(logs)).mean()))


def _finite(value: float) -> float:
    return min(float(value), _LARGEST)
