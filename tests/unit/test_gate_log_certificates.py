"""A log that was written anew recomputes, but no longer fits the certificates that rest on it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gate_engine import BASE, GateWorld, adapter, sealed_traffic
from tidegate.app.gates import verify_log
from tidegate.core.audit import next_record, verify_chain
from tidegate.core.errors import AuditError, CertificateError
from tidegate.core.gate import check_certificates, verify_audit
from tidegate.core.types import AuditRecord, Release
from tidegate.gate import KeyPair, TrustedKeys, sign_certificate


@dataclass(frozen=True)
class Promoted:
    """A log with a refusal and a promotion, and the release that came of it."""

    key: KeyPair
    records: list[AuditRecord]
    release: Release

    @property
    def trusted(self) -> TrustedKeys:
        return TrustedKeys(gate=self.key.public_key, people=(self.key.public_key,))

    def signed(self, **changes: Any) -> Release:
        """The release under another certificate by the same key."""
        certificate = {name: value for name, value in (self.release.certificate or {}).items() if name in _SIGNED}
        return replace(self.release, certificate=sign_certificate(self.key, **(certificate | changes)))


_SIGNED = ("kind", "adapter_sha256", "base_sha256", "policy_hash", "decision_hash", "issued_at")


@pytest.fixture(scope="module")
def promoted(tmp_path_factory: pytest.TempPathFactory) -> Promoted:
    return asyncio.run(promote(tmp_path_factory.mktemp("keys")))


async def promote(folder: Path) -> Promoted:
    world = GateWorld(key=KeyPair.load_or_create(folder / "gate.pem"))
    await world.certify("bad", 0.1, sealed_traffic(60))
    result = await world.certify("good", 0.8, sealed_traffic(60))
    release = Release(
        id="r1",
        number=1,
        adapter_sha256=adapter("good").sha256,
        base_sha256=BASE,
        certificate=result.certificate,
        created_at=1.0,
    )
    return Promoted(key=world.key, records=list(world.audit.read()), release=release)


def rewritten(
    records: list[AuditRecord], edit: Callable[[AuditRecord], dict[str, Any]] = lambda record: {}
) -> list[AuditRecord]:
    chain: list[AuditRecord] = []
    for record in records:
        body = copy.deepcopy(dict(record.body)) | edit(record)
        chain.append(next_record(chain[-1] if chain else None, kind=record.kind, body=body, time=record.time + 1))
    return chain


def test_an_honest_log_fits_its_releases(promoted: Promoted) -> None:
    bare = Release(id="r0", number=0, adapter_sha256=None, base_sha256=BASE, certificate=None, created_at=1.0)
    by_hand = promoted.signed(kind="person", policy_hash=None, decision_hash=None)
    again = replace(promoted.release, id="r3", number=3, restores="r1")
    releases = [bare, promoted.release, replace(by_hand, id="r2", number=2), again]
    assert check_certificates(promoted.records, releases) == 2
    assert verify_log(iter(promoted.records), iter(releases), trusted=promoted.trusted)["promotions"] == 1


def test_a_log_that_was_written_anew_recomputes_but_fits_no_certificate(promoted: Promoted) -> None:
    forged = rewritten(promoted.records)
    assert verify_chain(forged) == len(forged)
    assert verify_audit(forged).promotions == 1
    with pytest.raises(AuditError, match=r"certificate of release 'r1' \(number 1\) rests on the decision"):
        verify_log(forged, [promoted.release])
    assert verify_log(forged)["promotions"] == 1


def test_a_cut_tail_is_found(promoted: Promoted) -> None:
    with pytest.raises(AuditError, match=r"release 'r1' .* the log holds no such decision"):
        verify_log(promoted.records[:-1], [promoted.release])


def test_a_certificate_must_rest_on_the_promotion_of_its_own_content(promoted: Promoted) -> None:
    refusal = next(record for record in promoted.records if record.body.get("decision") == "refuse")
    opened = next(record for record in promoted.records if record.kind == "epoch_opened")
    other = adapter("bad").sha256
    for release, words in (
        (promoted.signed(decision_hash=refusal.hash), "field 'decision' holds 'refuse'"),
        (promoted.signed(decision_hash=opened.hash), "holds no such decision"),
        (promoted.signed(policy_hash="0" * 64), "field 'policy_hash' holds"),
        (replace(promoted.release, adapter_sha256=other), f"the release is '{other}'"),
        (replace(promoted.signed(adapter_sha256=other), adapter_sha256=other), "field 'candidate_sha256' holds"),
        (replace(promoted.release, base_sha256="0" * 64), "field 'base_sha256' holds"),
        (replace(promoted.release, certificate={"kind": "gate"}), "is for adapter None"),
    ):
        with pytest.raises(AuditError, match=f"certificate of release 'r1' .*{words}"):
            check_certificates(promoted.records, [release])


def test_a_certificate_written_anew_with_its_log_lacks_the_signature(promoted: Promoted) -> None:
    forged = rewritten(promoted.records)
    certificate = dict(promoted.release.certificate or {}) | {"decision_hash": forged[-1].hash}
    release = replace(promoted.release, certificate=certificate)
    assert check_certificates(forged, [release]) == 1
    with pytest.raises(CertificateError, match="was changed after it was signed"):
        verify_log(forged, [release], trusted=promoted.trusted)
