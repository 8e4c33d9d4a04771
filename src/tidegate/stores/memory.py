"""The same ports over plain Python objects: for tests, dry runs, and to show what a backend must do.

Records pass through the same codec as on disk, so that what comes back, and what is refused, is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidegate.core.audit import next_record
from tidegate.core.lifecycle import transition
from tidegate.core.types import Answer, AuditRecord, Candidate, CandidateState, JsonObject, Release, Task
from tidegate.stores import codec, rowmap, rules
from tidegate.stores.memory_shadows import MemoryShadowStore
from tidegate.stores.memory_trajectories import MemoryTrajectoryStore
from tidegate.stores.records import Decision

__all__ = [
    "MemoryAuditLog",
    "MemoryCycleStore",
    "MemoryReleaseStore",
    "MemorySealedStore",
    "MemoryShadowStore",
    "MemoryTrajectoryStore",
]


class MemoryAuditLog:
    """Append-only, hash-chained records."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.RLock()
        self._records: list[AuditRecord] = []

    def append(self, kind: str, body: JsonObject, *, time: float, expected_head_seq: int | None = None) -> AuditRecord:
        """Keep the next record of the chain."""
        with self._lock:
            head = self._records[-1] if self._records else None
            rules.check_head(head, expected_head_seq)
            record = next_record(head, kind=kind, body=body, time=time)
            self._records.append(record)
            return record

    def read(self, *, after_seq: int = 0) -> Iterator[AuditRecord]:
        """Records in order."""
        with self._lock:
            found = self._records[max(after_seq, 0) :]  # record n stands at position n - 1
        yield from found

    def list_decisions(self, *, epoch_id: str | None = None) -> list[Decision]:
        """The gate's decisions in order, of one epoch if asked so."""
        found = [decision for record in self.read() if (decision := rules.decision_of(record)) is not None]
        return [decision for decision in found if epoch_id in (None, decision.epoch_id)]


