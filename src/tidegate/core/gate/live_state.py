"""What the log says of live trials: a fold, like the rest of the gate's memory.

A *trial* compares two releases on live traffic: a canary (the challenger against the champion) or the steady state
(the champion against the release before it, which a holdback of users stays on). Units enter in the order in which
looks recorded them and keep it: verdicts come late, and an order by time of day would give pairs that were looked
at already other partners, after which nothing is a martingale any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tidegate.core.gate.controls import FREEZE
from tidegate.core.gate.live_assignment import Assignment, LiveArm
from tidegate.core.gate.policy import CanaryRules, HoldbackRules, Policy, policy_from_values
from tidegate.core.statistics import EDetector
from tidegate.core.types import AuditRecord, JsonObject

CANARY_STARTED = "canary_started"
CANARY_LOOK = "canary_look"
STEADY_STARTED = "steady_started"
STEADY_LOOK = "steady_look"
LIVE_CARRIED_OUT = "live_carried_out"
QUARANTINE = "quarantine"

ENDING = ("promote", "roll_back", "inconclusive")
"""Words of the decisions that end a trial."""

ERROR_ALTERNATIVES = (2.0, 4.0, 16.0, 64.0)
"""How many times worse than tolerated an error rate is taken to be: bets on small and on large excesses."""

MIN_REFERENCE = 30
"""Fewest outcomes that the rate before a trial is estimated from: below that a fall can't be told from noise."""

DAY_S = 86400.0


class Trigger(IntEnum):
    """Why a release is taken back or learning stops; docs/explanation/gate.md has the table."""

    EVIDENCE = 1
    GUARDRAIL = 2
    VERIFIER = 3
    DRIFT = 4
    REPEATED = 5


