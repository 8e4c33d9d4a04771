"""What every release, audit, cycle and sealed store promises, over SQLite, PostgreSQL and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from postgres_world import locations
from store_samples import TASK, answer, candidate, release
from tidegate.core.audit import verify_chain
from tidegate.core.errors import AuditError, ConflictError, NotFoundError, RequestError
from tidegate.core.types import CandidateState
from tidegate.ports import AuditLog, CycleStore, ReleaseStore, SealedStore
from tidegate.stores.memory import MemoryAuditLog, MemoryCycleStore, MemoryReleaseStore, MemorySealedStore
from tidegate.stores.records import Role
from tidegate.stores.sql import Location, SqlAuditLog, SqlCycleStore, SqlDatabase, SqlReleaseStore, SqlSealedStore

S = CandidateState


@dataclass
class Backend:
    audit: SqlAuditLog | MemoryAuditLog
    releases: ReleaseStore
    cycles: CycleStore
    sealed: SealedStore

    def kinds(self) -> list[str]:
        return [record.kind for record in self.audit.read()]


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "memory":
        audit = MemoryAuditLog()
        yield Backend(audit, MemoryReleaseStore(audit), MemoryCycleStore(), MemorySealedStore())
        return
    where: dict[Role, Location] = {"open": tmp_path / "tidegate.db", "sealed": tmp_path / "sealed.db"}
    if request.param == "postgres":
        where |= locations(request.getfixturevalue("postgres"))
    with SqlDatabase.open(where["open"]) as db, SqlDatabase.open(where["sealed"], role="sealed") as sealed:
        yield Backend(SqlAuditLog(db), SqlReleaseStore(db), SqlCycleStore(db), SqlSealedStore(sealed))


def test_the_audit_log_is_one_chain_that_recomputes(backend: Backend):
    log: AuditLog = backend.audit
    assert list(log.read()) == []
    written = [log.append("note", {"n": n, "t": (1, 2.0)}, time=n) for n in range(12)]
    assert list(log.read()) == written
    assert written[0].body == {"n": 0, "t": [1, 2.0]}
    assert verify_chain(log.read()) == 12
    assert [r.seq for r in log.read(after_seq=10)] == [11, 12]


def test_an_audit_body_that_is_no_json_is_refused_and_leaves_no_gap(backend: Backend):
    backend.audit.append("note", {}, time=1.0)
    for body in ({"p": float("nan")}, {"p": object()}, {"p": "\ud800"}):
        with pytest.raises(AuditError, match="'note'"):
            backend.audit.append("note", body, time=2.0)
    backend.audit.append("note", {}, time=3.0)
    assert verify_chain(backend.audit.read()) == 2


def test_a_record_may_ask_for_the_head_that_it_follows(backend: Backend):
    assert backend.audit.append("note", {}, time=1.0, expected_head_seq=0).seq == 1
    for seq in (0, 2):
        with pytest.raises(ConflictError, match=f"ends at record 1; {seq} was expected"):
            backend.audit.append("note", {}, time=2.0, expected_head_seq=seq)
    assert backend.audit.append("note", {}, time=2.0, expected_head_seq=1).seq == 2
    assert verify_chain(backend.audit.read()) == 2


def test_a_decision_record_is_also_a_decision(backend: Backend):
    backend.audit.append("note", {}, time=1.0)
    body = {"candidate": "cand-1", "decision": "promote", "epoch": "s1", "wins": 9}
    record = backend.audit.append("decision", body, time=2.0)
    backend.audit.append("decision", {"candidate": "cand-2", "decision": "abstain", "epoch": None}, time=3.0)
    first, second = backend.audit.list_decisions()
    assert (first.seq, first.time, first.outcome, first.candidate_id, first.epoch_id) == (
        record.seq,
        2.0,
        "promote",
        "cand-1",
        "s1",
    )
    assert first.body["wins"] == 9
    assert second.epoch_id is None
    assert backend.audit.list_decisions(epoch_id="s1") == [first]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_no_number_is_refused(backend: Backend, odd: float):
    with pytest.raises(RequestError, match=f"created_at {odd}; a finite number of seconds"):
        backend.releases.add_candidate(candidate(created_at=odd))
    with pytest.raises(RequestError, match=f"created_at {odd}; a finite number of seconds"):
        backend.releases.add_release(release(created_at=odd))
    assert (backend.releases.list_candidates(), backend.releases.list_releases(), backend.kinds()) == ([], [], [])


def test_a_candidate_is_registered_once_and_as_proposed(backend: Backend):
    backend.releases.add_candidate(candidate())
    backend.releases.add_candidate(candidate(created_at=99.0))
    older = candidate("cand-bbbbbbbb", adapter_sha256="c" * 64, created_at=1.0)
    backend.releases.add_candidate(older)
    assert backend.releases.list_candidates() == [older, candidate()]
    assert backend.kinds() == ["candidate_proposed"] * 2
    with pytest.raises(ConflictError, match="is known with the adapter"):
        backend.releases.add_candidate(candidate(adapter_sha256="d" * 64))
    with pytest.raises(ConflictError, match="starts as 'proposed'"):
        backend.releases.add_candidate(candidate("cand-x", state=S.CERTIFIED))


def test_a_candidate_moves_along_the_lifecycle_with_one_record_a_move(backend: Backend):
    backend.releases.add_candidate(candidate())
    moved = backend.releases.set_candidate_state("cand-aaaaaaaa", S.SCREENED, reasons=["dev +3"], time=4.0)
    assert moved == replace(candidate(), state=S.SCREENED)
    again = backend.releases.set_candidate_state("cand-aaaaaaaa", S.SCREENED, reasons=["resumed"], time=5.0)
    assert again == moved
    with pytest.raises(ConflictError, match="'screened' cannot become 'champion'"):
        backend.releases.set_candidate_state("cand-aaaaaaaa", S.CHAMPION, reasons=[], time=6.0)
    with pytest.raises(NotFoundError, match="'cand-none'"):
        backend.releases.set_candidate_state("cand-none", S.SCREENED, reasons=[], time=6.0)
    assert backend.releases.list_candidates() == [moved]
    last = list(backend.audit.read())[-1]
    assert (last.seq, last.time, last.kind) == (2, 4.0, "candidate_moved")
    assert last.body == {
        "candidate": "cand-aaaaaaaa",
        "from": "proposed",
        "to": "screened",
        "reasons": ["dev +3"],
        "adapter_sha256": "a" * 64,
    }


def test_a_release_number_is_never_used_again(backend: Backend):
    first, second = release(0), release(1)
    backend.releases.add_release(second)
    backend.releases.add_release(first)
    backend.releases.add_release(first)
    assert backend.releases.list_releases() == [first, second]
    for clash in (release(1, id="other"), release(2, id="smol-r1"), release(1, adapter_sha256="f" * 64)):
        with pytest.raises(ConflictError, match="never used again"):
            backend.releases.add_release(clash)
    backend.releases.add_release(release(2, restores="smol-r0"))
    with pytest.raises(NotFoundError, match="'smol-r9'"):
        backend.releases.add_release(release(3, restores="smol-r9"))
    assert backend.kinds() == ["release_added"] * 3
    assert len(backend.releases.list_releases()) == 3


def test_aliases_move_together_or_not_at_all(backend: Backend):
    for number in range(3):
        backend.releases.add_release(release(number))
    assert backend.releases.aliases() == {}
    backend.releases.move_aliases({"champion": "smol-r0", "anchor": "smol-r0"}, reason="start", time=5.0)
    backend.releases.move_aliases({"champion": "smol-r1", "previous": "smol-r0"}, reason="certified", time=6.0)
    backend.releases.move_aliases({"champion": "smol-r1"}, reason="again", time=7.0)
    with pytest.raises(NotFoundError, match="'smol-r9'"):
        backend.releases.move_aliases({"champion": "smol-r2", "previous": "smol-r9"}, reason="bad", time=8.0)
    assert backend.releases.aliases() == {"anchor": "smol-r0", "champion": "smol-r1", "previous": "smol-r0"}
    moves = [r.body for r in backend.audit.read() if r.kind == "aliases_moved"]
    assert moves[1] == {
        "from": {"champion": "smol-r0", "previous": None},
        "to": {"champion": "smol-r1", "previous": "smol-r0"},
        "reason": "certified",
    }
    assert len(moves) == 2
    assert verify_chain(backend.audit.read()) == 5


def test_at_most_one_cycle_is_open(backend: Backend):
    cycles = backend.cycles
    assert cycles.current() is None
    cycles.open_cycle("c1", config={"seed": 1}, time=1.0)
    assert cycles.current() == ("c1", {"seed": 1})
    with pytest.raises(ConflictError, match="while 'c1' is open"):
        cycles.open_cycle("c2", config={}, time=2.0)
    with pytest.raises(ConflictError, match="exists already"):
        cycles.open_cycle("c1", config={}, time=2.0)
    cycles.close_cycle("c1", "done", time=3.0)
    cycles.close_cycle("c1", "done", time=4.0)
    with pytest.raises(ConflictError, match="ended as 'done'"):
        cycles.close_cycle("c1", "failed", time=5.0)
    with pytest.raises(ConflictError, match="exists already"):
        cycles.open_cycle("c1", config={}, time=6.0)
    cycles.open_cycle("c2", config={}, time=7.0)
    assert cycles.list_cycles() == [
        {"id": "c1", "opened_at": 1.0, "closed_at": 3.0, "outcome": "done"},
        {"id": "c2", "opened_at": 7.0, "closed_at": None, "outcome": None},
    ]


def test_what_ends_at_one_instant_keeps_its_order(backend: Backend):
    for number in (2, 1, 3):
        backend.cycles.open_cycle(f"c{number}", config={}, time=1.0)
        for step in ("zero", "alpha", "mid"):
            backend.cycles.finish_step(f"c{number}", step, {}, time=2.0)
        backend.cycles.close_cycle(f"c{number}", "done", time=2.0)
    assert [cycle["id"] for cycle in backend.cycles.list_cycles()] == ["c2", "c1", "c3"]
    assert list(backend.cycles.steps("c1")) == ["zero", "alpha", "mid"]


def test_a_step_keeps_its_first_output(backend: Backend):
    cycles = backend.cycles
    with pytest.raises(NotFoundError, match="'c1'"):
        cycles.finish_step("c1", "collect", {}, time=1.0)
    cycles.open_cycle("c1", config={}, time=1.0)
    cycles.finish_step("c1", "collect", {"n": 1}, time=2.0)
    cycles.finish_step("c1", "collect", {"n": 2}, time=3.0)
    cycles.finish_step("c1", "curate", {}, time=3.0)
    assert cycles.steps("c1") == {"collect": {"n": 1}, "curate": {}}
    assert list(cycles.steps("c1")) == ["collect", "curate"]
    with pytest.raises(RequestError, match="step 'train'"):
        cycles.finish_step("c1", "train", {"loss": float("nan")}, time=4.0)
    cycles.close_cycle("c1", "failed", time=5.0)
    with pytest.raises(ConflictError, match="ended as 'failed'"):
        cycles.finish_step("c1", "train", {}, time=6.0)
    assert cycles.steps("c9") == {}
    with pytest.raises(NotFoundError, match="'c9'"):
        cycles.close_cycle("c9", "done", time=6.0)


def test_the_task_set_of_an_epoch_is_fixed_for_good(backend: Backend):
    sealed, tasks = backend.sealed, [TASK, replace(TASK, id="t0")]
    sealed.open_epoch("s1", tasks, "commit", 1.0)
    sealed.open_epoch("s1", tasks, "commit", 2.0)
    for other, commitment in ((tasks, "other"), (tasks[::-1], "commit"), (tasks[:1], "commit")):
        with pytest.raises(ConflictError, match="'s1'"):
            sealed.open_epoch("s1", other, commitment, 3.0)
    with pytest.raises(ConflictError, match="twice"):
        sealed.open_epoch("s2", [TASK, TASK], "commit", 3.0)
    assert sealed.epoch_tasks("s1") == tuple(tasks)
    assert sealed.epoch_tasks("s2") == ()
    sealed.open_epoch("s3", [replace(TASK, id="t7")], "c", 4.0)
    assert sealed.used_task_ids() == {"t0", "t1", "t7"}


def test_the_first_answer_stands(backend: Backend):
    sealed = backend.sealed
    sealed.open_epoch("s1", [TASK, replace(TASK, id="t0")], "commit", 1.0)
    sealed.save_answers("s1", [answer(), answer(score=0.0), answer(adapter_sha256="c" * 64)])
    sealed.save_answers("s1", [answer(score=0.5), answer("t0", error="odd \ud800", passed=False)])
    assert sealed.answers("s1", "a" * 64) == {
        "t0": answer("t0", error="odd \\ud800", passed=False),
        "t1": answer(),
    }
    assert sealed.answers("s1", "c" * 64) == {"t1": answer(adapter_sha256="c" * 64)}
    sealed.save_answers("s1", [answer(sample=1, score=0.25), answer(sample=1), answer(sample=2, surprisal=None)])
    assert sealed.answers("s1", "a" * 64, sample=1) == {"t1": answer(sample=1, score=0.25)}
    assert sealed.answers("s1", "a" * 64, sample=2) == {"t1": answer(sample=2, surprisal=None)}
    assert sealed.answers("s1", "a" * 64)["t1"] == answer()
    sealed.save_answers("s1", [answer("t0", adapter_sha256="e" * 64, text="odd \ud800\0", tools=("odd \udfff", "b"))])
    kept = sealed.answers("s1", "e" * 64)["t0"]
    assert (kept.text, kept.tools) == ("odd \\ud800\\x00", ("odd \\udfff", "b"))
    assert sealed.answers("s2", "a" * 64) == {}
    for epoch, task in (("s1", "t9"), ("s9", "t1")):
        with pytest.raises(NotFoundError, match=f"{epoch!r} holds no task"):
            sealed.save_answers(epoch, [answer("t0", adapter_sha256="d" * 64), answer(task, adapter_sha256="d" * 64)])
    assert sealed.answers("s1", "d" * 64) == {}
    with pytest.raises(RequestError, match="score"):
        sealed.save_answers("s1", [answer(score=float("nan"))])
