"""Whether a certificate still stands: signed by a key that counts, resting on a record of this log, not void.

A signature alone outlives what it was given for. The log says the rest: that the promotion was really decided, that
nobody has withdrawn trust from the verifier behind it or from the key, and when an emergency ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.core.audit import GENESIS_HASH, check_link
from tidegate.core.errors import AuditError, CertificateError, VoidCertificateError
from tidegate.core.gate.controls import BREAK_GLASS, CANDIDATE_SIGNED, Controls
from tidegate.core.gate.state import DECISION, GateState, fold
from tidegate.core.types import AuditRecord, JsonObject
from tidegate.gate.certificates import Certificate, TrustedKeys
from tidegate.ports import AuditLog


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """What a certificate may rest on: a promotion; a person's signature or an emergency, which have no policy."""

    adapter_sha256: str
    base_sha256: str
    policy_hash: str | None
    verifiers: tuple[tuple[str, str], ...]


class Standing:
    """Checks certificates against a log, of which it reads each record once.

    Args:
        audit: the log.
        trusted: keys that count under given controls.
        clock: Unix seconds; time that the log has seen is never taken back.
    """

    def __init__(
        self, audit: AuditLog, trusted: Callable[[Controls], TrustedKeys], *, clock: Callable[[], float]
    ) -> None:
        self._audit = audit
        self._trusted = trusted
        self._clock = clock
        self._state = GateState()
        self._seq = 0
        self._head = GENESIS_HASH
        self._latest = 0.0
        self._grounds: dict[str, _Ground] = {}
        self._one_at_a_time = threading.Lock()

    def check(self, certificate: JsonObject | None, *, adapter_sha256: str, base_sha256: str) -> None:
        """Refuse what may not be served.

        Raises:
            VoidCertificateError: its verifier was invalidated, or it was for an emergency that has ended.
            CertificateError: no certificate, another key or other content, a record that the log does not hold, or
                a log that was changed.
        """
        with self._one_at_a_time:
            self._read_on()
            controls = self._state.controls
            parsed = self._trusted(controls).verify(certificate, adapter_sha256=adapter_sha256, base_sha256=base_sha256)
            ground = self._ground(parsed)
            _check_verifiers(parsed, ground, controls)
            if parsed.kind == "break_glass":
                self._check_not_ended(parsed, controls)

    def _read_on(self) -> None:
        try:
            for record in self._audit.read(after_seq=self._seq):
                check_link(record, seq=self._seq, prev_hash=self._head)
                self._state = fold(self._state, record)
                ground = _ground_of(record)
                if ground is not None:
                    self._grounds[record.hash] = ground
                self._seq, self._head, self._latest = record.seq, record.hash, max(self._latest, record.time)
        except AuditError as error:
            raise CertificateError(
                f"no certificate can be checked: the audit log was changed ({error}). Restore it from a backup; "
                "'tidegate audit verify' tells whether it is whole"
            ) from error

    def _ground(self, parsed: Certificate) -> _Ground:
        ground = self._grounds.get(str(parsed.decision_hash))
        if ground is None:
            what = {"gate": "promotion", "person": "signature", "break_glass": "emergency"}[parsed.kind]
            raise CertificateError(
                f"certificate for adapter {parsed.adapter_sha256!r} rests on record {parsed.decision_hash!r}; this log "
                f"holds no such {what}: the certificate belongs to another data directory, or the log was cut"
            )
        found = (ground.adapter_sha256, ground.base_sha256, ground.policy_hash)
        if found != (parsed.adapter_sha256, parsed.base_sha256, parsed.policy_hash):
            raise CertificateError(
                f"certificate for adapter {parsed.adapter_sha256!r} over base {parsed.base_sha256!r} under policy "
                f"{parsed.policy_hash!r} rests on a record of {found!r}"
            )
        return ground

    def _check_not_ended(self, parsed: Certificate, controls: Controls) -> None:
        ends = controls.break_glass.get(parsed.adapter_sha256, 0.0)
        now = max(self._clock(), self._latest)
        if now >= ends:
            raise VoidCertificateError(
                f"the emergency certificate for adapter {parsed.adapter_sha256!r} ended at {ends:.0f}, and it is "
                f"{now:.0f}: have the adapter certified, or break the glass again",
                fallback="previous",
            )


def _check_verifiers(parsed: Certificate, ground: _Ground, controls: Controls) -> None:
    void = sorted(set(ground.verifiers) & controls.invalidated)
    if void:
        raise VoidCertificateError(
            f"certificate for adapter {parsed.adapter_sha256!r} is void: it rests on {void!r}, which people have "
            "invalidated; have the adapter certified again with a verifier that is believed"
        )


def _ground_of(record: AuditRecord) -> _Ground | None:
    body = record.body
    if record.kind == DECISION and body["decision"] == "promote":
        return _Ground(
            adapter_sha256=body["candidate_sha256"],
            base_sha256=body["base_sha256"],
            policy_hash=body["policy_hash"],
            verifiers=tuple(sorted(body["verifiers"].items())),
        )
    if record.kind in (BREAK_GLASS, CANDIDATE_SIGNED):
        return _Ground(
            adapter_sha256=body["adapter_sha256"],
            base_sha256=body["base_sha256"],
            policy_hash=None,
            verifiers=(),
        )
    return None
