"""What people do to the gate: how many it takes, what it changes, and that nobody is two people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate_engine import make_policy
from tidegate.app.controls import (
    Controlling,
    break_glass,
    close_epoch,
    controlling,
    freeze,
    invalidate_verifier,
    rotate_gate_key,
    sign_policy,
    trust,
    unfreeze,
)
from tidegate.app.gates import certificate_check, trusted_keys, verify_log
from tidegate.app.layout import DataDirectory
from tidegate.core.errors import AuditError, CertificateError, ConflictError, GateError, NotFoundError
from tidegate.core.gate.controls import ANCHOR_SIGNED, FREEZE, Controls
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import DECISION, EPOCH_OPENED
from tidegate.core.types import Candidate, CandidateState
from tidegate.gate.certificates import sign_certificate
from tidegate.gate.keys import KeyPair

STRICT = make_policy()
LOOSE = make_policy(ledger__alpha=0.2)
BASE, ADAPTER = "b" * 64, "a" * 64


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    return DataDirectory(root=tmp_path / "data").create()


def key(directory: DataDirectory, name: str) -> KeyPair:
    return KeyPair.load_or_create(directory.root / "people" / f"{name}.pem")


def operator(directory: DataDirectory) -> KeyPair:
    return KeyPair.load_or_create(directory.operator_key)


def two_people(controls: Controlling) -> tuple[KeyPair, KeyPair]:
    first, second = operator(controls.directory), key(controls.directory, "second")
    trust(controls, "second", second.public_hex, first)
    return first, second


def opened(controls: Controlling, number: int = 1) -> None:
    body = {
        "epoch": f"epoch-{number}",
        "number": number,
        "commitment": "c" * 64,
        "size": 50,
        "decoding": {},
        "grading": {"verifiers": {"exact": "1"}},
    }
    controls.append(EPOCH_OPENED, body)


def decided(controls: Controlling, policy: Policy, decision: str) -> str:
    """The fields of a decision that move the state; returns the record's hash."""
    body: dict[str, Any] = {
        "decision": decision,
        "policy": policy.values(),
        "policy_hash": policy.hash,
        "epoch": controls.state.epochs[-1].id if controls.state.epochs else None,
        "candidate_sha256": ADAPTER,
        "base_sha256": BASE,
        "verifiers": {"exact": "1"},
    }
    return controls.append(DECISION, body).hash


def why_not(controls: Controlling, policy: Policy) -> str:
    return controls.state.why_not_decide(policy) or "may"