TrialKind = Literal["canary", "steady"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUnit:
    """What one user gives to a draw: the outcome in [0, 1] of the first judged episode.

    ``user`` is the unit's id (:func:`tidegate.core.gate.live_assignment.unit_id`), ``time`` when the episode began.
    """

    user: str
    arm: LiveArm
    outcome: float
    time: float

    def __post_init__(self) -> None:
        """An outcome outside [0, 1] would break every bound."""
        if not 0.0 <= self.outcome <= 1.0:
            raise ValueError(f"outcome {self.outcome!r} of unit {self.user!r} is not in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A share of users, and since when: who entered with it gives episodes from then on."""

    share: float
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of both arms, and users with a call that the engine failed; a client that retries is one error."""

    subject: int = 0
    control: int = 0
    subject_errors: int = 0
    control_errors: int = 0

    def plus(self, other: Calls) -> Calls:
        """The sum."""
        return Calls(
            subject=self.subject + other.subject,
            control=self.control + other.control,
            subject_errors=self.subject_errors + other.subject_errors,
            control_errors=self.control_errors + other.control_errors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One comparison of ``subject_release`` with ``control_release`` under the policy that it began with.

    ``subject`` and ``control`` are the outcomes of the present draw in order; the i-th of both are a pair.
    ``earlier_pairs`` counts those of draws before. ``reference`` is (sum, number) of outcomes before the draw.
    ``decision`` is the word of the one that ended it, None while it runs; ``reason`` that of its last look.
    """

    id: str
    kind: TrialKind
    candidate: str | None
    manifest_hash: str | None
    subject_release: str
    control_release: str
    policy: Policy
    started_at: float
    stages: tuple[Stage, ...]
    period: int = 0
    units: frozenset[str] = frozenset()
    subject: tuple[float, ...] = ()
    control: tuple[float, ...] = ()
    earlier_pairs: int = 0
    detector: tuple[float, ...] = ()
    reference: tuple[float, int] | None = None
    calls: Calls = field(default_factory=Calls)
    uncounted: Calls = field(default_factory=Calls)
    error_logs: tuple[float, ...] = (0.0,) * len(ERROR_ALTERNATIVES)
    prompts_right: frozenset[str] = frozenset()
    drifted: bool = False
    looks: int = 0
    decision: str | None = None
    reason: str = ""
    carried_out: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of the present draw."""
        return min(len(self.subject), len(self.control))

    @property
    def share(self) -> float:
        """Share of users in the small arm, and in the one that it is compared with."""
        return self.stages[-1].share

    @property
    def differences(self) -> NDArray[np.float64]:
        """d of each pair of the draw, subject minus control, (pairs,) in [-1, 1]."""
        n = self.pairs
        return np.asarray(self.subject[:n], dtype=np.float64) - np.asarray(self.control[:n], dtype=np.float64)

    @property
    def draw(self) -> str:
        """The name of the present assignment."""
        return self.id if self.kind == "canary" else f"{self.id}/{self.period}"

    @property
    def assignment(self) -> Assignment:
        """Who is in which arm now."""
        low = LiveArm.SUBJECT if self.kind == "canary" else LiveArm.CONTROL
        return Assignment(draw=self.draw, share=self.share, low=low)

    @property
    def small_release(self) -> str:
        """The release of the small arm; everybody else is served by the champion."""
        return self.subject_release if self.kind == "canary" else self.control_release

    @property
    def canary(self) -> CanaryRules:
        """The rules of a canary.

        Raises:
            ValueError: the policy has none.
        """
        return _rules(self.policy.canary, "canary")

    @property
    def holdback(self) -> HoldbackRules:
        """The rules of a holdback.

        Raises:
            ValueError: the policy has none.
        """
        return _rules(self.policy.holdback, "holdback")

    def period_at(self, now: float) -> int:
        """Number of the draw at a time; a clock that steps back opens no earlier one."""
        if self.kind == "canary":
            return 0
        return max(self.period, int((now - self.started_at) // (self.holdback.period_days * DAY_S)))

    def in_period(self, period: int) -> Trial:
        """The trial in a draw: a new one begins without units, and with the last draw's rate as its reference."""
        if period == self.period:
            return self
        outcomes = self.subject + self.control
        known = len(outcomes) >= MIN_REFERENCE
        since = self.started_at + period * self.holdback.period_days * DAY_S
        return replace(
            self,
            period=period,
            stages=(Stage(share=self.holdback.share, since=since),),
            units=frozenset(),
            subject=(),
            control=(),
            earlier_pairs=self.earlier_pairs + self.pairs,
            reference=(float(sum(outcomes)), len(outcomes)) if known else self.reference,
            drifted=False,
        )

    def with_units(self, units: Iterable[LiveUnit]) -> Trial:
        """The trial after more units.

        Raises:
            ValueError: a user gave one to this draw already.
        """
        added = list(units)
        names = [unit.user for unit in added]
        if len(set(names)) != len(names) or not self.units.isdisjoint(names):
            raise ValueError(f"a user gives two units to draw {self.draw!r}")
        before = self.pairs
        after = replace(
            self,
            units=self.units.union(names),
            subject=self.subject + tuple(unit.outcome for unit in added if unit.arm is LiveArm.SUBJECT),
            control=self.control + tuple(unit.outcome for unit in added if unit.arm is LiveArm.CONTROL),
        )
        if self.kind == "canary":
            return after
        rules = self.holdback
        detector = EDetector(
            margin=rules.margin, bets=rules.bets, alarm_at=rules.alarm_at, processes=self.detector
        )  # fmt: skip
        for difference in after.differences[before:]:
            detector = detector.update(float(difference))
        return replace(after, detector=detector.processes)

    def with_calls(self, calls: Calls) -> Trial:
        """The trial after more calls; they count once there are some of both arms.

        For each alternative the likelihood ratio of which arm the errors fall on: under "at most ``max_error_ratio``
        times the control's rate" an error is the subject's with probability r n / (r n + m) or less, given the calls
        n and m of both arms.
        """
        new = self.uncounted.plus(calls)
        total = self.calls.plus(calls)
        if new.subject == 0 or new.control == 0:
            return replace(self, calls=total, uncounted=new)
        odds = self.policy.triggers.max_error_ratio * new.subject / new.control
        logs = tuple(
            log
            + new.subject_errors * (np.log(worse) + np.log1p(odds) - np.log1p(worse * odds))
            + new.control_errors * (np.log1p(odds) - np.log1p(worse * odds))
            for log, worse in zip(self.error_logs, ERROR_ALTERNATIVES, strict=True)
        )
        return replace(self, calls=total, uncounted=Calls(), error_logs=tuple(map(float, logs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The last trial, rollbacks of the present window of looks, and batches that may not train again.

    ``freeze_due``: trigger and reason of a freeze that a look decided and nobody recorded yet.
    """

    trial: Trial | None = None
    window: int = 0
    rollbacks: int = 0
    quarantined: frozenset[str] = frozenset()
    freeze_due: tuple[int, str] | None = None

    @property
    def running(self) -> Trial | None:
        """The trial that goes on."""
        return self.trial if self.trial is not None and self.trial.decision is None else None

    @property
    def unfinished(self) -> Trial | None:
        """The trial whose end is decided and not carried out."""
        trial = self.trial
        return trial if trial is not None and trial.decision is not None and not trial.carried_out else None

    def rollbacks_in(self, window: int) -> int:
        """Rollbacks that the watch decided in a window."""
        return self.rollbacks if window == self.window else 0


def look_applied(trial: Trial, body: JsonObject) -> Trial:
    """A trial after what a look was given: period, units, calls and answered prompts.

    Raises:
        KeyError, TypeError, ValueError: the body is malformed.
    """
    units = [LiveUnit(user=u, arm=LiveArm(arm), outcome=outcome, time=at) for u, arm, outcome, at in body["units"]]
    calls = body["calls"]
    counted = Calls(
        subject=calls["subject"][0],
        subject_errors=calls["subject"][1],
        control=calls["control"][0],
        control_errors=calls["control"][1],
    )
    after = trial.in_period(trial.period_at(body["time"])).with_units(units).with_calls(counted)
    right = {name for name, passed in body["prompts"] if passed}
    return replace(after, prompts_right=after.prompts_right | right, looks=after.looks + 1)


def fold_live(state: LiveState, record: AuditRecord) -> LiveState:
    """The state after one more record; records of other kinds pass through.

    Raises:
        KeyError, TypeError, ValueError: the record is malformed or follows impossibly.
    """
    step = _STEPS.get(record.kind)
    return state if step is None else step(state, record.body)


def running_trial(state: LiveState, body: JsonObject, kind: str) -> Trial:
    """The trial that a look is about.

    Raises:
        ValueError: it does not run.
    """
    trial = state.running
    if trial is None or trial.id != body["trial"] or trial.kind != kind:
        raise ValueError(f"trial {body['trial']!r} ({kind}) does not run; running: {trial.id if trial else None!r}")
    return trial


def _started(state: LiveState, body: JsonObject, kind: TrialKind) -> LiveState:
    if state.running is not None:
        raise ValueError(f"trial {body['trial']!r} starts while {state.running.id!r} runs")
    policy = policy_from_values(body["policy"])
    reference = body["reference"]
    trial = Trial(
        id=body["trial"],
        kind=kind,
        candidate=body["candidate"],
        manifest_hash=body["manifest_hash"],
        subject_release=body["subject_release"],
        control_release=body["control_release"],
        policy=policy,
        started_at=body["time"],
        stages=(),
        reference=None if reference is None else (float(reference[0]), int(reference[1])),
    )
    share = trial.canary.weights[0] if kind == "canary" else trial.holdback.share
    return replace(state, trial=replace(trial, stages=(Stage(share=share, since=body["time"]),)))


def _looked(state: LiveState, body: JsonObject, kind: str) -> LiveState:
    trial = look_applied(running_trial(state, body, kind), body)
    if body["share"] > trial.share:
        trial = replace(trial, stages=(*trial.stages, Stage(share=body["share"], since=body["time"])))
    decision = body["decision"]
    trial = replace(
        trial,
        drifted=trial.drifted or decision == "freeze",
        decision=decision if decision in ENDING else None,
        reason="; ".join(body["reasons"]),
    )
    due = Trigger.DRIFT if decision == "freeze" else Trigger.REPEATED if body["repeated"] else None
    state = replace(state, trial=trial, freeze_due=state.freeze_due if due is None else (due, trial.reason))
    if decision != "roll_back":
        return state
    window = body["window"]
    return replace(state, window=window, rollbacks=state.rollbacks_in(window) + 1)


def _carried_out(state: LiveState, body: JsonObject) -> LiveState:
    trial = state.unfinished
    if trial is None or trial.id != body["trial"]:
        raise ValueError(f"trial {body['trial']!r} has no decision that waits to be carried out")
    return replace(state, trial=replace(trial, carried_out=True))


def _quarantined(state: LiveState, body: JsonObject) -> LiveState:
    return replace(state, quarantined=state.quarantined | {body["manifest_hash"]})


def _frozen(state: LiveState, body: JsonObject) -> LiveState:
    """What a trigger asked for is answered by its own record alone: one person lifts a person's freeze."""
    return state if body["trigger"] is None else replace(state, freeze_due=None)


_STEPS: Mapping[str, Callable[[LiveState, JsonObject], LiveState]] = {
    CANARY_STARTED: lambda state, body: _started(state, body, "canary"),
    CANARY_LOOK: lambda state, body: _looked(state, body, "canary"),
    STEADY_STARTED: lambda state, body: _started(state, body, "steady"),
    STEADY_LOOK: lambda state, body: _looked(state, body, "steady"),
    LIVE_CARRIED_OUT: _carried_out,
    QUARANTINE: _quarantined,
    FREEZE: _frozen,
}


def _rules(rules: object, name: str) -> Any:
    if rules == "none":
        raise ValueError(f"the policy has no {name} rules")
    return rules
