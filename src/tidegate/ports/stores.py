"""Ports of the stores. Synchronous: a caller on an event loop runs them in a thread of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from tidegate.core.types import (
    Answer,
    AuditRecord,
    Candidate,
    CandidateState,
    Episode,
    Feedback,
    Interaction,
    JsonObject,
    Release,
    Split,
    Task,
    Verdict,
)


class TrajectoryStore(Protocol):
    """Interactions and what was said about them."""

    def append_interactions(self, interactions: Sequence[Interaction]) -> int:
        """Commit a batch in one transaction; known ids are left as they are. Returns how many were new."""
        ...

    def get_interaction(self, interaction_id: str) -> Interaction | None:
        """One record, or None."""
        ...

    def list_episodes(
        self,
        *,
        splits: Sequence[Split],
        after: float = 0.0,
        until: float | None = None,
        active: bool = False,
        releases: Collection[str] | None = None,
        latest: int | None = None,
    ) -> list[Episode]:
        """Episodes whose first interaction lies in (after, until], ordered by that time, then id.

        With ``active`` those with any interaction in there; with ``releases`` those that one of them answered in; with
        ``latest`` at most so many of these, the last.
        """
        ...

    def append_feedback(self, feedback: Feedback) -> bool:
        """Commit feedback; False when its id is known already."""
        ...

    def list_feedback(self, *, metric_name: str | None = None) -> list[Feedback]:
        """All feedback, oldest first."""
        ...

    def append_verdicts(self, verdicts: Sequence[Verdict]) -> int:
        """Commit verdicts; one per (episode, verifier, version) is kept. Returns how many were new."""
        ...

    def list_verdicts(self) -> list[Verdict]:
        """All verdicts, oldest first."""
        ...


class SealedStore(Protocol):
    """The gate's own view: epochs of sealed tasks and the answers given to them."""

    def open_epoch(self, epoch_id: str, tasks: Sequence[Task], commitment: str, opened_at: float) -> None:
        """Fix the task set of an epoch for good."""
        ...

    def epoch_tasks(self, epoch_id: str) -> tuple[Task, ...]:
        """The tasks of an epoch; empty when it does not exist."""
        ...

    def used_task_ids(self) -> frozenset[str]:
        """Ids of every task that any epoch holds or held."""
        ...

    def save_answers(self, epoch_id: str, answers: Sequence[Answer]) -> None:
        """Keep answers; the first one for (epoch, adapter, task, sample) stands."""
        ...

    def answers(self, epoch_id: str, adapter_sha256: str, *, sample: int = 0) -> dict[str, Answer]:
        """Cached answers of an adapter by task id, of the given sample."""
        ...


class AuditLog(Protocol):
    """Append-only, hash-chained records."""

    def append(self, kind: str, body: JsonObject, *, time: float, expected_head_seq: int | None = None) -> AuditRecord:
        """Commit the next record of the chain; ConflictError when its head is not ``expected_head_seq`` (0: empty)."""
        ...

    def read(self, *, after_seq: int = 0) -> Iterator[AuditRecord]:
        """Records in order."""
        ...


class ReleaseStore(Protocol):
    """Candidates, releases and the aliases that point at them. Every change appends an audit record in
    the same transaction."""

    def add_candidate(self, candidate: Candidate) -> None:
        """Register a candidate; the same id and hash again is a no-op."""
        ...

    def list_candidates(self) -> list[Candidate]:
        """All candidates, oldest first."""
        ...

    def set_candidate_state(
        self, candidate_id: str, state: CandidateState, *, reasons: Sequence[str], time: float
    ) -> Candidate:
        """Move a candidate along :mod:`tidegate.core.lifecycle`; an illegal move raises ConflictError."""
        ...

    def add_release(self, release: Release) -> None:
        """Register a release; the same id again is a no-op."""
        ...

    def list_releases(self) -> list[Release]:
        """All releases by number."""
        ...

    def aliases(self) -> dict[str, str]:
        """Alias (``champion``, ``previous``, ``anchor``, ``canary``) to release id."""
        ...

    def move_aliases(self, targets: Mapping[str, str], *, reason: str, time: float) -> None:
        """Point aliases at releases in one transaction."""
        ...


class CycleStore(Protocol):
    """One row per cycle and per finished step."""

    def open_cycle(self, cycle_id: str, *, config: JsonObject, time: float) -> None:
        """Start a cycle; at most one may be open (ConflictError)."""
        ...

    def current(self) -> tuple[str, JsonObject] | None:
        """Id and configuration of the open cycle, if any."""
        ...

    def finish_step(self, cycle_id: str, step: str, output: JsonObject, *, time: float) -> None:
        """Record a step's output; a step that is recorded already keeps its first output."""
        ...

    def steps(self, cycle_id: str) -> dict[str, JsonObject]:
        """Outputs of the finished steps."""
        ...

    def close_cycle(self, cycle_id: str, outcome: str, *, time: float) -> None:
        """End a cycle with its outcome (``done``, ``refused``, ``abstained``, ``failed``)."""
        ...

    def list_cycles(self) -> list[JsonObject]:
        """All cycles, oldest first: id, opened_at, closed_at, outcome."""
        ...