class MemoryReleaseStore:
    """Candidates, releases and the aliases that point at them; changes go to ``audit`` too."""

    def __init__(self, audit: MemoryAuditLog) -> None:
        """Start empty."""
        self._audit = audit
        self._lock = threading.RLock()
        self._candidates: dict[str, Candidate] = {}
        self._releases: dict[str, Release] = {}
        self._aliases: dict[str, str] = {}

    def add_candidate(self, candidate: Candidate) -> None:
        """Register a candidate; the same id and hash again is a no-op."""
        rules.check_proposed(candidate)
        row = rowmap.candidate_row(candidate)
        with self._lock:
            known = self._candidates.get(candidate.id)
            if known is not None:
                rules.check_same_candidate(known, candidate)
                return
            self._audit.append("candidate_proposed", rules.proposed_body(candidate), time=candidate.created_at)
            self._candidates[candidate.id] = rowmap.candidate_of(row)

    def list_candidates(self) -> list[Candidate]:
        """All candidates, oldest first."""
        with self._lock:
            return sorted(self._candidates.values(), key=lambda c: (c.created_at, c.id))

    def set_candidate_state(
        self, candidate_id: str, state: CandidateState, *, reasons: Sequence[str], time: float
    ) -> Candidate:
        """Move a candidate along the lifecycle; the state that it has already is a no-op."""
        with self._lock:
            known = self._candidates.get(candidate_id)
            if known is None:
                raise rules.unknown_candidate(candidate_id)
            if known.state is state:
                return known
            moved = replace(known, state=transition(known.state, state))
            self._audit.append("candidate_moved", rules.moved_body(known, state, reasons), time=time)
            self._candidates[candidate_id] = moved
            return moved

    def add_release(self, release: Release) -> None:
        """Register a release; the same id again is a no-op."""
        row = rowmap.release_row(release)
        with self._lock:
            for known in self._releases.values():
                if known.id == release.id or known.number == release.number:
                    rules.check_same_release(known, release)
                    return
            if release.restores is not None:
                self._require([release.restores])
            self._audit.append("release_added", rules.release_body(release), time=release.created_at)
            self._releases[release.id] = rowmap.release_of(row)

    def list_releases(self) -> list[Release]:
        """All releases by number."""
        with self._lock:
            return sorted(self._releases.values(), key=lambda release: release.number)

    def aliases(self) -> dict[str, str]:
        """Alias to release id."""
        with self._lock:
            return dict(sorted(self._aliases.items()))

    def move_aliases(self, targets: Mapping[str, str], *, reason: str, time: float) -> None:
        """Point aliases at releases, all or none; where all of them point there already is a no-op."""
        with self._lock:
            self._require(targets.values())
            moved = {name: target for name, target in targets.items() if self._aliases.get(name) != target}
            if moved:
                body = rules.aliases_body(self._aliases, moved, reason)
                self._audit.append("aliases_moved", body, time=time)
                self._aliases.update(moved)

    def _require(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            if id_ not in self._releases:
                raise rules.unknown_release(id_)


class MemoryCycleStore:
    """One row per cycle and per finished step."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.RLock()
        self._cycles: dict[str, dict[str, Any]] = {}
        self._steps: dict[str, dict[str, str]] = {}

    def open_cycle(self, cycle_id: str, *, config: JsonObject, time: float) -> None:
        """Start a cycle; at most one may be open."""
        text = codec.to_json(dict(config), f"configuration of cycle {cycle_id!r}", canonical=False)
        with self._lock:
            for known in self._cycles.values():
                if known["id"] == cycle_id or known["closed_at"] is None:
                    raise rules.cycle_conflict(cycle_id, known["id"])
            row = {"id": cycle_id, "config": text, "opened_at": time, "closed_at": None, "outcome": None}
            self._cycles[cycle_id] = row
            self._steps[cycle_id] = {}

    def current(self) -> tuple[str, JsonObject] | None:
        """Id and configuration of the open cycle, if any."""
        with self._lock:
            running = [row for row in self._cycles.values() if row["closed_at"] is None]
        return (running[0]["id"], codec.from_json(running[0]["config"])) if running else None

    def finish_step(self, cycle_id: str, step: str, output: JsonObject, *, time: float) -> None:
        """Record a step's output; a step that is recorded already keeps its first output."""
        del time
        text = codec.to_json(dict(output), f"output of step {step!r} of cycle {cycle_id!r}", canonical=False)
        with self._lock:
            if step in self._steps.get(cycle_id, {}):
                return
            rules.check_cycle_open(cycle_id, self._cycles.get(cycle_id))
            self._steps[cycle_id][step] = text

    def steps(self, cycle_id: str) -> dict[str, JsonObject]:
        """Outputs of the finished steps, in the order in which they finished."""
        with self._lock:
            return {step: codec.from_json(text) for step, text in self._steps.get(cycle_id, {}).items()}

    def close_cycle(self, cycle_id: str, outcome: str, *, time: float) -> None:
        """End a cycle with its outcome; again is a no-op."""
        with self._lock:
            if rules.check_closable(cycle_id, self._cycles.get(cycle_id), outcome):
                self._cycles[cycle_id].update(closed_at=time, outcome=outcome)

    def list_cycles(self) -> list[JsonObject]:
        """All cycles, oldest first: id, opened_at, closed_at, outcome."""
        names = ("id", "opened_at", "closed_at", "outcome")
        with self._lock:
            rows = [{name: row[name] for name in names} for row in self._cycles.values()]
        return sorted(rows, key=lambda row: row["opened_at"])


class MemorySealedStore:
    """Epochs of sealed tasks and the answers given to them."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.RLock()
        self._epochs: dict[str, tuple[str, list[dict[str, Any]]]] = {}
        self._answers: dict[tuple[str, str, int], dict[str, Answer]] = {}

    def open_epoch(self, epoch_id: str, tasks: Sequence[Task], commitment: str, opened_at: float) -> None:
        """Fix the task set of an epoch for good; the same set again is a no-op."""
        del opened_at
        fixed = (commitment, rowmap.epoch_task_rows(epoch_id, tasks))
        with self._lock:
            if self._epochs.setdefault(epoch_id, fixed) != fixed:
                raise rules.epoch_conflict(epoch_id)

    def epoch_tasks(self, epoch_id: str) -> tuple[Task, ...]:
        """The tasks of an epoch in their fixed order; empty when it does not exist."""
        with self._lock:
            _, rows = self._epochs.get(epoch_id, ("", []))
        return tuple(codec.task_of(row["task"]) for row in rows)

    def used_task_ids(self) -> frozenset[str]:
        """Ids of every task that any epoch holds or held."""
        with self._lock:
            return frozenset(row["task_id"] for _, rows in self._epochs.values() for row in rows)

    def save_answers(self, epoch_id: str, answers: Sequence[Answer]) -> None:
        """Keep answers, all or none; the first one for (epoch, adapter, task, sample) stands."""
        rows = [rowmap.answer_row(epoch_id, answer) for answer in answers]
        with self._lock:
            tasks = {row["task_id"] for row in self._epochs.get(epoch_id, ("", []))[1]}
            for row in rows:
                if row["task_id"] not in tasks:
                    raise rules.unknown_task(epoch_id, row["task_id"])
            for row in rows:
                kept = self._answers.setdefault((epoch_id, row["adapter_sha256"], row["sample"]), {})
                kept.setdefault(row["task_id"], rowmap.answer_of(row))

    def answers(self, epoch_id: str, adapter_sha256: str, *, sample: int = 0) -> dict[str, Answer]:
        """Cached answers of an adapter by task id, of the given sample."""
        with self._lock:
            return dict(sorted(self._answers.get((epoch_id, adapter_sha256, sample), {}).items()))
