"""Rows of everything that is about an interaction or a release, and back. Pure, like :mod:`tidegate.stores.codec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tidegate.core.errors import ConflictError, RequestError
from tidegate.core.hashing import canonical_json
from tidegate.core.shadow import ShadowAnswer, ShadowOutcome
from tidegate.core.types import (
    Answer,
    AuditRecord,
    Candidate,
    CandidateState,
    Feedback,
    FinishReason,
    Outcome,
    Release,
    Task,
    Verdict,
)
from tidegate.stores.codec import Row, changed, check_finite, from_json, task_json, to_json
from tidegate.stores.records import Reward


def feedback_row(feedback: Feedback) -> dict[str, Any]:
    """A row of ``feedback`` without its state.

    Raises:
        RequestError: the value, the tags or the time cannot be stored.
    """
    named = f"feedback {feedback.id!r}"
    check_finite(named, created_at=feedback.created_at)
    return {
        "id": feedback.id,
        "metric_name": feedback.metric_name,
        "value": to_json(feedback.value, f"value of {named}", canonical=False),
        "interaction_id": feedback.interaction_id,
        "episode_id": feedback.episode_id,
        "tags": to_json(dict(feedback.tags), f"tags of {named}"),
        "created_at": feedback.created_at,
    }


def feedback_of(row: Row) -> Feedback:
    """Inverse of :func:`feedback_row`."""
    return Feedback(
        id=row["id"],
        metric_name=row["metric_name"],
        value=from_json(row["value"]),
        interaction_id=row["interaction_id"],
        episode_id=row["episode_id"],
        tags=from_json(row["tags"]),
        created_at=row["created_at"],
    )


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """A row of ``verdicts``. The detail is for people: what has no UTF-8 form is shown escaped, and so is NUL.

    Raises:
        RequestError: the score lies outside [0, 1], or a time is not finite.
    """
    named = f"verdict of {verdict.verifier!r} on episode {verdict.episode_id!r}"
    if not 0.0 <= verdict.score <= 1.0:
        raise RequestError(f"{named} has the score {verdict.score!r}; 0 to 1 is accepted")
    check_finite(named, created_at=verdict.created_at, seconds=verdict.seconds)
    return {**asdict(verdict), "outcome": str(verdict.outcome), "detail": _escaped(verdict.detail)}


def reward_row(reward: Reward) -> dict[str, Any]:
    """A row of ``rewards``.

    Raises:
        RequestError: the time is not finite.
    """
    check_finite(f"reward of interaction {reward.interaction_id!r}", created_at=reward.created_at)
    return asdict(reward)


def verdict_of(row: Row) -> Verdict:
    """A verdict from its row."""
    return Verdict(**changed(row, outcome=Outcome(row["outcome"])))


def candidate_row(candidate: Candidate) -> dict[str, Any]:
    """A row of ``candidates``.

    Raises:
        RequestError: the time is not finite.
    """
    check_finite(f"candidate {candidate.id!r}", created_at=candidate.created_at)
    return {**asdict(candidate), "state": str(candidate.state)}


def candidate_of(row: Row) -> Candidate:
    """Inverse of :func:`candidate_row`."""
    return Candidate(**changed(row, state=CandidateState(row["state"])))


def release_row(release: Release) -> dict[str, Any]:
    """A row of ``releases``.

    Raises:
        RequestError: the certificate is no JSON, or the time is not finite.
    """
    check_finite(f"release {release.id!r}", created_at=release.created_at)
    certificate = release.certificate
    text = None if certificate is None else to_json(dict(certificate), f"certificate of release {release.id!r}")
    return {
        "id": release.id,
        "number": release.number,
        "adapter_sha256": release.adapter_sha256,
        "base_sha256": release.base_sha256,
        "certificate": text,
        "created_at": release.created_at,
        "restores": release.restores,
    }


def release_of(row: Row) -> Release:
    """Inverse of :func:`release_row`."""
    text = row["certificate"]
    return Release(**changed(row, certificate=None if text is None else from_json(text)))


def audit_row(record: AuditRecord) -> dict[str, Any]:
    """A row of ``audit_records``; the body's text is exactly what the hash covers."""
    return {
        "seq": record.seq,
        "prev_hash": record.prev_hash,
        "time": record.time,
        "kind": record.kind,
        "body": canonical_json(record.body),
        "hash": record.hash,
    }


