"""A release in the shadow: it answers copies of users' calls, and nobody.

Its answers are records of a kind of their own, without token ids and log-probabilities. What selects, trains, certifies
or watches reads interactions and does not import this module; an import contract holds it to that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tidegate.core.errors import AuditError
from tidegate.core.types import AuditRecord, FinishReason, Interaction, JsonObject

SHADOW_STARTED = "shadow_started"
SHADOW_ENDED = "shadow_ended"


class ShadowOutcome(StrEnum):
    """What became of a call that was drawn for the shadow; ``dropped`` ones say nothing of its release."""

    ANSWERED = "answered"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """One run of a release in the shadow. ``id`` names it and draws its calls; ``share`` of them, in (0, 1]."""

    id: str
    release_id: str
    share: float

    def takes(self, interaction_id: str) -> bool:
        """Whether a call is drawn: by its id alone, so that neither its user nor its content has a say."""
        digest = hashlib.sha256(f"{self.id}\n{interaction_id}".encode()).digest()
        return (int.from_bytes(digest[:8], "big") >> 11) / 2**53 < self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowAnswer:
    """What a release in the shadow made of one recorded interaction.

    ``reason`` is empty when it answered, else an error's code or why the call was dropped. ``seconds`` from asking the
    engine to its end, 0 when it was not asked. Of n choices that the user asked for it gives the first. Token counts
    are None where the engine does not state them.
    """

    shadow_id: str
    interaction_id: str
    release_id: str
    engine_replica: str
    created_at: float
    outcome: ShadowOutcome
    reason: str = ""
    seconds: float = 0.0
    text: str = ""
    tool_calls: tuple[JsonObject, ...] = ()
    finish_reason: FinishReason | None = None
    invalid_tool_call: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPair:
    """The interaction that its user got, and what the shadow made of it."""

    main: Interaction
    answer: ShadowAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRun:
    """A shadow as the audit log knows it. ``ended`` says why it is over, None while it runs; times in Unix seconds."""

    shadow: Shadow
    number: int
    started_at: float
    ended: str | None = None


def started_body(shadow: Shadow, *, adapter_sha256: str | None, base_sha256: str) -> JsonObject:
    """Body of the record with which a shadow begins."""
    return {
        "shadow": shadow.id,
        "release": shadow.release_id,
        "share": shadow.share,
        "adapter_sha256": adapter_sha256,
        "base_sha256": base_sha256,
    }


def ended_body(shadow: Shadow, reason: str) -> JsonObject:
    """Body of the record with which a shadow ends."""
    return {"shadow": shadow.id, "release": shadow.release_id, "reason": reason}


def last_run(records: Iterable[AuditRecord]) -> ShadowRun | None:
    """The shadow that runs, or the one that ran last; None when there never was one.

    Raises:
        AuditError: a record of a shadow lacks a field.
    """
    last: ShadowRun | None = None
    for record in records:
        try:
            last = _after(last, record)
        except (KeyError, TypeError, ValueError) as error:
            raise AuditError(f"audit record {record.seq} of kind {record.kind!r} is malformed: {error!r}") from error
    return last


def _after(last: ShadowRun | None, record: AuditRecord) -> ShadowRun | None:
    body = record.body
    if record.kind == SHADOW_STARTED:
        shadow = Shadow(id=str(body["shadow"]), release_id=str(body["release"]), share=float(body["share"]))
        return ShadowRun(shadow=shadow, number=1 if last is None else last.number + 1, started_at=record.time)
    if record.kind == SHADOW_ENDED and last is not None and last.shadow.id == body["shadow"] and last.ended is None:
        return ShadowRun(shadow=last.shadow, number=last.number, started_at=last.started_at, ended=str(body["reason"]))
    return last
