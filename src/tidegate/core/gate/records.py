"""Bodies of the gate's audit records: what was given, and everything that follows from it.

The same two functions write a record and recompute it: what they derive depends only on the given fields and
on the state before the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from tidegate.core.errors import AuditError
from tidegate.core.gate.certify import UNSAMPLED, certify
from tidegate.core.gate.decisions import Abstain, Bound, Decision, ScreenResult, reasons_of, reply_of, verb
from tidegate.core.gate.evidence import Evidence, Pairs, decode_pairs
from tidegate.core.gate.policy import Policy, policy_from_values
from tidegate.core.gate.samples import SampleEvidence, decode_samples, sampled_tasks
from tidegate.core.gate.screen import ReferenceKl, ScreenEvidence, dev_successes, screen
from tidegate.core.gate.state import GateState, commitment_of
from tidegate.core.types import JsonObject

RECORD_FORMAT = 2

DECISION_GIVEN = frozenset(
    {
        "format",
        "candidate",
        "candidate_sha256",
        "champion_sha256",
        "anchor_sha256",
        "base_sha256",
        "manifest_hash",
        "policy",
        "verifiers",
        "salt",
        "seeds",
        "available",
        "outcomes",
        "samples",
        "signer",
    }
)
SCREEN_GIVEN = frozenset(
    {
        "format",
        "candidate",
        "candidate_sha256",
        "champion_sha256",
        "base_sha256",
        "manifest_hash",
        "policy",
        "verifiers",
        "decoding",
        "seeds",
        "logit_difference",
        "canary_prompts",
        "kl",
        "outcomes",
        "signer",
    }
)


def decide(given: JsonObject, state: GateState) -> tuple[Decision, dict[str, Any]]:
    """Take the decision of a ``decision`` record.

    Args:
        given: the fields of ``DECISION_GIVEN``.
        state: of the gate before the record.

    Returns:
        The decision, and the whole body of its record.

    Raises:
        AuditError: the tasks are not those that the open epoch committed to, or the gate may not decide now.
        KeyError, TypeError, ValueError: a given field is malformed.
    """
    policy = policy_from_values(given["policy"])
    hindrance = state.why_not_decide(policy)
    if hindrance is not None:
        raise AuditError(hindrance)
    disbelieved = state.controls.disbelieved(given["verifiers"])
    if disbelieved:
        raise AuditError(f"the answers were scored by {', '.join(disbelieved)}, which people have invalidated")
    pairs = decode_pairs(given["outcomes"])
    ledger = state.ledger(policy)
    epoch = state.open_epoch(policy) if pairs else None
    commitment = commitment_of(pairs.task_ids, given["salt"]) if pairs else None
    if pairs and (epoch is None or epoch.commitment != commitment):
        raise AuditError(
            f"field 'commitment': the {len(pairs)} tasks answered are not those of an open epoch: their commitment is "
            f"{commitment!r}, the open epoch's {epoch.commitment if epoch else None!r}"
        )
    evidence = Evidence(
        pairs=pairs,
        available=given["available"],
        graded=epoch is not None and bool(epoch.grading["graded"]),
        seed=int(commitment or "0", 16),
        samples=None if given["samples"] is None else _samples(given["samples"], policy, pairs, commitment),
    )
    decision = certify(evidence, policy, ledger)
    derived: dict[str, Any] = {
        "policy_hash": policy.hash,
        "epoch": epoch.id if epoch else None,
        "commitment": commitment,
        "decoding": epoch.decoding if epoch else None,
        "window": ledger.window,
        "look": ledger.look,
        "epoch_look": epoch.looks + 1 if epoch else None,
        "spend": ledger.spend_per_look,
        "promotions": ledger.promotions,
        "level": ledger.level,
        "errors": _errors(pairs),
        "not_measured": (["canary"] if policy.canary == "none" else [])
        + (["collapse"] if given["samples"] is None else []),
        "decision": verb(decision),
        "reasons": list(reasons_of(decision)),
        "reply": reply_of(decision).value,
    }
    return decision, {**given, **derived, **_measured(decision)}


def wants_samples(given: JsonObject, state: GateState) -> bool:
    """Whether only further answers are missing to a ``decision`` record's decision; raises as :func:`decide`."""
    decision, _ = decide({**given, "samples": None}, state)
    return isinstance(decision, Abstain) and decision.missing == (UNSAMPLED,)


