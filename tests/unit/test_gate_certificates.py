"""Certificates can't be forged, changed, moved to other content, or signed by the wrong kind of key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidegate.core.errors import CertificateError
from tidegate.core.types import JsonObject
from tidegate.gate import KeyPair, TrustedKeys, sign_certificate, verify_certificate

ADAPTER, BASE = "a" * 64, "b" * 64


@pytest.fixture
def key(tmp_path: Path) -> KeyPair:
    return KeyPair.load_or_create(tmp_path / "gate.pem")


@pytest.fixture
def person(tmp_path: Path) -> KeyPair:
    return KeyPair.load_or_create(tmp_path / "operator.pem")


def signed(key: KeyPair, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "kind": "gate",
        "adapter_sha256": ADAPTER,
        "base_sha256": BASE,
        "policy_hash": "c" * 64,
        "decision_hash": "d" * 64,
        "issued_at": 5,
    }
    return sign_certificate(key, **(values | changes))


def check(certificate: JsonObject | None, key: KeyPair, adapter: str = ADAPTER, base: str = BASE) -> Any:
    return verify_certificate(certificate, key.public_key, adapter_sha256=adapter, base_sha256=base)


def test_a_certificate_verifies_and_is_reproducible(key: KeyPair) -> None:
    certificate = signed(key)
    assert check(certificate, key).decision_hash == "d" * 64
    assert signed(key) == certificate


def test_a_person_may_vouch_without_a_decision(key: KeyPair, person: KeyPair) -> None:
    certificate = signed(person, kind="person", policy_hash=None, decision_hash=None)
    trusted = TrustedKeys(gate=key.public_key, people=(person.public_key,))
    assert trusted.verify(certificate, adapter_sha256=ADAPTER, base_sha256=BASE).kind == "person"
    with pytest.raises(CertificateError, match="needs a policy and a decision"):
        signed(key, decision_hash=None)


def test_no_certificate_is_refused(key: KeyPair) -> None:
    with pytest.raises(CertificateError, match="there is no certificate"):
        check(None, key)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "person"),
        ("adapter_sha256", "e" * 64),
        ("base_sha256", "e" * 64),
        ("policy_hash", "e" * 64),
        ("policy_hash", None),
        ("decision_hash", "e" * 64),
        ("issued_at", 6.0),
        ("signature", "00" * 64),
        ("signature", "not hex"),
        ("signature", ""),
    ],
)
def test_a_changed_field_breaks_the_signature(key: KeyPair, field: str, value: Any) -> None:
    forged = signed(key) | {field: value}
    adapter, base = forged["adapter_sha256"], forged["base_sha256"]
    with pytest.raises(CertificateError, match="was changed after it was signed"):
        check(forged, key, adapter, base)


def test_a_certificate_of_other_content_is_refused(key: KeyPair) -> None:
    with pytest.raises(CertificateError, match=f"its adapter_sha256 is '{ADAPTER}'"):
        check(signed(key), key, adapter="f" * 64)
    with pytest.raises(CertificateError, match=f"its base_sha256 is '{BASE}'"):
        check(signed(key), key, base="f" * 64)


def test_another_key_is_refused_even_under_the_right_name(key: KeyPair, person: KeyPair) -> None:
    with pytest.raises(CertificateError, match="was signed by key"):
        check(signed(person), key)
    with pytest.raises(CertificateError, match="was changed"):
        check(signed(person) | {"signer": key.public_hex}, key)


def test_no_key_signs_for_the_other_kind(key: KeyPair, person: KeyPair) -> None:
    trusted = TrustedKeys(gate=key.public_key, people=(person.public_key,))
    for certificate in (signed(key, kind="person"), signed(person, kind="gate")):
        with pytest.raises(CertificateError, match="trusted for this kind"):
            trusted.verify(certificate, adapter_sha256=ADAPTER, base_sha256=BASE)
    assert trusted.verify(signed(key), adapter_sha256=ADAPTER, base_sha256=BASE).kind == "gate"
    with pytest.raises(CertificateError, match="trusted for this kind: \\[\\]"):
        TrustedKeys(gate=key.public_key).verify(signed(person, kind="person"), adapter_sha256=ADAPTER, base_sha256=BASE)


def test_a_gate_certificate_without_a_decision_is_refused_even_when_signed(key: KeyPair) -> None:
    from tidegate.gate.certificates import Certificate, _signed_bytes

    bare = Certificate(
        kind="gate",
        adapter_sha256=ADAPTER,
        base_sha256=BASE,
        policy_hash=None,
        decision_hash=None,
        issued_at=1.0,
        signer=key.public_hex,
    )
    forged = bare.to_json() | {"signature": key.sign(_signed_bytes(bare)).hex()}
    with pytest.raises(CertificateError, match="names no policy or no decision"):
        check(forged, key)


def test_a_signature_for_something_else_does_not_fit(key: KeyPair) -> None:
    from tidegate.core.hashing import canonical_json

    certificate = signed(key)
    payload = {name: value for name, value in certificate.items() if name != "signature"}
    certificate["signature"] = key.sign(canonical_json(payload).encode()).hex()
    with pytest.raises(CertificateError, match="was changed"):
        check(certificate, key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "god"}, "kind"),
        ({"extra": 1}, "extra"),
        ({"adapter_sha256": 7}, "adapter_sha256"),
        ({"issued_at": float("nan")}, "no JSON object"),
        ({"issued_at": object()}, "no JSON object"),
    ],
)
def test_a_malformed_certificate_is_refused(key: KeyPair, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CertificateError, match=words):
        check(signed(key) | change, key)
    short = signed(key)
    del short["issued_at"]
    with pytest.raises(CertificateError, match="issued_at"):
        check(short, key)
