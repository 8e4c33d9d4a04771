"""A gate that dies at any write goes on from there: one epoch, one look, one certificate, as if it had not died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gate_engine import BASE, GateWorld, adapter, sealed_traffic
from tidegate.core.gate import Reply, verify_audit
from tidegate.core.types import Answer, AuditRecord, JsonObject, Task
from tidegate.gate import KeyPair, verify_certificate
from tidegate.stores.sql import SqlAuditLog, SqlDatabase, SqlSealedStore

TRAFFIC = sealed_traffic(45)
HOW_MANY_WRITES = 1 + 1 + 3 * 45 + 1  # epoch, its record, answers of three arms, decision


class Death(BaseException):
    """No handler of the code under test may survive this."""


class Fuse:
    """Ends the process at a chosen write, before or after it takes effect."""

    def __init__(self, at: int, *, after: bool, die: Callable[[], None]) -> None:
        self.left, self.after, self.die = at, after, die

    def write(self, run: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            self.die()
        result = run()
        if self.left == 0 and self.after:
            self.die()
        return result


class FusedAudit:
    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self.inner, self.fuse = inner, fuse

    def append(self, kind: str, body: JsonObject, **options: Any) -> AuditRecord:
        return self.fuse.write(lambda: self.inner.append(kind, body, **options))

    def read(self, *, after_seq: int = 0) -> Iterator[AuditRecord]:
        return self.inner.read(after_seq=after_seq)


class FusedSealed:
    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self.inner, self.fuse = inner, fuse

    def open_epoch(self, epoch_id: str, tasks: Sequence[Task], commitment: str, opened_at: float) -> None:
        self.fuse.write(lambda: self.inner.open_epoch(epoch_id, tasks, commitment, opened_at))

    def epoch_tasks(self, epoch_id: str) -> tuple[Task, ...]:
        return self.inner.epoch_tasks(epoch_id)

    def used_task_ids(self) -> frozenset[str]:
        return self.inner.used_task_ids()

    def save_answers(self, epoch_id: str, answers: Sequence[Answer]) -> None:
        self.fuse.write(lambda: self.inner.save_answers(epoch_id, answers))

    def answers(self, epoch_id: str, adapter_sha256: str, *, sample: int = 0) -> dict[str, Answer]:
        return self.inner.answers(epoch_id, adapter_sha256, sample=sample)


def fused(world: GateWorld, fuse: Fuse) -> GateWorld:
    return GateWorld(
        key=world.key, audit=FusedAudit(world.audit, fuse), sealed=FusedSealed(world.sealed, fuse), now=world.now
    )


def raise_death() -> None:
    raise Death


def without_times(records: Sequence[AuditRecord]) -> list[tuple[str, JsonObject]]:
    return [(record.kind, record.body) for record in records]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 40, HOW_MANY_WRITES - 1, HOW_MANY_WRITES])
async def test_a_death_at_any_write_changes_nothing(tmp_path: Path, at: int, after: bool) -> None:
    key = KeyPair.load_or_create(tmp_path / "gate.pem")
    smooth = GateWorld(key=key)
    wanted = await smooth.certify("good", 0.8, TRAFFIC)

    world = GateWorld(key=key)
    dying = fused(world, Fuse(at, after=after, die=raise_death))
    with pytest.raises((Death, BaseExceptionGroup)) as caught:
        await dying.certify("good", 0.8, TRAFFIC)
    assert Death.__name__ in repr(caught.value)

    nothing_was_written = at == 1 and not after
    later = [] if nothing_was_written else sealed_traffic(45, "later")
    found = await world.certify("good", 0.8, [*TRAFFIC, *later])
    assert found.reply is Reply.PROMOTE
    assert found.decision == wanted.decision
    assert without_times(list(world.audit.read())) == without_times(list(smooth.audit.read()))
    assert verify_audit(world.audit.read()).decisions == 1
    verify_certificate(found.certificate, key.public_key, adapter_sha256=adapter("good").sha256, base_sha256=BASE)
    again = await world.certify("good", 0.8, TRAFFIC)
    assert again.certificate == found.certificate


async def test_the_writes_are_all_covered(tmp_path: Path) -> None:
    world = GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))
    fuse = Fuse(10**9, after=False, die=raise_death)
    await fused(world, fuse).certify("good", 0.8, TRAFFIC)
    assert 10**9 - fuse.left == HOW_MANY_WRITES


CHILD = """
import asyncio, sys
sys.path[:0] = [{tests!r}, {here!r}]
from pathlib import Path
from test_gate_crash import certify_and_die
asyncio.run(certify_and_die(Path({folder!r}), {at}))
"""


async def certify_and_die(folder: Path, at: int) -> None:
    """In a process of its own: certify over SQLite and be killed at write number ``at``."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        SqlDatabase.open(folder / "open.db") as database,
        SqlDatabase.open(folder / "sealed.db", role="sealed") as sealed,
    ):
        key = KeyPair.load_or_create(folder / "gate.pem")
        world = GateWorld(key=key, audit=SqlAuditLog(database), sealed=SqlSealedStore(sealed))
        await fused(world, Fuse(at, after=True, die=kill)).certify("good", 0.8, TRAFFIC)


def run_child(folder: Path, at: int) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    code = CHILD.format(tests=str(here.parent), here=str(here), folder=str(folder), at=at)
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("at", [60, HOW_MANY_WRITES])
async def test_kill_9_over_sqlite_resumes(tmp_path: Path, at: int) -> None:
    ended = run_child(tmp_path, at)
    assert ended.returncode == -signal.SIGKILL, ended.stderr

    with (
        SqlDatabase.open(tmp_path / "open.db") as database,
        SqlDatabase.open(tmp_path / "sealed.db", role="sealed") as sealed,
    ):
        key = KeyPair.load_or_create(tmp_path / "gate.pem")
        world = GateWorld(key=key, audit=SqlAuditLog(database), sealed=SqlSealedStore(sealed))
        before = len(world.sealed.answers("epoch-1", adapter("good").sha256))
        found = await world.certify("good", 0.8, TRAFFIC)
        assert found.reply is Reply.PROMOTE
        assert len([r for r in world.engine.requests if r.adapter == "good"]) == (
            45 - before if at < HOW_MANY_WRITES else 0
        )
        report = verify_audit(world.audit.read())
        assert (report.decisions, len(report.epochs)) == (1, 1)
