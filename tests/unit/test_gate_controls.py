"""What people do to the gate: how many it takes, what it changes, and that nobody is two people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate_engine import make_policy
from tidegate.app.controls import (
    Controlling,
    close_epoch,
    controlling,
    emergency_certificate,
    first_certificate,
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
from tidegate.core.gate.controls import (
    ANCHOR_SIGNED,
    FREEZE,
    GATE_KEY_ROTATED,
    VERIFIER_REVIEWED,
    Controls,
    fold_controls,
)
from tidegate.core.gate.live_state import LiveState
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.state import DECISION, EPOCH_OPENED, GateState
from tidegate.core.types import AuditRecord, Candidate, CandidateState
from tidegate.gate.certificates import sign_certificate
from tidegate.gate.keys import KeyPair
from tidegate.gate.statements import introduction

STRICT = make_policy()
LOOSE = make_policy(ledger__alpha=0.2)
BASE, ADAPTER = "b" * 64, "a" * 64
CANDIDATE = Candidate(
    id="cand-aaaaaaaa",
    adapter_sha256=ADAPTER,
    base_sha256=BASE,
    manifest_hash=None,
    parent_sha256=None,
    state=CandidateState.PROPOSED,
    created_at=1.0,
    origin="test",
)


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    return DataDirectory(root=tmp_path / "data").create()


def key(directory: DataDirectory, name: str) -> KeyPair:
    return KeyPair.load_or_create(directory.root / "people" / f"{name}.pem")


def operator(directory: DataDirectory) -> KeyPair:
    return KeyPair.load_or_create(directory.operator_key)


def two_people(controls: Controlling) -> tuple[KeyPair, KeyPair]:
    first, second = operator(controls.directory), key(controls.directory, "second")
    trust(controls, "second", introduction(second), first)
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
            trust(controls, "puppet", introduction(puppet), puppet)
        assert trust(controls, "puppet", introduction(puppet), first)["waiting_for_people"] == 1
        decided(controls, STRICT, "abstain")
        with pytest.raises(GateError, match="none of those"):
            sign_policy(controls, policy_file(tmp_path / "loose.toml", LOOSE), puppet)
        assert "recorded" in trust(controls, "puppet", introduction(puppet), second)
        assert set(controls.state.controls.people.values()) == {"operator", "second", "puppet"}
        with pytest.raises(ConflictError, match="trusted already"):
            trust(controls, "second", introduction(key(directory, "other")), first)


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
    candidate = CANDIDATE
    with controlling(directory) as controls:
        opened(controls)
        decided(controls, STRICT, "promote")
        assert controls.state.ledger(STRICT).promotions == 1
        now = controls.now()
        monkeypatch.setattr("tidegate.app.controls.time.time", lambda: now)
        certificate = emergency_certificate(controls, candidate, "the champion insults people", operator(directory))
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
        with pytest.raises(NotFoundError, match=r"'exact' '0' scored nothing here; these did: \[\('exact', '1'\)\]"):
            invalidate_verifier(controls, "exact", "0", "a slip of the pen", operator(directory))
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


def test_a_signature_lets_a_looser_policy_in_once(directory: DataDirectory, tmp_path: Path) -> None:
    file = policy_file(tmp_path / "loose.toml", LOOSE)
    with controlling(directory) as controls:
        first, second = two_people(controls)
        decided(controls, STRICT, "abstain")
        sign_policy(controls, file, first)
        assert sign_policy(controls, file, second)["in_force_from_window"] == 1  # nothing was looked at in it yet
        decided(controls, LOOSE, "abstain")
        decided(controls, STRICT, "abstain")
        assert "two people sign" in why_not(controls, LOOSE)


def test_judgements_of_a_verifier_add_up_and_count_once(directory: DataDirectory) -> None:
    def reviewed(controls: Controlling, agree: dict[str, bool]) -> None:
        subject = {"epoch": "epoch-1", "verifier": "exact", "version": "1", "agree": agree}
        controls.sign(VERIFIER_REVIEWED, subject, operator(directory))

    with controlling(directory) as controls:
        decided(controls, STRICT, "abstain")
        opened(controls)
        reviewed(controls, {f"t{number}": False for number in range(9)})
        assert not controls.state.controls.invalidated  # ten are needed
        with pytest.raises(AuditError, match="were reviewed before"):
            reviewed(controls, {"t8": True, "t9": True})
        reviewed(controls, {"t9": True})
        assert controls.state.controls.invalidated == {("exact", "1")}
        assert "was invalidated" in str(controls.state.epochs[-1].closed)
        assert controls.state.controls.disbelieved({"exact": "1", "other": "1"}) == ("'exact' '1'",)


def test_an_introduction_shows_that_its_key_is_held(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        given = introduction(key(directory, "second"))
        for wrong in (given[:64], given[:-2] + "00", "zz", key(directory, "x").public_hex + given[64:]):
            with pytest.raises(CertificateError, match="is no introduction"):
                trust(controls, "second", wrong, operator(directory))
        with pytest.raises(ConflictError, match="no name"):
            trust(controls, " ", given, operator(directory))
        trust(controls, "second", given.upper(), operator(directory))
        freeze(controls, "x")
        assert "recorded" in unfreeze(controls, key(directory, "second"))


def test_a_rotation_that_died_is_finished_and_a_key_can_still_be_revoked(directory: DataDirectory) -> None:
    def record(controls: Controlling, *, revoked: bool) -> dict[str, Any]:
        new = KeyPair.load_or_create(directory.next_gate_key).public_hex
        old = KeyPair.load_or_create(directory.gate_key).public_hex
        subject = {"previous": old, "public_key": new, "revoked": revoked}
        controls.sign(GATE_KEY_ROTATED, subject, operator(directory))
        return subject

    with controlling(directory) as controls:
        opened(controls)
        old = gate_certificate(directory, decided(controls, STRICT, "promote"))
        before = record(controls, revoked=False)  # and dies
        check = certificate_check(directory, controls.stores.audit)
        check(old, adapter_sha256=ADAPTER, base_sha256=BASE)
        assert trusted_keys(directory, controls.state.controls).gate.public_bytes_raw().hex() == before["public_key"]
    with controlling(directory) as controls:
        assert KeyPair.load(directory.gate_key).public_hex == before["public_key"]
        assert not directory.next_gate_key.exists()
        after = rotate_gate_key(controls, operator(directory), revoke=True)
        assert after["previous"] == before["public_key"]
        assert controls.state.controls.former_gate_keys == (before["previous"],)


def test_a_key_whose_rotation_is_repeated_as_revoked_counts_no_more() -> None:
    def rotated(seq: int, *, revoked: bool) -> AuditRecord:
        body = {"previous": "a" * 64, "public_key": "b" * 64, "revoked": revoked, "statements": [{"signer": "p"}]}
        return AuditRecord(seq=seq, prev_hash="", time=0.0, kind=GATE_KEY_ROTATED, body=body, hash="")

    controls = fold_controls(Controls(people={"p": "operator"}), rotated(1, revoked=False), window=1)
    assert controls.former_gate_keys == ("a" * 64,)
    assert fold_controls(controls, rotated(2, revoked=True), window=1).former_gate_keys == ()


def test_a_persons_certificate_rests_on_their_signature_in_the_log(directory: DataDirectory) -> None:
    candidate = replace(CANDIDATE, state=CandidateState.PROPOSED)
    with controlling(directory) as controls:
        check = certificate_check(directory, controls.stores.audit)
        certificate = first_certificate(controls, candidate, operator(directory))
        check(certificate, adapter_sha256=ADAPTER, base_sha256=BASE)
        assert first_certificate(controls, candidate, operator(directory)) == certificate
        unsaid = sign_certificate(
            operator(directory),
            kind="person",
            adapter_sha256=ADAPTER,
            base_sha256=BASE,
            policy_hash=None,
            decision_hash=None,
            issued_at=1.0,
        )
        with pytest.raises(CertificateError, match="holds no such signature"):
            check(unsaid, adapter_sha256=ADAPTER, base_sha256=BASE)


def test_what_was_refused_is_served_in_no_emergency(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        opened(controls)
        decided(controls, STRICT, "refuse")  # and dies before the candidate is moved
        with pytest.raises(ConflictError, match="and was refused"):
            emergency_certificate(controls, CANDIDATE, "x", operator(directory))


def test_an_emergency_that_died_before_it_was_served_is_gone_on_with(directory: DataDirectory) -> None:
    with controlling(directory) as controls:
        certificate = emergency_certificate(controls, CANDIDATE, "x", operator(directory))
        certified = replace(CANDIDATE, state=CandidateState.CERTIFIED)
        assert emergency_certificate(controls, certified, "x", operator(directory)) == certificate
        assert [record.kind for record in controls.records].count("break_glass") == 1


def test_a_freeze_that_a_trigger_asked_for_holds_before_it_is_written() -> None:
    state = replace(GateState(), live=replace(LiveState(), freeze_due=(5, "two rollbacks in one window")))
    assert "trigger 5 stops learning" in str(state.why_not_decide(STRICT))


def test_nothing_is_in_force_before_the_first_decision() -> None:
    assert Controls().why_not(LOOSE, window=1, looks_taken=0) is None
