"""What people do to the gate: whom it trusts, which policy is in force, what is frozen, what it no longer believes.

Like the ledger these are a fold over the audit log. Records that need a person carry *statements*: signatures over
the kind and every other field of the record. How many people a kind needs is counted here; that the signatures are
right is checked where keys are, when a record is written and when the log is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tidegate.core.gate.policy import Policy, policy_from_values
from tidegate.core.gate.strictness import looser_fields
from tidegate.core.types import AuditRecord, JsonObject

PERSON_TRUSTED = "person_trusted"
POLICY_SIGNED = "policy_signed"
FREEZE = "freeze"
UNFREEZE = "unfreeze"
VERIFIER_INVALIDATED = "verifier_invalidated"
VERIFIER_REVIEWED = "verifier_reviewed"
CANDIDATE_SIGNED = "candidate_signed"
ANCHOR_SIGNED = "anchor_signed"
BREAK_GLASS = "break_glass"
GATE_KEY_ROTATED = "gate_key_rotated"

STATEMENTS = "statements"
"""Field of a record that holds the signatures over all its other fields."""

BREAK_GLASS_S = 24 * 3600.0
"""An emergency lasts until somebody awake has looked at it, and no longer than a day."""

PEOPLE_TO_LOOSEN = 2

SIGNED = frozenset(
    {
        PERSON_TRUSTED,
        POLICY_SIGNED,
        UNFREEZE,
        VERIFIER_INVALIDATED,
        VERIFIER_REVIEWED,
        CANDIDATE_SIGNED,
        ANCHOR_SIGNED,
        BREAK_GLASS,
        GATE_KEY_ROTATED,
    }
)
"""Kinds that people sign. A freeze needs nobody: stopping is always allowed."""


VerifierName: TypeAlias = tuple[str, str]
"""Name and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """Learning is stopped since record ``seq``. ``trigger`` is the rollback trigger that did it, None for a person."""

    seq: int
    reason: str
    trigger: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Where these things stand after some records.

    ``people``: public key to name. ``policy``: the one that the last decision was taken under. ``signed_policies``:
    hash of a looser policy to the number of the window in which two people signed it. ``invalidated``: (verifier,
    version) pairs that are not believed any more. ``reviews``: of such a pair, whether people agreed on each task that
    they audited. ``gate_key``: the gate's key since it was rotated, None before; ``former_gate_keys``: earlier ones
    whose certificates still count. ``break_glass``: adapter hash to the time at which its emergency certificate ends.
    ``anchor_review``: a person has to sign the anchor before anything is promoted.
    """

    people: Mapping[str, str] = field(default_factory=dict[str, str])
    policy: Policy | None = None
    signed_policies: Mapping[str, int] = field(default_factory=dict[str, int])
    frozen: Frozen | None = None
    invalidated: frozenset[tuple[str, str]] = frozenset()
    reviews: Mapping[VerifierName, Mapping[str, bool]] = field(default_factory=dict[VerifierName, Mapping[str, bool]])
    gate_key: str | None = None
    former_gate_keys: tuple[str, ...] = ()
    break_glass: Mapping[str, float] = field(default_factory=dict[str, float])
    anchor_review: bool = False

    def disbelieved(self, verifiers: Mapping[str, str]) -> tuple[str, ...]:
        """Those of ``verifiers`` (name to version) that people have invalidated, in words."""
        return tuple(
            f"{name!r} {version!r}"
            for name, version in sorted(verifiers.items())
            if (name, version) in self.invalidated
        )

    def disagreeing(self, verifier: str, version: str) -> bool:
        """Whether people disagree with a verifier more often than the policy in force tolerates (trigger 3)."""
        if self.policy is None:
            return False
        agreed, rules = self.reviews.get((verifier, version), {}), self.policy.triggers
        disagreed = sum(not agree for agree in agreed.values())
        return len(agreed) >= rules.min_audited and disagreed > rules.max_disagreement * len(agreed)

    def looser(self, policy: Policy) -> tuple[str, ...]:
        """Fields in which ``policy`` is looser than the one in force."""
        return () if self.policy is None else looser_fields(self.policy, policy)

    def in_force(self, policy: Policy, *, window: int, looks_taken: int) -> bool:
        """Whether a decision may be taken under ``policy`` now.

        A policy that is nowhere looser may at once; a looser one that two people signed may from the window after
        that, or before the first look of a window.
        """
        if not self.looser(policy):
            return True
        signed = self.signed_policies.get(policy.hash)
        return signed is not None and (signed < window or looks_taken == 0)

    def why_not(self, policy: Policy, *, window: int, looks_taken: int) -> str | None:
        """What keeps the gate from deciding under ``policy``, in words; None when nothing does."""
        if self.frozen is not None:
            people = "two people sign" if self.frozen.trigger is not None else "a person signs"
            return (
                f"learning is frozen since audit record {self.frozen.seq} ({self.frozen.reason}); serving goes on. It "
                f"goes on when {people}: 'tidegate gate unfreeze --key FILE'"
            )
        if self.anchor_review:
            return (
                "the glass was broken, so a person has to review what serves before anything is promoted: "
                "'tidegate releases anchor RELEASE'"
            )
        if self.in_force(policy, window=window, looks_taken=looks_taken):
            return None
        changes = "; ".join(self.looser(policy))
        signed = self.signed_policies.get(policy.hash)
        if signed is not None:
            return (
                f"policy {policy.name!r}, looser than the one in force ({changes}), was signed in window {signed} and "
                f"takes effect with window {signed + 1}. Until then decide under the policy in force"
            )
        return (
            f"policy {policy.name!r} is looser than the one in force: {changes}. Restore those values, or have two "
            "people sign the file with 'tidegate gate sign FILE --key KEY'; it takes effect with the next window"
        )


def people_needed(kind: str, controls: Controls) -> int:
    """How many people must sign a record of ``kind`` now.

    Two loosen what protects: a policy, and a freeze that a trigger set; and two introduce a third, so that nobody can
    be several people alone. The first person is trusted on first use.
    """
    if kind == POLICY_SIGNED:
        return PEOPLE_TO_LOOSEN
    if kind == UNFREEZE:
        return PEOPLE_TO_LOOSEN if controls.frozen is not None and controls.frozen.trigger is not None else 1
    if kind == PERSON_TRUSTED:
        return min(len(controls.people), PEOPLE_TO_LOOSEN)
    return 1 if kind in SIGNED else 0


def subject_of(body: JsonObject) -> dict[str, Any]:
    """The fields of a record that its statements sign."""
    return {name: value for name, value in body.items() if name != STATEMENTS}


def fold_controls(controls: Controls, record: AuditRecord, *, window: int) -> Controls:
    """The controls after one more record.

    Args:
        controls: those before it.
        record: of any kind.
        window: number of the window of looks that is open.

    Raises:
        KeyError, TypeError, ValueError: the record is malformed, does not fit, or too few people signed it.
    """
    if record.kind in SIGNED:
        _check_signers(record, controls)
    if record.kind == POLICY_SIGNED:
        return _with_signed_policy(controls, record.body, window)
    if record.kind == FREEZE:
        return _frozen(controls, record)
    change = _CHANGES.get(record.kind)
    return controls if change is None else change(controls, record.body)


def _with_signed_policy(controls: Controls, body: JsonObject, window: int) -> Controls:
    policy = policy_from_values(body["policy"])
    if policy.hash != body["policy_hash"]:
        raise ValueError(f"policy_hash is {body['policy_hash']!r}; the policy's is {policy.hash!r}")
    return replace(controls, signed_policies={policy.hash: window, **controls.signed_policies})


def _frozen(controls: Controls, record: AuditRecord) -> Controls:
    """Of two freezes the one that more people must lift stands."""
    standing = controls.frozen
    new = Frozen(seq=record.seq, reason=str(record.body["reason"]), trigger=record.body["trigger"])
    keep = standing is not None and (standing.trigger is not None or new.trigger is None)
    return controls if keep else replace(controls, frozen=new)


def _decided(controls: Controls, body: JsonObject) -> Controls:
    """The policy of a decision is in force from then on; signatures that let it in are used up."""
    policy = policy_from_values(body["policy"])
    unused = {name: window for name, window in controls.signed_policies.items() if name != policy.hash}
    return replace(controls, policy=policy, signed_policies=unused)


def _unfrozen(controls: Controls, body: JsonObject) -> Controls:
    if controls.frozen is None or controls.frozen.seq != body["freeze_seq"]:
        raise ValueError(f"freeze_seq is {body['freeze_seq']!r}; the freeze that stands is {controls.frozen!r}")
    return replace(controls, frozen=None)


def _with_person(controls: Controls, body: JsonObject) -> Controls:
    return replace(controls, people={**controls.people, str(body["public_key"]): str(body["name"])})


def _disbelieving(controls: Controls, body: JsonObject) -> Controls:
    return replace(controls, invalidated=controls.invalidated | {(str(body["verifier"]), str(body["version"]))})


def _reviewed(controls: Controls, body: JsonObject) -> Controls:
    """Judgements of one verifier add up, over reviews and epochs, until people disagree with it too often."""
    name = (str(body["verifier"]), str(body["version"]))
    earlier, judged = controls.reviews.get(name, {}), {str(task): bool(agree) for task, agree in body["agree"].items()}
    again = sorted(set(earlier) & set(judged))
    if again:
        raise ValueError(f"tasks {again[:5]!r} were reviewed before")
    reviewed = replace(controls, reviews={**controls.reviews, name: {**earlier, **judged}})
    return _disbelieving(reviewed, body) if reviewed.disagreeing(*name) else reviewed


def _with_broken_glass(controls: Controls, body: JsonObject) -> Controls:
    ends = {**controls.break_glass, str(body["adapter_sha256"]): float(body["expires_at"])}
    return replace(controls, break_glass=ends, anchor_review=True)


def _with_gate_key(controls: Controls, body: JsonObject) -> Controls:
    """A key that was rotated out keeps its certificates unless it was revoked."""
    previous = str(body["previous"])
    former = tuple(key for key in controls.former_gate_keys if key != previous)
    kept = former if body["revoked"] else (*former, previous)
    return replace(controls, gate_key=str(body["public_key"]), former_gate_keys=kept)


_CHANGES: Mapping[str, Callable[[Controls, JsonObject], Controls]] = {
    "decision": _decided,
    PERSON_TRUSTED: _with_person,
    UNFREEZE: _unfrozen,
    VERIFIER_INVALIDATED: _disbelieving,
    VERIFIER_REVIEWED: _reviewed,
    ANCHOR_SIGNED: lambda controls, body: replace(controls, anchor_review=False),
    BREAK_GLASS: _with_broken_glass,
    GATE_KEY_ROTATED: _with_gate_key,
}


def _check_signers(record: AuditRecord, controls: Controls) -> None:
    signers = [str(statement["signer"]) for statement in record.body[STATEMENTS]]
    people = dict(controls.people)
    if record.kind == PERSON_TRUSTED and not people:  # the first one vouches for themselves
        people[str(record.body["public_key"])] = str(record.body["name"])
    strangers = sorted(set(signers) - set(people))
    if strangers:
        raise ValueError(f"signed by {strangers!r}; trusted are {sorted(people)!r}")
    needed = max(people_needed(record.kind, controls), 1)
    if len(set(signers)) < needed:
        raise ValueError(f"signed by {len(set(signers))} of {needed} people")
