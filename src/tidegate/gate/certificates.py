"""Certificates: signed statements that one adapter over one base may be served.

A ``gate`` certificate rests on a recorded decision, a ``person`` certificate on an operator's own key: for the
first release, for anchors, and for adapters from a fixed task set. Verifying needs no secret and no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tidegate.core.errors import CertificateError
from tidegate.core.hashing import canonical_json
from tidegate.core.types import JsonObject
from tidegate.gate.keys import KeyPair

Kind: TypeAlias = Literal["gate", "person", "break_glass"]
"""``gate`` rests on a recorded promotion, ``person`` on a person alone, ``break_glass`` on a recorded emergency."""

_DOMAIN = b"tidegate certificate v1\n"  # a signature made for anything else never fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was signed. ``decision_hash``: hash of the audit record that the statement rests on.

    ``policy_hash`` and ``decision_hash`` are None where a person vouches without a recorded decision;
    ``issued_at`` in Unix seconds; ``signature`` in hex.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    kind: Kind
    adapter_sha256: str
    base_sha256: str
    policy_hash: str | None
    decision_hash: str | None
    issued_at: float
    signer: str
    signature: str = ""

    def to_json(self) -> dict[str, Any]:
        """The form that a release holds."""
        return asdict(self)


_CERTIFICATE = TypeAdapter(Certificate)


def sign_certificate(
    key: KeyPair,
    *,
    kind: Kind,
    adapter_sha256: str,
    base_sha256: str,
    policy_hash: str | None,
    decision_hash: str | None,
    issued_at: float,
) -> dict[str, Any]:
    """Issue a certificate. The same arguments give the same bytes, so that issuing again changes nothing.

    Args:
        key: the gate's key for ``gate``, a person's for the others.
        kind: what the certificate rests on.
        adapter_sha256: content hash of the adapter.
        base_sha256: content hash of the base model.
        policy_hash: hash of the policy that was applied.
        decision_hash: hash of the audit record of the decision.
        issued_at: Unix seconds.

    Raises:
        CertificateError: a gate certificate without policy or decision, or an emergency without its record.
    """
    if kind == "break_glass" and decision_hash is None:
        raise CertificateError(f"an emergency certificate for adapter {adapter_sha256!r} needs the record of it")
    if kind == "gate" and (policy_hash is None or decision_hash is None):
        raise CertificateError(
            f"a gate certificate for adapter {adapter_sha256!r} needs a policy and a decision; "
            f"policy_hash is {policy_hash!r}, decision_hash {decision_hash!r}"
        )
    unsigned = Certificate(
        kind=kind,
        adapter_sha256=adapter_sha256,
        base_sha256=base_sha256,
        policy_hash=policy_hash,
        decision_hash=decision_hash,
        issued_at=float(issued_at),
        signer=key.public_hex,
    )
    return {**unsigned.to_json(), "signature": key.sign(_signed_bytes(unsigned)).hex()}


def verify_certificate(
    certificate: JsonObject | None, public_key: Ed25519PublicKey, *, adapter_sha256: str, base_sha256: str
) -> Certificate:
    """Check that ``certificate`` was signed with ``public_key``'s other half for exactly this content.

    Raises:
        CertificateError: it is missing, malformed, signed by another key, changed, or for other content.
    """
    parsed = parse_certificate(certificate)
    signer = public_key.public_bytes_raw().hex()
    if parsed.signer != signer:
        raise CertificateError(f"certificate was signed by key {parsed.signer!r}; key {signer!r} is accepted")
    try:
        public_key.verify(bytes.fromhex(parsed.signature), _signed_bytes(parsed))
    except (InvalidSignature, ValueError) as error:
        raise CertificateError(
            f"certificate for adapter {parsed.adapter_sha256!r} was changed after it was signed: its signature does "
            "not fit; certify the adapter again"
        ) from error
    for name, signed, wanted in (
        ("adapter_sha256", parsed.adapter_sha256, adapter_sha256),
        ("base_sha256", parsed.base_sha256, base_sha256),
    ):
        if signed != wanted:
            raise CertificateError(
                f"certificate is for other content: its {name} is {signed!r}, what should be served has {wanted!r}"
            )
    if parsed.kind == "gate" and (parsed.policy_hash is None or parsed.decision_hash is None):
        raise CertificateError(f"gate certificate for adapter {adapter_sha256!r} names no policy or no decision")
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKeys:
    """Who may sign what: the gate's keys only ``gate`` certificates, people's keys only the others.

    ``former``: keys that the gate had before and whose certificates still count.
    """

    gate: Ed25519PublicKey
    people: Sequence[Ed25519PublicKey] = ()
    former: Sequence[Ed25519PublicKey] = ()

    def verify(self, certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> Certificate:
        """Check a certificate with the keys that may sign its kind.

        Raises:
            CertificateError: as :func:`verify_certificate`, or no key of its kind is trusted.
        """
        parsed = parse_certificate(certificate)
        keys = (self.gate, *self.former) if parsed.kind == "gate" else tuple(self.people)
        by_hex: Mapping[str, Ed25519PublicKey] = {key.public_bytes_raw().hex(): key for key in keys}
        key = by_hex.get(parsed.signer)
        if key is None:
            raise CertificateError(
                f"certificate of kind {parsed.kind!r} was signed by key {parsed.signer!r}; trusted for this kind: "
                f"{sorted(by_hex)!r}"
            )
        return verify_certificate(certificate, key, adapter_sha256=adapter_sha256, base_sha256=base_sha256)


def parse_certificate(certificate: JsonObject | None) -> Certificate:
    """Read a certificate without trusting it.

    Raises:
        CertificateError: it is missing or a field is missing, unknown or of another type.
    """
    if certificate is None:
        raise CertificateError("there is no certificate; only adapters that the gate or a person certified are served")
    try:
        return _CERTIFICATE.validate_json(canonical_json(dict(certificate)))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()
        )
        raise CertificateError(f"certificate is malformed: {problems}") from error
    except (TypeError, ValueError) as error:
        raise CertificateError(f"certificate {certificate!r} is no JSON object: {error}") from error


def _signed_bytes(certificate: Certificate) -> bytes:
    payload = certificate.to_json()
    del payload["signature"]
    return _DOMAIN + canonical_json(payload).encode()
