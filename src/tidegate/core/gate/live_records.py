"""Bodies of the live trials' audit records: what a look was given, and everything that follows from it.

The same functions write a record and recompute it. A look holds only what is new; the rest is the fold of the looks
before it, so that a canary's log grows with its units and not with their square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tidegate.core.gate.live import (
    CanaryDecision,
    Continue,
    Findings,
    Freeze,
    RollBack,
    SteadyDecision,
    decide_canary,
    decide_steady,
    live_word,
    measure,
)
from tidegate.core.gate.live_state import Calls, LiveUnit, Trial, TrialKind, look_applied, running_trial
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import GateState, fold
from tidegate.core.types import AuditRecord, JsonObject

LIVE_FORMAT = 1

LOOK_GIVEN = frozenset(
    {
        "format",
        "trial",
        "time",
        "units",
        "excluded",
        "calls",
        "prompts",
        "open_prompts",
        "leaks",
        "interruption",
    }
)

_DecisionT = TypeVar("_DecisionT", CanaryDecision, SteadyDecision)


def started_body(
    *,
    trial: str,
    candidate: str | None,
    manifest_hash: str | None,
    subject_release: str,
    control_release: str,
    subject_sha256: str | None,
    control_sha256: str | None,
    base_sha256: str,
    policy: Policy,
    reference: tuple[float, int] | None,
    time: float,
) -> dict[str, Any]:
    """The body of ``canary_started`` and ``steady_started``.

    Args:
        trial: a new id; arms are drawn from it.
        candidate: whose content the subject is, None for the bare base model.
        manifest_hash: of the batch that trained it.
        subject_release: the newer release.
        control_release: what it is compared with.
        subject_sha256: content of the subject, None for the bare base model.
        control_sha256: content of the control.
        base_sha256: the base of both.
        policy: rules for the whole trial.
        reference: sum and number of outcomes before it, None when there are none.
        time: Unix seconds.
    """
    return {
        "format": LIVE_FORMAT,
        "trial": trial,
        "candidate": candidate,
        "manifest_hash": manifest_hash,
        "subject_release": subject_release,
        "control_release": control_release,
        "subject_sha256": subject_sha256,
        "control_sha256": control_sha256,
        "base_sha256": base_sha256,
        "policy": policy.values(),
        "policy_hash": policy.hash,
        "reference": None if reference is None else list(reference),
        "time": time,
    }


def look_given(
    trial: Trial,
    *,
    time: float,
    units: Iterable[LiveUnit] = (),
    excluded: Mapping[str, int] | None = None,
    leaks: Iterable[tuple[str, str]] = (),
    calls: Calls | None = None,
    prompts: Mapping[str, bool] | None = None,
    open_prompts: int = 0,
    interruption: str | None = None,
) -> dict[str, Any]:
    """What a look is given, as the fields of ``LOOK_GIVEN``.

    Args:
        trial: the one that runs.
        time: Unix seconds.
        units: new ones, in the order in which they arrived.
        excluded: new episodes that give no unit, by reason.
        leaks: kind of personal data, and a name of the call that let it out.
        calls: new ones of both arms.
        prompts: canary prompts that were answered, and whether rightly.
        open_prompts: how many have no answer yet.
        interruption: why the trial can't go on, None while it can.
    """
    counted = Calls() if calls is None else calls
    return {
        "format": LIVE_FORMAT,
        "trial": trial.id,
        "time": time,
        "units": [[unit.user, unit.arm.value, unit.outcome, unit.time] for unit in units],
        "excluded": dict(excluded or {}),
        "calls": {
            "subject": [counted.subject, counted.subject_errors],
            "control": [counted.control, counted.control_errors],
        },
        "prompts": [list(answered) for answered in sorted((prompts or {}).items())],
        "open_prompts": open_prompts,
        "leaks": [list(leak) for leak in leaks],
        "interruption": interruption,
    }


def look_at_canary(given: JsonObject, state: GateState) -> tuple[CanaryDecision, dict[str, Any]]:
    """Decide about the running canary, from the fields of ``LOOK_GIVEN`` and the state before the look.

    Returns:
        The decision, and the whole body of its record.

    Raises:
        KeyError, TypeError, ValueError: a given field is malformed, or no such canary runs.
    """
    return _look(given, state, "canary", decide_canary)


def look_at_steady(given: JsonObject, state: GateState) -> tuple[SteadyDecision, dict[str, Any]]:
    """Decide about the champion beside its holdback; as :func:`look_at_canary`."""
    return _look(given, state, "steady", decide_steady)


def _look(
    given: JsonObject, state: GateState, kind: TrialKind, decide: Callable[[Trial, Findings], _DecisionT]
) -> tuple[_DecisionT, dict[str, Any]]:
    trial = look_applied(running_trial(state.live, given, kind), given)
    found = Findings(
        wrong_prompts=tuple(name for name, right in given["prompts"] if not right),
        open_prompts=given["open_prompts"],
        leaks=tuple(sorted({kind for kind, _ in given["leaks"]})),
        interruption=given["interruption"],
        frozen=learning_frozen(state),
    )
    decision = decide(trial, found)
    window = state.ledger(trial.policy).window
    rollbacks = state.live.rollbacks_in(window) + isinstance(decision, RollBack)
    limit = trial.policy.triggers.rollbacks_per_window
    repeated = isinstance(decision, RollBack) and rollbacks >= limit
    reasons = list(decision.reasons)
    if repeated:
        reasons.append(f"{rollbacks} of {limit} rollbacks in window {window}: learning is frozen until two people sign")
    measured = measure(trial)
    derived: dict[str, Any] = {
        "share": decision.share if isinstance(decision, Continue | Freeze) else trial.share,
        "period": trial.period,
        "pairs": trial.earlier_pairs + trial.pairs,
        "waiting": {"subject": len(trial.subject) - trial.pairs, "control": len(trial.control) - trial.pairs},
        "k_plus": measured.k_plus,
        "k_minus": measured.k_minus,
        "detector": measured.detector,
        "errors": measured.errors,
        "drift_below": measured.drift_below,
        "drift": None if measured.drift is None else list(measured.drift),
        "window": window,
        "rollbacks": rollbacks,
        "repeated": repeated,
        "decision": live_word(decision),
        "trigger": int(decision.trigger) if isinstance(decision, RollBack) else None,
        "reasons": reasons,
    }
    return decision, {**given, **derived}


def learning_frozen(state: GateState) -> bool:
    """Whether learning is stopped: nothing is promoted or widened until people sign.

    A freeze that a look decided holds before its record is written, and a broken glass until the review after it.
    """
    return state.controls.frozen is not None or state.controls.anchor_review or state.live.freeze_due is not None


def steady_policy(policy: Policy, state: GateState) -> Policy:
    """Rules that a champion is watched by from now on: ``policy``, or the one in force while that is not.

    A file that was made looser switches nothing off, and neither does a freeze: it stops learning, not the watch.
    """
    in_force = state.controls.policy
    thawed = replace(state, controls=replace(state.controls, frozen=None, anchor_review=False))
    return policy if in_force is None or thawed.why_not_decide(policy) is None else in_force


def is_silent(before: Trial, body: JsonObject) -> bool:
    """Whether a look says nothing that is worth a record: nothing came in and nothing changes."""
    unchanged = body["decision"] == "continue" and body["share"] == before.share and body["period"] == before.period
    nothing = not body["units"] and not body["prompts"] and not any(body["calls"]["subject"] + body["calls"]["control"])
    return unchanged and nothing


def trial_status(trial: Trial) -> dict[str, Any]:
    """Where a trial stands, for people and for a cycle that waits on it."""
    measured = measure(trial)
    canary = trial.kind == "canary"
    return {
        "trial": trial.id,
        "candidate": trial.candidate,
        "subject": trial.subject_release,
        "control": trial.control_release,
        "share": trial.share,
        "pairs": trial.earlier_pairs + trial.pairs,
        "waiting": {"subject": len(trial.subject) - trial.pairs, "control": len(trial.control) - trial.pairs},
        **(
            {
                "horizon_pairs": trial.canary.horizon_pairs,
                "k_plus": measured.k_plus,
                "promote_at": trial.canary.promote_at,
                "k_minus": measured.k_minus,
                "rollback_at": trial.canary.rollback_at,
            }
            if canary
            else {"period": trial.period, "detector": measured.detector, "alarm_at": trial.holdback.alarm_at}
        ),
        "decision": trial.decision,
        "reason": trial.reason,
    }


def canary_of(records: Iterable[AuditRecord], candidate: str) -> Trial | None:
    """The last canary of a candidate, or None when there was none.

    Raises:
        AuditError: a record is malformed.
    """
    found: Trial | None = None
    state = GateState()
    for record in records:
        state = fold(state, record)
        trial = state.live.trial
        if trial is not None and trial.kind == "canary" and trial.candidate == candidate:
            found = trial
    return found
