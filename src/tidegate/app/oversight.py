"""The commands with which people oversee the gate of a data directory, one function a command. Returns plain data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.app import controls as c
from tidegate.app.gates import build_policy, certificate_check, save_certificate
from tidegate.app.operations import existing, publishing
from tidegate.app.reviews import review_items, take_review, write_items
from tidegate.config import Settings
from tidegate.core.errors import ConfigError, ConflictError, NotFoundError, VoidCertificateError
from tidegate.core.gate.controls import ANCHOR_SIGNED
from tidegate.core.types import CandidateState, JsonObject
from tidegate.release import ANCHOR, BARE_BASE, CHAMPION
from tidegate.release.records import release_behind
from tidegate.signals import builtin_verifiers


def gate_status(settings: Settings) -> JsonObject:
    """Where the gate stands: what is in force, what is spent, what waits."""
    directory = existing(settings)
    policy = build_policy(settings)
    with c.controlling(directory) as controls:
        state = controls.state
        ledger = state.ledger(policy)
        known = state.controls
        epoch = state.epochs[-1] if state.epochs else None
        return {
            "policy": {"name": policy.name, "hash": policy.hash, "looser_than_in_force": list(known.looser(policy))},
            "may_decide": state.why_not_decide(policy) or "yes",
            "window": {"number": ledger.window, "look": ledger.look, "promotions": ledger.promotions},
            "level": ledger.level,
            "epoch": None
            if epoch is None
            else {"id": epoch.id, "tasks": epoch.size, "looks": epoch.looks, "closed": epoch.closed},
            "frozen": None if known.frozen is None else known.frozen.reason,
            "people": {name: key for key, name in known.people.items()},
            "invalidated_verifiers": [list(pair) for pair in sorted(known.invalidated)],
            "anchor_review": known.anchor_review,
            "emergencies": {sha256[:12]: ends for sha256, ends in known.break_glass.items() if ends > controls.now()},
            "waiting_for_signatures": _waiting(directory.statements),
        }


def sign_policy_file(settings: Settings, policy: Path, key: Path | None) -> JsonObject:
    """Sign a looser policy."""
    directory = existing(settings)
    with c.controlling(directory) as controls:
        return c.sign_policy(controls, policy, c.key_of(directory, key))


def freeze_learning(settings: Settings, reason: str) -> JsonObject:
    """Stop learning."""
    with c.controlling(existing(settings)) as controls:
        return c.freeze(controls, reason)


def unfreeze_learning(settings: Settings, key: Path | None) -> JsonObject:
    """Sign that learning goes on."""
    directory = existing(settings)
    with c.controlling(directory) as controls:
        return c.unfreeze(controls, c.key_of(directory, key))


def trust_person(settings: Settings, name: str, introduction: str, key: Path | None) -> JsonObject:
    """Introduce a person."""
    directory = existing(settings)
    with c.controlling(directory) as controls:
        return c.trust(controls, name, introduction, c.key_of(directory, key))


def rotate_key(settings: Settings, key: Path | None, *, revoke: bool) -> JsonObject:
    """Give the gate a new key."""
    directory = existing(settings)
    with c.controlling(directory) as controls:
        return c.rotate_gate_key(controls, c.key_of(directory, key), revoke=revoke)


def close_open_epoch(settings: Settings, reason: str) -> JsonObject:
    """Close the open sealed set."""
    with c.controlling(existing(settings)) as controls:
        return c.close_epoch(controls, reason)


async def review_epoch(
    settings: Settings, out: Path | None, take: Path | None, epoch: str | None, key: Path | None
) -> JsonObject:
    """Write items for a person to judge, or record what they judged.

    Raises:
        ConfigError: not exactly one of ``out`` and ``take`` is given.
    """
    if (out is None) == (take is None):
        raise ConfigError("give either --out FILE, to write items, or --take FILE, to record what it holds")
    directory = existing(settings)
    with c.controlling(directory) as controls:
        if out is not None:
            items = review_items(controls, build_policy(settings), builtin_verifiers(), epoch_id=epoch)
            return write_items(items, out)
        assert take is not None  # noqa: S101 - checked above
        taken = take_review(controls, take, c.key_of(directory, key))
    restored = await _restore_anchor(settings) if any(review["invalidated"] for review in taken) else {}
    return {"reviews": taken, **restored}


async def invalidate(settings: Settings, verifier: str, version: str, reason: str, key: Path | None) -> JsonObject:
    """Believe a verifier no more, and serve the anchor again where the champion's certificate rests on it."""
    directory = existing(settings)
    with c.controlling(directory) as controls:
        signing = c.invalidate_verifier(controls, verifier, version, reason, c.key_of(directory, key))
    return {**signing, **await _restore_anchor(settings)}


