"""Keys, certificates, policy and audit log of a data directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import UnionType

from tidegate.app.layout import DataDirectory
from tidegate.artifacts import read_json, write_atomically
from tidegate.config import Settings
from tidegate.core.errors import AuditError, CertificateError, ConfigError
from tidegate.core.gate.controls import Controls
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.verify import check_certificates, verify_audit
from tidegate.core.hashing import canonical_json
from tidegate.core.types import AuditRecord, JsonObject, Release
from tidegate.gate import load_policy, self_test
from tidegate.gate.certificates import TrustedKeys
from tidegate.gate.keys import KeyPair, public_key_from_hex
from tidegate.gate.standing import Standing
from tidegate.gate.statements import check_statements
from tidegate.ports import AuditLog
from tidegate.release import CertificateCheck


def build_policy(settings: Settings) -> Policy:
    """The policy that the settings name; the strict one that ships by default."""
    return load_policy(settings.policy)


def gate_self_test(settings: Settings) -> str:
    """Run the gate's own test; GateError when it is not the gate that the golden numbers describe."""
    self_test(build_policy(settings))
    return "golden numbers met, A/A pair not promoted, degraded pair refused"


def trusted_keys(directory: DataDirectory, controls: Controls | None = None) -> TrustedKeys:
    """The keys that count in a data directory: those that the log names, before that its own, made on first use.

    Args:
        directory: where the keys lie.
        controls: what the log says: people who were introduced, and earlier keys of the gate.
    """
    known = controls or Controls()
    people = known.people or {KeyPair.load_or_create(directory.operator_key).public_hex: "operator"}
    own = KeyPair.load_or_create(directory.gate_key).public_hex if known.gate_key is None else known.gate_key
    return TrustedKeys(
        gate=public_key_from_hex(own),
        people=tuple(public_key_from_hex(key) for key in people),
        former=tuple(public_key_from_hex(key) for key in known.former_gate_keys),
    )


def check_keys(directory: DataDirectory) -> str:
    """Read every secret; ConfigError names the first one that others can read or that is damaged."""
    trusted_keys(directory)
    directory.split_key()
    directory.admin_token()
    return "present, readable by their owner alone"


def certificate_check(directory: DataDirectory, audit: AuditLog) -> CertificateCheck:
    """What the publisher asks before it loads anything."""
    standing = Standing(audit, lambda controls: trusted_keys(directory, controls), clock=time.time)
    return standing.check


def save_certificate(directory: DataDirectory, certificate: JsonObject) -> None:
    """Keep a certificate under its adapter's hash."""
    path = directory.certificates / f"{certificate['adapter_sha256']}.json"
    write_atomically(path, (canonical_json(dict(certificate)) + "\n").encode())


def certificate_of(directory: DataDirectory, adapter_sha256: str) -> JsonObject | None:
    """The certificate of an adapter, if one was ever issued.

    Raises:
        CertificateError: the file is damaged.
    """
    path = directory.certificates / f"{adapter_sha256}.json"
    if not path.exists():
        return None
    try:
        return read_json(path, "certificate")
    except ConfigError as error:
        raise CertificateError(str(error)) from error


def verify_log(
    records: Iterable[AuditRecord], releases: Iterable[Release] = (), *, trusted: TrustedKeys | None = None
) -> JsonObject:
    """Recompute chain and decisions, and compare them with the certificates of ``releases``.

    Args:
        records: the whole log.
        releases: what was released; each gate certificate must name the decision that promoted its content.
        trusted: keys to check the certificates' signatures with; without them a certificate that was written anew
            together with the log is not found.

    Raises:
        AuditError: at the first difference, or a person's signature does not verify.
        CertificateError: a release's certificate was not signed by a trusted key.
    """
    log, released = list(records), list(releases)
    report = verify_audit(log)
    check_certificates(log, released)
    check_statements(log)
    for release in released:
        if trusted is not None and release.certificate is not None and release.adapter_sha256 is not None:
            trusted.verify(release.certificate, adapter_sha256=release.adapter_sha256, base_sha256=release.base_sha256)
    return asdict(report)


def read_audit_file(path: Path) -> Iterator[AuditRecord]:
    """Records of an exported log.

    Raises:
        AuditError: the file is missing, or a line is not a record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"audit log {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield _record(AuditRecord(**json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise AuditError(f"{path}:{number}: not an audit record: {error}") from error


_FIELDS: Mapping[str, tuple[type | UnionType, str]] = {
    "seq": (int, "a whole number"),
    "prev_hash": (str, "text"),
    "time": (int | float, "a number"),
    "kind": (str, "text"),
    "body": (dict, "an object"),
    "hash": (str, "text"),
}


def _record(read: AuditRecord) -> AuditRecord:
    """``read`` itself; TypeError where a field has another type than records have."""
    for name, (accepted, words) in _FIELDS.items():
        value = getattr(read, name)
        if not isinstance(value, accepted):
            raise TypeError(f"{name} = {value!r:.80}; {words} is accepted")
    return read
