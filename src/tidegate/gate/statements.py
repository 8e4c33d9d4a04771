"""What people sign beside certificates: a kind of audit record and its fields, with an Ed25519 key of their own.

Source: RFC 8032 (Ed25519).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tidegate.core.errors import AuditError, CertificateError
from tidegate.core.gate.controls import SIGNED, STATEMENTS, subject_of
from tidegate.core.hashing import canonical_json
from tidegate.core.types import AuditRecord, JsonObject
from tidegate.gate.keys import KeyPair

_DOMAIN = b"tidegate statement v1\n"  # a signature made for anything else never fits
_PERSON_DOMAIN = b"tidegate person v1\n"
_KEY_BYTES = 32


def sign_statement(key: KeyPair, *, kind: str, subject: JsonObject, signed_at: float) -> dict[str, Any]:
    """A person's signature under the fields of a record of ``kind``, at ``signed_at`` (Unix seconds)."""
    signature = key.sign(_signed_bytes(kind, subject, float(signed_at)))
    return {"signer": key.public_hex, "signed_at": float(signed_at), "signature": signature.hex()}


def check_statement(statement: JsonObject, *, kind: str, subject: JsonObject) -> None:
    """Check that a statement was signed by the key that it names for just these fields.

    Raises:
        CertificateError: it is malformed, or the signature does not fit.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(statement["signer"]))
        key.verify(bytes.fromhex(statement["signature"]), _signed_bytes(kind, subject, float(statement["signed_at"])))
    except (InvalidSignature, KeyError, TypeError, ValueError) as error:
        raise CertificateError(
            f"a statement for {kind!r} by {statement.get('signer')!r} does not verify ({type(error).__name__}): it was "
            "changed after it was signed, or signed for something else; sign again"
        ) from error


def check_statements(records: Iterable[AuditRecord]) -> int:
    """Check every signature that the records of a log carry; how many there were.

    Raises:
        AuditError: at the first one that does not verify; the message names the record.
    """
    checked = 0
    for record in records:
        if record.kind not in SIGNED:
            continue
        for statement in record.body[STATEMENTS]:
            try:
                check_statement(statement, kind=record.kind, subject=subject_of(record.body))
            except CertificateError as error:
                raise AuditError(f"audit record {record.seq} ({record.kind}): {error}") from error
            checked += 1
    return checked


def introduction(key: KeyPair) -> str:
    """What a person hands over to be trusted: the public key, and a signature as proof of the private one."""
    return key.public_hex + key.sign(_PERSON_DOMAIN + bytes.fromhex(key.public_hex)).hex()


def read_introduction(text: str) -> str:
    """The public key (64 hex digits, lower case) of an introduction.

    Raises:
        CertificateError: it is no introduction, or was mistyped.
    """
    try:
        raw = bytes.fromhex(text.strip())
        public, signature = raw[:_KEY_BYTES], raw[_KEY_BYTES:]
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _PERSON_DOMAIN + public)
    except (InvalidSignature, ValueError) as error:
        raise CertificateError(
            f"{text[:16]!r}... is no introduction; the 192 hex digits that 'tidegate gate keygen' printed are accepted"
        ) from error
    return public.hex()


def _signed_bytes(kind: str, subject: JsonObject, signed_at: float) -> bytes:
    return _DOMAIN + canonical_json({"kind": kind, "subject": dict(subject), "signed_at": signed_at}).encode()