async def serve_in_emergency(settings: Settings, candidate_id: str, reason: str, key: Path | None) -> JsonObject:
    """Serve a candidate for 24 hours on a person's word.

    Raises:
        NotFoundError: no such candidate.
        ConflictError: it was judged already; what the gate refused reaches no user this way either.
    """
    directory = existing(settings)
    with c.controlling(directory) as controls:
        stores = controls.stores
        candidates = {candidate.id: candidate for candidate in stores.releases.list_candidates()}
        if candidate_id not in candidates:
            raise NotFoundError(f"candidate {candidate_id!r} does not exist; known: {sorted(candidates)}")
        candidate = candidates[candidate_id]
        certificate = c.emergency_certificate(controls, candidate, reason, c.key_of(directory, key))
        save_certificate(directory, certificate)
        for state in (CandidateState.SCREENED, CandidateState.CERTIFIED):
            if candidate.state in (CandidateState.PROPOSED, CandidateState.SCREENED) and candidate.state is not state:
                candidate = stores.releases.set_candidate_state(
                    candidate_id, state, reasons=(f"the glass was broken: {reason}",), time=controls.now()
                )
        expires_at = controls.state.controls.break_glass[candidate.adapter_sha256]
        champion = release_behind(controls.stores.releases, CHAMPION)
        async with publishing(settings, directory, stores) as publisher:
            release = await publisher.publish(candidate_id, against=champion.adapter_sha256 or BARE_BASE)
    return {"release": release["id"], "expires_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))}


def sign_anchor(settings: Settings, release_id: str, key: Path | None) -> JsonObject:
    """Sign a release as the anchor.

    Raises:
        NotFoundError: no such release.
        ConflictError: it never served everybody, or serves in an emergency only.
        CertificateError: its certificate does not stand.
    """
    directory = existing(settings)
    with c.controlling(directory) as controls:
        store = controls.stores.releases
        releases = {release.id: release for release in store.list_releases()}
        if release_id not in releases:
            raise NotFoundError(f"release {release_id!r} does not exist; 'tidegate releases list' shows all")
        release = releases[release_id]
        emergency = release.certificate is not None and release.certificate.get("kind") == "break_glass"
        if emergency or release_id not in c.former_champions(controls):
            why = "serves in an emergency" if emergency else "was never the champion"
            raise ConflictError(
                f"release {release_id!r} {why}; an anchor has to be a release that was certified and served everybody"
            )
        if release.adapter_sha256 is not None:
            certificate_check(directory, controls.stores.audit)(
                release.certificate, adapter_sha256=release.adapter_sha256, base_sha256=release.base_sha256
            )
        subject = {"release": release_id, "adapter_sha256": release.adapter_sha256}
        signing = controls.sign(ANCHOR_SIGNED, subject, c.key_of(directory, key))
        store.move_aliases({ANCHOR: release_id}, reason="signed as the anchor", time=controls.now())
        return {**signing.to_json(), **subject}


async def _restore_anchor(settings: Settings) -> Mapping[str, Any]:
    """Serve the anchor again if the champion's certificate is void; trigger 3."""
    directory = existing(settings)
    with c.controlling(directory) as controls:
        releases = controls.stores.releases
        if not releases.list_releases():
            return {"restored": None}
        champion, anchor = release_behind(releases, CHAMPION), release_behind(releases, ANCHOR)
        if champion.adapter_sha256 is None or champion.adapter_sha256 == anchor.adapter_sha256:
            return {"restored": None}
        try:
            certificate_check(directory, controls.stores.audit)(
                champion.certificate, adapter_sha256=champion.adapter_sha256, base_sha256=champion.base_sha256
            )
        except VoidCertificateError as void:
            async with publishing(settings, directory, controls.stores) as publisher:
                restored = release_behind(releases, CHAMPION)
                if restored.id != champion.id:  # a publisher that had to be started restored it on its own
                    return {"restored": restored.id}
                try:
                    release = await publisher.rollback(anchor.id, f"trigger 3: {void}")
                except ConflictError:
                    restored = release_behind(releases, CHAMPION)
                    if restored.id == champion.id:
                        raise
                    return {"restored": restored.id}  # the running server's watch was first
            return {"restored": release["id"]}
        return {"restored": None}


def _waiting(statements: Path) -> list[JsonObject]:
    waiting = [c.waiting_statements(path) for path in sorted(statements.glob("*.json"))]
    return [{"kind": one["kind"], "signed_by": [str(s["signer"])[:16] for s in one["statements"]]} for one in waiting]
