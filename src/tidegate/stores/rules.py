"""The rules that every backend shares: what may be stored where, what follows from it, what is written to the log.

Pure; a backend calls them inside its transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.errors import ConflictError, NotFoundError, RequestError, StoreError
from tidegate.core.hashing import content_hash
from tidegate.core.types import (
    AuditRecord,
    Candidate,
    CandidateState,
    Feedback,
    Interaction,
    JsonObject,
    Outcome,
    Release,
    Split,
    Verdict,
)
from tidegate.stores.records import Decision, Reward, Role

REWARD_POLICY = "last-turn"
DECISION_KIND = "decision"


def check_head(head: AuditRecord | None, expected_seq: int | None) -> None:
    """Refuse to append after another record than the writer saw last; None expects nothing, 0 an empty log.

    Raises:
        ConflictError: the log moved on.
    """
    seq = 0 if head is None else head.seq
    if expected_seq is not None and seq != expected_seq:
        raise ConflictError(f"the audit log ends at record {seq}; {expected_seq} was expected: read it again")


def check_split(role: Role, interaction: Interaction) -> None:
    """Refuse an interaction that does not belong into a database of this role.

    Raises:
        StoreError: a sealed interaction meets an open database, or the other way round.
    """
    if (interaction.split is Split.SEALED) != (role == "sealed"):
        wanted = "sealed" if interaction.split is Split.SEALED else "open"
        raise StoreError(
            f"interaction {interaction.id!r} of split {str(interaction.split)!r} does not belong into a database of "
            f"role {role!r}; append it to the one of role {wanted!r}"
        )


def check_shadowed(interaction_id: str, consent: bool | None) -> None:
    """Refuse a shadow answer to what is not recorded here, or was not to be stored.

    Args:
        interaction_id: what was shadowed.
        consent: of its record; None when there is none in this database.

    Raises:
        NotFoundError: it is not here; sealed users' interactions never are.
        RequestError: its user said no to storing.
    """
    if consent is None:
        raise NotFoundError(f"shadow answer to interaction {interaction_id!r}: it is not in this database")
    if not consent:
        raise RequestError(
            f"shadow answer to interaction {interaction_id!r}: its content was not to be stored, nor is what follows "
            "from it; only calls with consent are shadowed"
        )


def check_same_episode(owner: Mapping[str, Any], interaction: Interaction) -> None:
    """Refuse an interaction of another user than the one whose session the episode is.

    Raises:
        ConflictError: user or split differ.
    """
    if (owner["user_key"], owner["split"]) != (interaction.user_key, str(interaction.split)):
        raise ConflictError(
            f"interaction {interaction.id!r} names the episode {interaction.episode_id!r} of another user; an episode "
            "is one user's session: use another episode id"
        )


def check_feedback(feedback: Feedback) -> None:
    """Refuse feedback that names both or neither of interaction and episode, or whose names no database can keep.

    Raises:
        RequestError: exactly one is accepted, without NUL.
    """
    names = (feedback.id, feedback.metric_name, feedback.interaction_id, feedback.episode_id)
    if any("\0" in name for name in names if name is not None):
        raise RequestError(f"feedback {feedback.id!r} cannot be stored: a name in it holds a NUL; leave that out")
    if (feedback.interaction_id is None) == (feedback.episode_id is None):
        raise RequestError(
            f"feedback {feedback.id!r} names interaction {feedback.interaction_id!r} and episode "
            f"{feedback.episode_id!r}; exactly one of the two is accepted"
        )


def check_proposed(candidate: Candidate) -> None:
    """Refuse a candidate that would skip the gate.

    Raises:
        ConflictError: its first state is not ``proposed``.
    """
    if candidate.state is not CandidateState.PROPOSED:
        raise ConflictError(
            f"candidate {candidate.id!r} is registered as {str(candidate.state)!r}; a candidate starts as 'proposed' "
            "and moves on through the gate"
        )


def check_same_candidate(known: Candidate, candidate: Candidate) -> None:
    """Refuse other weights under a known id.

    Raises:
        ConflictError: the content hashes differ.
    """
    if known.adapter_sha256 != candidate.adapter_sha256:
        raise ConflictError(
            f"candidate {candidate.id!r} is known with the adapter {known.adapter_sha256!r}, not "
            f"{candidate.adapter_sha256!r}; an id names one content"
        )


def check_same_release(known: Release, release: Release) -> None:
    """Refuse another release under a known id or number.

    Raises:
        ConflictError: id, number or content differ.
    """
    key = (release.id, release.number, release.adapter_sha256, release.base_sha256, release.restores)
    if (known.id, known.number, known.adapter_sha256, known.base_sha256, known.restores) != key:
        raise ConflictError(
            f"release {release.id!r} (number {release.number}) contradicts release {known.id!r} (number "
            f"{known.number}) with the adapter {known.adapter_sha256!r}; ids and numbers are never used again: "
            "take the next number"
        )


def unknown_candidate(candidate_id: str) -> NotFoundError:
    """The error for a candidate that is not in the store."""
    return NotFoundError(f"candidate {candidate_id!r} is unknown; 'tidegate candidates list' shows all")


def unknown_release(release_id: str) -> NotFoundError:
    """The error for a release that is not in the store."""
    return NotFoundError(f"release {release_id!r} is unknown; 'tidegate releases list' shows all")


def cycle_conflict(cycle_id: str, known: str) -> ConflictError:
    """The error for a second open cycle, or a used id."""
    if known == cycle_id:
        return ConflictError(f"cycle {cycle_id!r} exists already; resume it, or take a new id")
    return ConflictError(
        f"cycle {cycle_id!r} cannot start while {known!r} is open; one runs at a time: resume or end {known!r} first"
    )


def check_cycle_open(cycle_id: str, cycle: JsonObject | None) -> None:
    """Refuse a step of a cycle that does not run.

    Raises:
        NotFoundError: the cycle is unknown.
        ConflictError: it has ended.
    """
    if cycle is None:
        raise NotFoundError(f"cycle {cycle_id!r} is unknown; open it first")
    if cycle["closed_at"] is not None:
        raise ConflictError(f"cycle {cycle_id!r} ended as {cycle['outcome']!r}; a step needs an open cycle")


def check_closable(cycle_id: str, cycle: JsonObject | None, outcome: str) -> bool:
    """Whether a cycle is still to be closed; False when it ended with the same outcome.

    Raises:
        NotFoundError: the cycle is unknown.
        ConflictError: it ended with another outcome.
    """
    if cycle is not None and cycle["outcome"] == outcome:
        return False
    check_cycle_open(cycle_id, cycle)
    return True


def epoch_conflict(epoch_id: str) -> ConflictError:
    """The error for an epoch whose task set would change."""
    return ConflictError(
        f"epoch {epoch_id!r} is open with other tasks or another commitment; a task set is fixed for good: "
        "open a new epoch"
    )


def unknown_task(epoch_id: str, task_id: str) -> NotFoundError:
    """The error for an answer to a task that the epoch does not hold."""
    return NotFoundError(f"epoch {epoch_id!r} holds no task {task_id!r}; open the epoch with it first")


def last_turn_reward(verdict: Verdict, interaction_id: str | None) -> Reward | None:
    """The whole score goes to the episode's last main-line interaction.

    Returns:
        None when the verifier abstained or the episode has no main-line interaction: nothing to learn from.
    """
    if verdict.outcome is Outcome.ABSTAIN or interaction_id is None:
        return None
    return Reward(
        episode_id=verdict.episode_id,
        interaction_id=interaction_id,
        verifier=verdict.verifier,
        version=verdict.version,
        policy=REWARD_POLICY,
        value=verdict.score,
        created_at=verdict.created_at,
    )


def decision_of(record: AuditRecord) -> Decision | None:
    """The decision that an audit record holds; None for records of other kinds."""
    if record.kind != DECISION_KIND:
        return None
    return Decision(
        seq=record.seq,
        time=record.time,
        outcome=_text(record.body, "outcome", "decision"),
        candidate_id=_text(record.body, "candidate", "candidate_id"),
        epoch_id=_text(record.body, "epoch_id", "epoch"),
        body=record.body,
    )


def proposed_body(candidate: Candidate) -> JsonObject:
    """Audit body of ``candidate_proposed``."""
    return {
        "candidate": candidate.id,
        "adapter_sha256": candidate.adapter_sha256,
        "base_sha256": candidate.base_sha256,
        "manifest_hash": candidate.manifest_hash,
        "parent_sha256": candidate.parent_sha256,
        "origin": candidate.origin,
    }


def moved_body(candidate: Candidate, to: CandidateState, reasons: Sequence[str]) -> JsonObject:
    """Audit body of ``candidate_moved``."""
    return {
        "candidate": candidate.id,
        "from": str(candidate.state),
        "to": str(to),
        "reasons": list(reasons),
        "adapter_sha256": candidate.adapter_sha256,
    }


def release_body(release: Release) -> JsonObject:
    """Audit body of ``release_added``; the certificate is named by its hash."""
    return {
        "release": release.id,
        "number": release.number,
        "adapter_sha256": release.adapter_sha256,
        "base_sha256": release.base_sha256,
        "certificate_hash": None if release.certificate is None else content_hash(release.certificate),
        "restores": release.restores,
    }


def aliases_body(before: Mapping[str, str], moved: Mapping[str, str], reason: str) -> JsonObject:
    """Audit body of ``aliases_moved``: only the aliases that move."""
    return {"from": {name: before.get(name) for name in moved}, "to": dict(moved), "reason": reason}


def _text(body: JsonObject, *names: str) -> str | None:
    return next((body[name] for name in names if isinstance(body.get(name), str)), None)