def policy_file(path: Path, policy: Policy) -> Path:
    lines = [f"{name} = {_toml(value)}" for name, value in policy.values().items() if not isinstance(value, dict)]
    for section, fields in policy.values().items():
        if isinstance(fields, dict):
            lines += [f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in fields.items() if v is not None)]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_a_tighter_policy_is_in_force_at_once_and_a_looser_one_is_not(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        assert why_not(controls, LOOSE) == "may"  # nothing was in force yet
        decided(controls, LOOSE, "abstain")
        assert why_not(controls, STRICT) == "may"
        decided(controls, STRICT, "abstain")
        assert "ledger.alpha: 0.1 -> 0.2" in why_not(controls, LOOSE)
        assert "two people sign" in why_not(controls, LOOSE)


def test_two_people_let_a_looser_policy_in_with_the_next_window(directory: DataDirectory, tmp_path: Path) -> None:
    file = policy_file(tmp_path / "loose.toml", LOOSE)
    with controlling(directory) as controls:
        first, second = two_people(controls)
        opened(controls)
        decided(controls, STRICT, "refuse")
        waiting = sign_policy(controls, file, first)
        assert waiting["waiting_for_people"] == 1
        assert "two people" in why_not(controls, LOOSE)
        with pytest.raises(ConflictError, match="another person has to"):
            sign_policy(controls, file, first)
    with controlling(directory) as controls:  # the first signature waited on disk
        signed = sign_policy(controls, file, second)
        assert signed["in_force_from_window"] == 2
        assert not list(directory.statements.glob("*.json"))
        assert "takes effect with window 2" in why_not(controls, LOOSE)
        assert why_not(controls, STRICT) == "may"
        while controls.state.window is not None and controls.state.window.window == 1:
            if controls.state.epochs[-1].closed:
                opened(controls, len(controls.state.epochs) + 1)
            decided(controls, STRICT, "refuse")
        assert why_not(controls, LOOSE) == "may"
        decided(controls, LOOSE, "abstain")
        assert why_not(controls, LOOSE) == "may"
        with pytest.raises(ConflictError, match="nowhere looser"):
            sign_policy(controls, file, first)


def test_one_person_is_not_two(directory: DataDirectory, tmp_path: Path) -> None:
    with controlling(directory) as controls:
        first, second = two_people(controls)
        puppet = key(directory, "puppet")
        with pytest.raises(GateError, match="is none of those whom this gate trusts"):
            trust(controls, "puppet", puppet.public_hex, puppet)
        assert trust(controls, "puppet", puppet.public_hex, first)["waiting_for_people"] == 1
        decided(controls, STRICT, "abstain")
        with pytest.raises(GateError, match="none of those"):
            sign_policy(controls, policy_file(tmp_path / "loose.toml", LOOSE), puppet)
        assert "recorded" in trust(controls, "puppet", puppet.public_hex, second)
        assert set(controls.state.controls.people.values()) == {"operator", "second", "puppet"}
        with pytest.raises(ConflictError, match="trusted already"):
            trust(controls, "second", key(directory, "other").public_hex, first)


def test_a_waiting_signature_that_was_changed_counts_for_nothing(directory: DataDirectory, tmp_path: Path) -> None:
    file = policy_file(tmp_path / "loose.toml", LOOSE)
    with controlling(directory) as controls:
        first, second = two_people(controls)
        decided(controls, STRICT, "abstain")
        sign_policy(controls, file, first)
        (waiting,) = directory.statements.glob("*.json")
        waiting.write_text(waiting.read_text().replace(first.public_hex, key(directory, "x").public_hex))
        with pytest.raises(CertificateError, match="does not verify"):
            sign_policy(controls, file, second)
        waiting.write_text("{")
        with pytest.raises(GateError, match="cannot be read"):
            sign_policy(controls, file, second)
        assert not controls.state.controls.signed_policies


def test_anybody_may_freeze_and_a_triggers_freeze_takes_two_to_lift(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        first, second = two_people(controls)
        freeze(controls, "looks odd")
        assert "frozen since audit record" in why_not(controls, STRICT)
        assert "a person signs" in why_not(controls, STRICT)
        assert "recorded" in unfreeze(controls, first)
        with pytest.raises(NotFoundError, match="not frozen"):
            unfreeze(controls, first)
        controls.append(FREEZE, {"reason": "two rollbacks in one window", "trigger": 5})
        freeze(controls, "a person's freeze does not weaken it")
        assert "two people sign" in why_not(controls, STRICT)
        assert unfreeze(controls, first)["waiting_for_people"] == 1
        assert "recorded" in unfreeze(controls, second)
        assert why_not(controls, STRICT) == "may"


def test_a_signature_for_one_freeze_lifts_no_other(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        first, second = two_people(controls)
        controls.append(FREEZE, {"reason": "one", "trigger": 4})
        unfreeze(controls, first)
        unfreeze(controls, second)
        controls.append(FREEZE, {"reason": "another", "trigger": 4})
        lifted = next(record for record in controls.records if record.kind == "unfreeze")
        with pytest.raises(AuditError, match="the freeze that stands"):
            controls.append("unfreeze", lifted.body)


def test_breaking_the_glass_is_logged_ends_and_stops_promotions_until_the_anchor_is_signed(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = Candidate(
        id="cand-aaaaaaaa",
        adapter_sha256=ADAPTER,
        base_sha256=BASE,
        manifest_hash=None,
        parent_sha256=None,
        state=CandidateState.PROPOSED,
        created_at=1.0,
        origin="test",
    )
    with controlling(directory) as controls:
        opened(controls)
        decided(controls, STRICT, "promote")
        assert controls.state.ledger(STRICT).promotions == 1
        now = controls.now()
        monkeypatch.setattr("tidegate.app.controls.time.time", lambda: now)
        certificate = break_glass(controls, candidate, "the champion insults people", operator(directory))
        assert controls.state.ledger(STRICT).promotions == 0
        assert "glass was broken" in why_not(controls, STRICT)
        check = certificate_check(directory, controls.stores.audit)
        clock = [now + 3600.0]
        monkeypatch.setattr("tidegate.app.gates.time.time", lambda: clock[0])
        check(certificate, adapter_sha256=ADAPTER, base_sha256=BASE)
        with pytest.raises(CertificateError, match="other content"):
            check(certificate, adapter_sha256="c" * 64, base_sha256=BASE)
        forged = {**certificate, "decision_hash": "0" * 64}
        with pytest.raises(CertificateError, match="was changed after it was signed"):
            check(forged, adapter_sha256=ADAPTER, base_sha256=BASE)
        monkeypatch.setattr("tidegate.app.controls.time.time", lambda: now + 25 * 3600.0)
        controls.sign(ANCHOR_SIGNED, {"release": "r1", "adapter_sha256": None}, operator(directory))
        assert why_not(controls, STRICT) == "may"
        with pytest.raises(CertificateError, match="ended at"):  # although the clock was set back
            check(certificate, adapter_sha256=ADAPTER, base_sha256=BASE)


def gate_certificate(directory: DataDirectory, decision_hash: str) -> dict[str, Any]:
    return sign_certificate(
        KeyPair.load_or_create(directory.gate_key),
        kind="gate",
        adapter_sha256=ADAPTER,
        base_sha256=BASE,
        policy_hash=STRICT.hash,
        decision_hash=decision_hash,
        issued_at=1.0,
    )


def test_a_certificate_falls_with_its_verifier_and_the_epoch_closes(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        check = certificate_check(directory, controls.stores.audit)
        opened(controls)
        certificate = gate_certificate(directory, decided(controls, STRICT, "promote"))
        check(certificate, adapter_sha256=ADAPTER, base_sha256=BASE)
        opened(controls, 2)
        invalidate_verifier(controls, "exact", "0", "another version", operator(directory))
        check(certificate, adapter_sha256=ADAPTER, base_sha256=BASE)
        assert controls.state.epochs[-1].closed is None
        invalidate_verifier(controls, "exact", "1", "praises nonsense", operator(directory))
        with pytest.raises(CertificateError, match=r"is void: it rests on \[\('exact', '1'\)\]"):
            check(certificate, adapter_sha256=ADAPTER, base_sha256=BASE)
        assert "was invalidated" in str(controls.state.epochs[-1].closed)


def test_a_certificate_must_rest_on_a_promotion_of_this_log(directory: DataDirectory, tmp_path: Path) -> None:
    with controlling(directory) as controls:
        opened(controls)
        refusal = decided(controls, STRICT, "refuse")
        check = certificate_check(directory, controls.stores.audit)
        for ground in (refusal, "0" * 64):
            with pytest.raises(CertificateError, match="holds no such promotion"):
                check(gate_certificate(directory, ground), adapter_sha256=ADAPTER, base_sha256=BASE)
        promotion = decided(controls, STRICT, "promote")
        check(gate_certificate(directory, promotion), adapter_sha256=ADAPTER, base_sha256=BASE)
        other = replace(STRICT, name="other")
        wrong = {**gate_certificate(directory, promotion)}
        wrong = sign_certificate(
            KeyPair.load_or_create(directory.gate_key),
            kind="gate",
            adapter_sha256=ADAPTER,
            base_sha256=BASE,
            policy_hash=other.hash,
            decision_hash=promotion,
            issued_at=1.0,
        )
        with pytest.raises(CertificateError, match="rests on a record of"):
            check(wrong, adapter_sha256=ADAPTER, base_sha256=BASE)


@pytest.mark.parametrize("revoke", [False, True])
def test_a_rotated_key_keeps_its_certificates_unless_it_is_revoked(directory: DataDirectory, revoke: bool) -> None:
    with controlling(directory) as controls:
        opened(controls)
        old = gate_certificate(directory, decided(controls, STRICT, "promote"))
        opened(controls, 2)
        rotated = rotate_gate_key(controls, operator(directory), revoke=revoke)
        assert rotated["public_key"] == KeyPair.load(directory.gate_key).public_hex != rotated["previous"]
        assert controls.state.epochs[-1].closed == "the gate's key was rotated"
        check = certificate_check(directory, controls.stores.audit)
        if revoke:
            with pytest.raises(CertificateError, match="trusted for this kind"):
                check(old, adapter_sha256=ADAPTER, base_sha256=BASE)
        else:
            check(old, adapter_sha256=ADAPTER, base_sha256=BASE)


def test_an_open_epoch_can_be_closed_once(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        with pytest.raises(NotFoundError, match="no epoch is open"):
            close_epoch(controls, "why not")
        opened(controls)
        close_epoch(controls, "its grading changed")
        assert controls.state.open_epoch(STRICT) is None
        with pytest.raises(NotFoundError, match="no epoch is open"):
            close_epoch(controls, "again")


def test_a_record_signed_by_too_few_or_by_strangers_does_not_fold(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        first, _ = two_people(controls)
        controls.append(FREEZE, {"reason": "x", "trigger": 5})
        unfreeze(controls, first)
        seq = controls.records[-1].seq
        statement = {"signer": first.public_hex, "signed_at": 1.0, "signature": "00"}
        for statements, words in (
            ([statement], "signed by 1 of 2 people"),
            ([statement, statement], "signed by 1 of 2 people"),
            ([statement, {**statement, "signer": "f" * 64}], "trusted are"),
            ([], "signed by 0 of 2 people"),
        ):
            with pytest.raises(AuditError, match=words):
                controls.append("unfreeze", {"freeze_seq": seq, "statements": statements})
        assert controls.state.controls.frozen is not None


def test_verifying_the_log_checks_every_persons_signature(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        two_people(controls)
        freeze(controls, "x")
        unfreeze(controls, operator(directory))
        log = list(controls.stores.audit.read())
        trusted = trusted_keys(directory, controls.state.controls)
        assert verify_log(log, trusted=trusted)["records"] == 4
        frozen = next(record for record in log if record.kind == FREEZE)
        forged = {"signer": operator(directory).public_hex, "signed_at": 1.0, "signature": "00" * 64}
        controls.append(FREEZE, {"reason": "y", "trigger": None})
        body = {"freeze_seq": frozen.seq + 2, "statements": [forged]}
        controls.stores.audit.append("unfreeze", body, time=controls.now())
        with pytest.raises(AuditError, match=r"record 6 \(unfreeze\): a statement .* does not verify"):
            verify_log(controls.stores.audit.read(), trusted=trusted)


def test_nothing_is_in_force_before_the_first_decision() -> None:
    assert Controls().why_not(LOOSE, window=1, looks_taken=0) is None
