"""What people do to the gate of a data directory: sign, freeze, trust, invalidate, break the glass.

Where a record needs several people each signs on their own; until the last one has, the signatures wait in a file of
``statements/``. Nothing counts before its record stands in the audit log.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tidegate.app.layout import DataDirectory
from tidegate.app.locks import exclusive
from tidegate.app.stores import Stores, open_stores
from tidegate.artifacts import write_atomically
from tidegate.core.audit import next_record
from tidegate.core.errors import ConflictError, GateError, NotFoundError
from tidegate.core.gate.controls import (
    BREAK_GLASS,
    BREAK_GLASS_S,
    CANDIDATE_SIGNED,
    FREEZE,
    GATE_KEY_ROTATED,
    PERSON_TRUSTED,
    POLICY_SIGNED,
    STATEMENTS,
    UNFREEZE,
    VERIFIER_INVALIDATED,
    people_needed,
    subject_of,
)
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import DECISION, EPOCH_CLOSED, EPOCH_OPENED, SCREEN, GateState, fold, gate_state
from tidegate.core.hashing import canonical_json, content_hash
from tidegate.core.types import AuditRecord, Candidate, CandidateState, JsonObject
from tidegate.gate.certificates import sign_certificate
from tidegate.gate.keys import KeyPair
from tidegate.gate.policy import load_policy
from tidegate.gate.statements import check_statement, read_introduction, sign_statement
from tidegate.release import CHAMPION
from tidegate.release.records import release_behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """What came of a signature: the record that it completed, or how many people are still missing."""

    kind: str
    signer: str
    record: AuditRecord | None
    missing: int

    def to_json(self) -> JsonObject:
        """For commands."""
        recorded = {"recorded": self.record.seq} if self.record else {"waiting_for_people": self.missing}
        return {"kind": self.kind, "signer": self.signer, **recorded}


class Controlling:
    """The audit log of a data directory with the state that it amounts to; one process at a time."""

    def __init__(self, directory: DataDirectory, stores: Stores) -> None:
        self.directory = directory
        self.stores = stores
        self.records = list(stores.audit.read())
        self.state: GateState = gate_state(self.records)

    def append(self, kind: str, body: JsonObject) -> AuditRecord:
        """Write a record that moves the state.

        Raises:
            GateError: it does not fit the state; nothing is written.
            ConflictError: another process wrote meanwhile.
        """
        head = self.records[-1] if self.records else None
        now = self.now()
        self.state = fold(self.state, next_record(head, kind=kind, body=body, time=now))
        record = self.stores.audit.append(kind, body, time=now, expected_head_seq=head.seq if head else 0)
        self.records.append(record)
        return record

    def now(self) -> float:
        """Unix seconds; a clock that was set back does not go behind the last record."""
        return max(time.time(), self.records[-1].time if self.records else 0.0)

    def sign(self, kind: str, subject: JsonObject, key: KeyPair) -> Signing:
        """Add a person's signature; the record is written once enough people have signed.

        Raises:
            GateError: the signer is not trusted.
            ConflictError: the same person signed already.
        """
        self._trust_operator_first()
        people = self.state.controls.people
        if key.public_hex not in people:
            raise GateError(
                f"key {key.public_hex[:16]} is none of those whom this gate trusts, {sorted(people.values())!r}. "
                "One of them adds a person with 'tidegate gate trust NAME PUBLIC_KEY --key FILE'"
            )
        path = self.directory.statements / f"{content_hash({'kind': kind, 'subject': dict(subject)})}.json"
        statements = _waiting(path)
        if any(statement["signer"] == key.public_hex for statement in statements):
            raise ConflictError(f"key {key.public_hex[:16]} has signed this already; another person has to")
        statements.append(sign_statement(key, kind=kind, subject=subject, signed_at=self.now()))
        for statement in statements:  # the file may have been changed meanwhile
            check_statement(statement, kind=kind, subject=subject)
        missing = people_needed(kind, self.state.controls) - len(statements)
        if missing > 0:
            waiting = {"kind": kind, "subject": dict(subject), STATEMENTS: statements}
            write_atomically(path, (canonical_json(waiting) + "\n").encode())
            return Signing(kind=kind, signer=key.public_hex, record=None, missing=missing)
        record = self.append(kind, {**subject, STATEMENTS: statements})
        path.unlink(missing_ok=True)
        return Signing(kind=kind, signer=key.public_hex, record=record, missing=0)

    def _trust_operator_first(self) -> None:
        """The operator of a data directory is the first person; only others have to be introduced."""
        if self.state.controls.people:
            return
        operator = KeyPair.load_or_create(self.directory.operator_key)
        subject = {"public_key": operator.public_hex, "name": "operator"}
        statement = sign_statement(operator, kind=PERSON_TRUSTED, subject=subject, signed_at=self.now())
        self.append(PERSON_TRUSTED, {**subject, STATEMENTS: [statement]})


@contextmanager
def controlling(directory: DataDirectory) -> Generator[Controlling]:
    """Open the controls for one command.

    Raises:
        ConflictError: another command works on them.
    """
    lock = directory.root / "controls.lock"
    with exclusive(lock, "another command changes the gate's controls"), open_stores(directory) as stores:
        controls = Controlling(directory, stores)
        finish_rotation(controls)
        yield controls


def key_of(directory: DataDirectory, key: Path | None) -> KeyPair:
    """The key that a command signs with: that of a file, else the operator's."""
    return KeyPair.load_or_create(directory.operator_key) if key is None else KeyPair.load(key)


