"""The gate's decisions as pure functions of recorded outcomes, a policy and the audit log so far."""

from tidegate.core.gate.certify import certify
from tidegate.core.gate.decisions import (
    Abstain,
    Bound,
    Decision,
    Measurements,
    Promote,
    Refuse,
    Reply,
    ScreenAbstained,
    ScreenFailed,
    ScreenPassed,
    ScreenResult,
    describe,
    reasons_of,
    reply_of,
    verb,
)
from tidegate.core.gate.evidence import Evidence, Outcomes, Pairs
from tidegate.core.gate.policy import Policy, policy_from_values
from tidegate.core.gate.screen import ScreenEvidence, screen
from tidegate.core.gate.state import Epoch, GateState, gate_state, ledger_from
from tidegate.core.gate.verify import AuditReport, check_certificates, verify_audit

__all__ = [
    "Abstain",
    "AuditReport",
    "Bound",
    "Decision",
    "Epoch",
    "Evidence",
    "GateState",
    "Measurements",
    "Outcomes",
    "Pairs",
    "Policy",
    "Promote",
    "Refuse",
    "Reply",
    "ScreenAbstained",
    "ScreenEvidence",
    "ScreenFailed",
    "ScreenPassed",
    "ScreenResult",
    "certify",
    "check_certificates",
    "describe",
    "gate_state",
    "ledger_from",
    "policy_from_values",
    "reasons_of",
    "reply_of",
    "screen",
    "verb",
    "verify_audit",
]