def audit_of(row: Row) -> AuditRecord:
    """Inverse of :func:`audit_row`."""
    return AuditRecord(**changed(row, body=from_json(row["body"])))


def epoch_task_rows(epoch_id: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Rows of ``epoch_tasks`` in order.

    Raises:
        ConflictError: a task is named twice.
        RequestError: a task cannot be stored.
    """
    if len({task.id for task in tasks}) < len(tasks):
        raise ConflictError(f"epoch {epoch_id!r} names a task twice; each task counts once")
    return [
        {
            "epoch_id": epoch_id,
            "task_id": task.id,
            "position": position,
            "task": task_json(task, f"task {task.id!r}"),
        }
        for position, task in enumerate(tasks)
    ]


def answer_row(epoch_id: str, answer: Answer) -> dict[str, Any]:
    """A row of ``answers``. What has no UTF-8 form in the text or the error is shown escaped, and so is NUL.

    Raises:
        RequestError: the score lies outside [0, 1].
    """
    if not 0.0 <= answer.score <= 1.0:
        raise RequestError(f"answer to task {answer.task_id!r} has the score {answer.score!r}; 0 to 1 is accepted")
    error = None if answer.error is None else _escaped(answer.error)
    return {
        **asdict(answer),
        "epoch_id": epoch_id,
        "seed": str(answer.seed),
        "text": _escaped(answer.text),
        "tools": to_json([_escaped(name) for name in answer.tools], f"tools of the answer to task {answer.task_id!r}"),
        "error": error,
    }


def answer_of(row: Row) -> Answer:
    """Inverse of :func:`answer_row`, the epoch left out."""
    flags = {name: bool(row[name]) for name in ("passed", "no_reply", "invalid_tool_call", "refused")}
    fields = changed(row, seed=int(row["seed"]), tools=tuple(from_json(row["tools"])), **flags)
    del fields["epoch_id"]
    return Answer(**fields)


def shadow_row(answer: ShadowAnswer) -> dict[str, Any]:
    """A row of ``shadow_answers``.

    Raises:
        RequestError: a time is not finite, or the text or a tool call cannot be stored.
    """
    named = f"shadow answer to interaction {answer.interaction_id!r}"
    check_finite(named, created_at=answer.created_at, seconds=answer.seconds)
    said = {
        "text": answer.text,
        "tool_calls": [dict(call) for call in answer.tool_calls],
        "finish_reason": None if answer.finish_reason is None else str(answer.finish_reason),
        "invalid_tool_call": answer.invalid_tool_call,
    }
    is_answer = answer.outcome is ShadowOutcome.ANSWERED
    return {
        "shadow_id": answer.shadow_id,
        "interaction_id": answer.interaction_id,
        "release_id": answer.release_id,
        "engine_replica": answer.engine_replica,
        "created_at": answer.created_at,
        "outcome": str(answer.outcome),
        "reason": answer.reason,
        "seconds": answer.seconds,
        "answer": to_json(said, f"text of {named}", canonical=False) if is_answer else None,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
    }


def shadow_of(row: Row) -> ShadowAnswer:
    """Inverse of :func:`shadow_row`."""
    fields = changed(row, outcome=ShadowOutcome(row["outcome"]))
    text = fields.pop("answer")
    if text is not None:
        said = from_json(text)
        finish = None if said["finish_reason"] is None else FinishReason(said["finish_reason"])
        fields |= changed(said, tool_calls=tuple(said["tool_calls"]), finish_reason=finish)
    return ShadowAnswer(**fields)


def _escaped(text: str) -> str:
    """For people: what no database would keep as text is shown escaped."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