def sign_policy(controls: Controlling, file: Path, key: KeyPair) -> JsonObject:
    """Sign a policy that is looser than the one in force.

    Raises:
        PolicyError: the file is no policy.
        ConflictError: it is nowhere looser, so that it needs no signature.
    """
    policy = load_policy(file)
    changes = controls.state.controls.looser(policy)
    if not changes:
        raise ConflictError(
            f"policy {policy.name!r} is nowhere looser than the one in force, so it needs no signature to take effect"
        )
    signing = controls.sign(POLICY_SIGNED, {"policy": policy.values(), "policy_hash": policy.hash}, key)
    return {**signing.to_json(), "policy_hash": policy.hash, "looser": list(changes), **_from_window(controls, policy)}


def freeze(controls: Controlling, reason: str) -> JsonObject:
    """Stop learning; serving goes on."""
    record = controls.append(FREEZE, {"reason": reason, "trigger": None})
    return {"recorded": record.seq, "frozen": reason}


def unfreeze(controls: Controlling, key: KeyPair) -> JsonObject:
    """Sign that learning may go on.

    Raises:
        NotFoundError: nothing is frozen.
    """
    frozen = controls.state.controls.frozen
    if frozen is None:
        raise NotFoundError("learning is not frozen")
    return controls.sign(UNFREEZE, {"freeze_seq": frozen.seq}, key).to_json()


def trust(controls: Controlling, name: str, given: str, key: KeyPair) -> JsonObject:
    """Let somebody trusted introduce another person.

    Args:
        controls: the directory's.
        name: the person's; not empty.
        given: their introduction, as ``gate keygen`` prints it.
        key: of the person who signs.

    Raises:
        ConflictError: the key or the name is taken, or the name is empty.
        CertificateError: ``given`` is no introduction.
    """
    public_key, people = read_introduction(given), controls.state.controls.people
    if not name.strip() or public_key in people or name in people.values():
        raise ConflictError(f"{name!r} or key {public_key[:16]} is trusted already, or no name: {dict(people)!r}")
    return controls.sign(PERSON_TRUSTED, {"public_key": public_key, "name": name}, key).to_json()


def rotate_gate_key(controls: Controlling, key: KeyPair, *, revoke: bool) -> JsonObject:
    """Give the gate a new key. The open epoch closes: its commitment was salted with the old one.

    Args:
        controls: the directory's.
        key: of the person who signs.
        revoke: certificates of the old key stop counting, so that what serves has to be certified again.
    """
    directory = controls.directory
    old, new = KeyPair.load_or_create(directory.gate_key), KeyPair.load_or_create(directory.next_gate_key)
    subject = {"previous": old.public_hex, "public_key": new.public_hex, "revoked": revoke}
    signing = controls.sign(GATE_KEY_ROTATED, subject, key)
    if controls.state.epochs and controls.state.epochs[-1].closed is None:
        close_epoch(controls, "the gate's key was rotated")
    finish_rotation(controls)
    return {**signing.to_json(), **subject}


def finish_rotation(controls: Controlling) -> None:
    """Put the key in its place that the log names; repeating it after a crash completes it."""
    directory, recorded = controls.directory, controls.state.controls.gate_key
    if recorded is None or not directory.next_gate_key.exists():
        return
    if KeyPair.load(directory.next_gate_key).public_hex != recorded:
        return  # a rotation that was not signed yet
    old = KeyPair.load_or_create(directory.gate_key).public_hex
    with contextlib.suppress(FileExistsError):
        os.link(directory.gate_key, directory.gate_key.with_name(f"gate-{old[:16]}.pem"))
    directory.next_gate_key.replace(directory.gate_key)


def close_epoch(controls: Controlling, reason: str) -> JsonObject:
    """Look no further at the open sealed set; the next candidate gets a new one.

    Raises:
        NotFoundError: none is open.
    """
    last = controls.state.epochs[-1] if controls.state.epochs else None
    if last is None or last.closed is not None:
        raise NotFoundError("no epoch is open")
    record = controls.append(EPOCH_CLOSED, {"epoch": last.id, "reason": reason})
    return {"recorded": record.seq, "epoch": last.id, "reason": reason}


def invalidate_verifier(controls: Controlling, verifier: str, version: str, reason: str, key: KeyPair) -> JsonObject:
    """Record that a verifier is not to be believed: certificates that rest on it are void (trigger 3).

    Raises:
        NotFoundError: nothing was ever scored by it, so that a slip of the pen would protect nothing.
    """
    used = {(str(n), str(v)) for record in controls.records for n, v in _verifiers_of(record).items()}
    if (verifier, version) not in used:
        raise NotFoundError(f"verifier {verifier!r} {version!r} scored nothing here; these did: {sorted(used)!r}")
    subject = {"verifier": verifier, "version": version, "reason": reason}
    return controls.sign(VERIFIER_INVALIDATED, subject, key).to_json()