def decide_screen(given: JsonObject) -> tuple[ScreenResult, dict[str, Any]]:
    """Take the decision of a ``screen`` record, from the fields of ``SCREEN_GIVEN``.

    Raises:
        KeyError, TypeError, ValueError: a given field is malformed.
    """
    policy = policy_from_values(given["policy"])
    pairs = decode_pairs(given["outcomes"])
    evidence = ScreenEvidence(
        challenger_sha256=given["candidate_sha256"],
        champion_sha256=given["champion_sha256"],
        logit_difference=given["logit_difference"],
        pairs=pairs,
        canary_prompts=tuple((name, right) for name, right in given["canary_prompts"]),
        kl=None if given["kl"] is None else ReferenceKl.from_json(given["kl"]),
    )
    result = screen(evidence, policy)
    passed, opponent = dev_successes(pairs)
    derived: dict[str, Any] = {
        "policy_hash": policy.hash,
        "pairs": len(pairs),
        "challenger_passed": passed,
        "champion_passed": opponent,
        "errors": _errors(pairs),
        "not_measured": _not_measured(evidence, policy),
        "decision": verb(result),
        "reasons": list(reasons_of(result)),
    }
    return result, {**given, **derived}


def _samples(values: JsonObject, policy: Policy, pairs: Pairs, commitment: str | None) -> SampleEvidence:
    """The samples of a record, which must be those of the tasks that the epoch chose."""
    samples, rules = decode_samples(values), policy.collapse
    if rules == "none" or commitment is None:
        raise ValueError("samples were recorded where the policy or the epoch asks for none")
    chosen = sampled_tasks(pairs.task_ids, commitment=commitment, limit=rules.tasks)
    if (samples.task_ids, samples.per_task) != (chosen, rules.samples):
        raise ValueError(f"samples are not {rules.samples} answers to each of the {len(chosen)} tasks that were chosen")
    return samples


def _measured(decision: Decision) -> dict[str, Any]:
    if isinstance(decision, Abstain):
        return {"measured": None}
    measured = decision.measured
    return {
        "measured": {
            "pairs": measured.pairs,
            "wins": measured.wins,
            "losses": measured.losses,
            "ties": measured.ties,
            "test": measured.test,
            "p": measured.p,
            "bounds": [_bound(bound) for bound in measured.bounds],
            "alarms": [asdict(alarm) | {"fires": alarm.fires} for alarm in measured.alarms],
        }
    }


def _bound(bound: Bound) -> dict[str, Any]:
    return {
        "name": bound.name,
        "better": bound.better,
        "worse": bound.worse,
        "pairs": bound.pairs,
        "difference": bound.difference,
        "lower": bound.lower,
        "margin": bound.margin,
        "holds": bound.holds,
    }


def _errors(pairs: Pairs) -> dict[str, Mapping[str, int]]:
    """Answers of each arm that an engine or a verifier cut short."""
    arms = {"challenger": pairs.challenger, "champion": pairs.champion, "anchor": pairs.anchor}
    return {
        name: {
            "engine": int(np.count_nonzero(arm.engine_error)),
            "verifier": int(np.count_nonzero(arm.verifier_error)),
        }
        for name, arm in arms.items()
        if arm is not None
    }


def _not_measured(evidence: ScreenEvidence, policy: Policy) -> list[str]:
    missing: list[str] = []
    if evidence.kl is None:
        missing.append("kl" if policy.screen.kl_budget is None else "kl (the policy asks for it)")
    if not evidence.canary_prompts:
        missing.append("canary prompts")
    return missing
