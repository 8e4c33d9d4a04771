"""A live trial in an in-memory audit log: units go in, looks come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gate_engine import make_policy
from tidegate.core.gate.live_records import look_at_canary, look_at_steady, started_body
from tidegate.core.gate.live_state import CANARY_LOOK, CANARY_STARTED, STEADY_LOOK, STEADY_STARTED, Trial
from tidegate.core.gate.policy import CanaryRules, HoldbackRules, Policy
from tidegate.core.gate.state import GateState, gate_state
from tidegate.stores.memory import MemoryAuditLog

CANARY = CanaryRules(
    weights=(0.1, 0.3, 0.5),
    pairs_per_weight=20,
    horizon_pairs=400,
    margin=0.02,
    bets=(0.05, 0.1, 0.2, 0.4, 0.7),
    promote_at=20.0,
    rollback_at=100.0,
)
HOLDBACK = HoldbackRules(share=0.1, period_days=1.0, margin=0.01, bets=(0.05, 0.1, 0.2, 0.4), alarm_at=1000.0)
START = 1000.0


def live_policy(**changes: Any) -> Policy:
    return make_policy(**{"canary": CANARY, "holdback": HOLDBACK, **changes})


@dataclass
class LiveLog:
    """``kind`` is the trial's; each look appends its record, silent or not."""

    kind: str = "canary"
    policy: Policy = field(default_factory=live_policy)
    audit: MemoryAuditLog = field(default_factory=MemoryAuditLog)
    now: float = START
    users: int = 0

    def start(self, *, trial: str = "trial-1", reference: tuple[float, int] | None = None) -> None:
        body = started_body(
            trial=trial,
            candidate="cand-1",
            manifest_hash="m" * 64,
            subject_release="m-r2",
            control_release="m-r1",
            subject_sha256="2" * 64,
            control_sha256="1" * 64,
            base_sha256="b" * 64,
            policy=self.policy,
            reference=reference,
            time=self.now,
        )
        self.audit.append(CANARY_STARTED if self.kind == "canary" else STEADY_STARTED, body, time=self.now)

    @property
    def state(self) -> GateState:
        return gate_state(self.audit.read())

    @property
    def trial(self) -> Trial:
        trial = self.state.live.trial
        assert trial is not None
        return trial

    def units(self, subject: Sequence[float], control: Sequence[float]) -> list[list[Any]]:
        """New users of both arms."""
        made: list[list[Any]] = []
        for arm, outcomes in (("subject", subject), ("control", control)):
            for outcome in outcomes:
                self.users += 1
                made.append([f"user-{self.users}", arm, outcome, self.now])
        return made

    def look(self, units: Sequence[Sequence[Any]] = (), **given: Any) -> Mapping[str, Any]:
        """Record a look; returns its body."""
        body = {
            "format": 1,
            "trial": self.trial.id,
            "time": self.now,
            "units": [list(unit) for unit in units],
            "excluded": {},
            "calls": {"subject": [0, 0], "control": [0, 0]},
            "prompts": [],
            "open_prompts": 0,
            "leaks": [],
            "interruption": None,
            **given,
        }
        take = look_at_canary if self.kind == "canary" else look_at_steady
        _, whole = take(body, self.state)
        kind = CANARY_LOOK if self.kind == "canary" else STEADY_LOOK
        return self.audit.append(kind, whole, time=self.now).body

    def pairs(self, subject: Sequence[float], control: Sequence[float], **given: Any) -> Mapping[str, Any]:
        """One look at new users of both arms."""
        return self.look(self.units(subject, control), **given)