def _verifiers_of(record: AuditRecord) -> Mapping[str, Any]:
    if record.kind == EPOCH_OPENED:
        return record.body["grading"].get("verifiers", {})
    return record.body["verifiers"] if record.kind in (DECISION, SCREEN) else {}


def first_certificate(controls: Controlling, candidate: Candidate, key: KeyPair) -> JsonObject:
    """A person's certificate for the first release; the signature stands in the log."""
    subject = {
        "candidate": candidate.id,
        "adapter_sha256": candidate.adapter_sha256,
        "base_sha256": candidate.base_sha256,
    }
    signed = (r for r in controls.records if r.kind == CANDIDATE_SIGNED and subject_of(r.body) == subject)
    record = next(signed, None) or controls.sign(CANDIDATE_SIGNED, subject, key).record
    assert record is not None  # noqa: S101 - one person is enough
    return _certificate("person", candidate, record, key)


def emergency_certificate(controls: Controlling, candidate: Candidate, reason: str, key: KeyPair) -> JsonObject:
    """An emergency certificate for a candidate that no gate certified; it ends after 24 hours.

    Promotions of the window no longer count towards the level, and nothing is promoted before a person has reviewed
    the anchor. An emergency that was recorded and not served yet is gone on with.

    Raises:
        ConflictError: the candidate was judged already; what the gate refused reaches no user this way either.
    """
    now = controls.now()
    sha256 = candidate.adapter_sha256
    broken = (record for record in reversed(controls.records) if record.kind == BREAK_GLASS)
    begun = next((record for record in broken if record.body["adapter_sha256"] == sha256), None)
    if begun is not None and candidate.state is CandidateState.CERTIFIED and now < begun.body["expires_at"]:
        return _certificate("break_glass", candidate, begun, key)
    refused = any(
        record.kind in (DECISION, SCREEN)
        and record.body["candidate_sha256"] == sha256
        and record.body["decision"] in ("refuse", "fail")
        for record in controls.records
    )
    if refused or candidate.state not in (CandidateState.PROPOSED, CandidateState.SCREENED):
        raise ConflictError(
            f"candidate {candidate.id!r} is {candidate.state.value!r}{' and was refused' if refused else ''}; only one "
            "that was not judged yet can be served in an emergency"
        )
    subject = {
        "candidate": candidate.id,
        "adapter_sha256": sha256,
        "base_sha256": candidate.base_sha256,
        "reason": reason,
        "expires_at": now + BREAK_GLASS_S,
    }
    signing = controls.sign(BREAK_GLASS, subject, key)
    assert signing.record is not None  # noqa: S101 - one person is enough
    return _certificate("break_glass", candidate, signing.record, key)


def _certificate(
    kind: Literal["person", "break_glass"], candidate: Candidate, record: AuditRecord, key: KeyPair
) -> JsonObject:
    """A certificate that rests on a record; issuing it again gives the same one."""
    return sign_certificate(
        key,
        kind=kind,
        adapter_sha256=candidate.adapter_sha256,
        base_sha256=candidate.base_sha256,
        policy_hash=None,
        decision_hash=record.hash,
        issued_at=record.time,
    )


def former_champions(controls: Controlling) -> frozenset[str]:
    """Ids of the releases that ever served everybody, the champion included."""
    moved = (record.body for record in controls.records if record.kind == "aliases_moved")
    named = {str(body["to"][CHAMPION]) for body in moved if CHAMPION in body["to"]}
    return frozenset(named | {release_behind(controls.stores.releases, CHAMPION).id})


def _waiting(path: Path) -> list[dict[str, Any]]:
    return [] if not path.exists() else list(waiting_statements(path)[STATEMENTS])


def waiting_statements(path: Path) -> JsonObject:
    """What waits in a file of ``statements/``: ``kind``, ``subject`` and ``statements``.

    Raises:
        GateError: the file was damaged.
    """
    try:
        waiting = json.loads(path.read_text(encoding="utf-8"))
        for statement in waiting[STATEMENTS]:
            _ = (statement["signer"], statement["signed_at"], statement["signature"])
        return {"kind": str(waiting["kind"]), "subject": dict(waiting["subject"]), STATEMENTS: waiting[STATEMENTS]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GateError(
            f"waiting signatures {str(path)!r} cannot be read: {error!r}; delete the file and sign again"
        ) from error


def _from_window(controls: Controlling, policy: Policy) -> Mapping[str, int]:
    """The window from which a signed policy holds: the next one, or this one while nothing was looked at in it."""
    signed = controls.state.controls.signed_policies.get(policy.hash)
    if signed is None:
        return {}
    at_once = controls.state.why_not_decide(policy) is None
    return {"in_force_from_window": signed if at_once else signed + 1}
