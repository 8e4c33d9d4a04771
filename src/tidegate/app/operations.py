"""What the commands do with a data directory, one function a command. Returns plain data."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from tidegate.app.controls import controlling, first_certificate
from tidegate.app.engines import engine_of
from tidegate.app.gates import (
    certificate_check,
    read_audit_file,
    save_certificate,
    trusted_keys,
    verify_log,
)
from tidegate.app.layout import DataDirectory
from tidegate.app.locks import cycle_lock, exclusive
from tidegate.app.publishing import PublishesReleases, publisher_for
from tidegate.app.stores import Stores, has_database, open_stores
from tidegate.config import Settings
from tidegate.core.errors import CommandError, ConflictError, NotFoundError, TidegateError
from tidegate.core.gate.live_records import trial_status
from tidegate.core.gate.state import gate_state
from tidegate.core.hashing import canonical_json
from tidegate.core.types import Candidate, CandidateState, JsonObject, Release
from tidegate.gate.keys import KeyPair
from tidegate.gateway.admin import release_json
from tidegate.release import BARE_BASE


def existing(settings: Settings) -> DataDirectory:
    """The data directory, which must have been used before.

    Raises:
        NotFoundError: it has no database.
        StoreError: the database server cannot be asked.
    """
    directory = DataDirectory.of(settings)
    if not has_database(directory):
        place = settings.database.shown_url
        raise NotFoundError(
            f"data directory {str(settings.data_dir)!r} holds no tidegate.db; "
            "start 'tidegate serve' first, or name another with --data-dir"
            if place is None
            else f"database {place!r} holds no tables; start 'tidegate serve' first, or name another in database.url"
        )
    return directory.create()


@asynccontextmanager
async def publishing(settings: Settings, directory: DataDirectory, stores: Stores) -> AsyncGenerator[PublishesReleases]:
    """The publisher of the running server, or a local one."""

    def open_engine() -> Any:
        return engine_of(settings, replica="command")

    async with publisher_for(directory, stores, open_engine, settings=settings, clock=time.time) as publisher:
        yield publisher


def list_releases(settings: Settings) -> list[Sequence[Any]]:
    """Rows of id, aliases, adapter, certificate kind, restored release, time."""
    with open_stores(existing(settings)) as stores:
        names: dict[str, list[str]] = {}
        for alias, release_id in stores.releases.aliases().items():
            names.setdefault(release_id, []).append(alias)
        return [
            (
                release.id,
                ",".join(sorted(names.get(release.id, []))),
                (release.adapter_sha256 or "")[:12],
                (release.certificate or {}).get("kind", ""),
                release.restores,
                iso_time(release.created_at),
            )
            for release in stores.releases.list_releases()
        ]


def show_release(settings: Settings, release_id: str) -> JsonObject:
    """A release, and whether its certificate verifies against its content."""
    directory = existing(settings)
    with open_stores(directory) as stores:
        release = _release(stores, release_id)
        verdict = "base model: none needed"
        if release.adapter_sha256 is not None:
            try:
                certificate_check(directory, stores.audit)(
                    release.certificate, adapter_sha256=release.adapter_sha256, base_sha256=release.base_sha256
                )
                verdict = "valid"
            except TidegateError as error:
                verdict = f"INVALID: {error}"
    return {**release_json(release), "certificate_check": verdict}


async def promote_release(settings: Settings, release_id: str) -> JsonObject:
    """Serve a release's content again."""
    directory = existing(settings)
    with open_stores(directory) as stores:
        _release(stores, release_id)
        async with publishing(settings, directory, stores) as publisher:
            return await publisher.promote(release_id)


async def rollback_release(settings: Settings, to: str | None, reason: str) -> JsonObject:
    """Serve the previous champion's content again."""
    directory = existing(settings)
    with open_stores(directory) as stores:
        async with publishing(settings, directory, stores) as publisher:
            return await publisher.rollback(to, reason)


def show_trial(settings: Settings) -> JsonObject:
    """The live trial that runs or ran last.

    Raises:
        NotFoundError: there was none.
    """
    with open_stores(existing(settings)) as stores:
        trial = gate_state(stores.audit.read()).live.trial
    if trial is None:
        raise NotFoundError(
            "no canary and no holdback was ever started; a policy with canary or holdback rules does so"
        )
    return {"kind": trial.kind, **trial_status(trial)}


async def stop_canary(settings: Settings, reason: str) -> JsonObject:
    """End the canary that runs.

    Raises:
        ConflictError: none runs.
    """
    directory = existing(settings)
    with open_stores(directory) as stores:
        async with publishing(settings, directory, stores) as publisher:
            return await publisher.stop_canary(reason)


def list_candidates(settings: Settings) -> list[Sequence[Any]]:
    """Rows of id, state, origin, adapter, manifest, time."""
    with open_stores(existing(settings)) as stores:
        return [
            (c.id, c.state.value, c.origin, c.adapter_sha256[:12], (c.manifest_hash or "")[:12], iso_time(c.created_at))
            for c in stores.releases.list_candidates()
        ]


async def sign_candidate(settings: Settings, candidate_id: str) -> JsonObject:
    """Certify the first release by a person's signature and publish it.

    Raises:
        NotFoundError: no such candidate.
        ConflictError: an adapter is served already; only the gate may replace it.
    """
    directory = existing(settings)
    with open_stores(directory) as stores:
        candidates = {candidate.id: candidate for candidate in stores.releases.list_candidates()}
        if candidate_id not in candidates:
            raise NotFoundError(f"candidate {candidate_id!r} does not exist; known: {sorted(candidates)}")
        candidate = candidates[candidate_id]
        _require_first(stores, candidate)
        for state in (CandidateState.SCREENED, CandidateState.CERTIFIED):
            if candidate.state in (CandidateState.PROPOSED, CandidateState.SCREENED):
                candidate = stores.releases.set_candidate_state(
                    candidate_id, state, reasons=("signed by a person",), time=time.time()
                )
        operator = KeyPair.load_or_create(directory.operator_key)
        with controlling(directory) as controls:
            save_certificate(directory, first_certificate(controls, candidate, operator))
        async with publishing(settings, directory, stores) as publisher:
            return await publisher.publish(candidate_id, against=BARE_BASE)


def _require_first(stores: Stores, candidate: Candidate) -> None:
    """A person signs only what comes before any other adapter was ever served, and only once."""
    other = [r for r in stores.releases.list_releases() if r.adapter_sha256 not in (None, candidate.adapter_sha256)]
    if other:
        raise ConflictError(
            f"release {other[0].id!r} was served before, so candidate {candidate.id!r} can only come in through the "
            "gate: 'tidegate cycle run --candidate DIRECTORY'"
        )
    signable = (CandidateState.PROPOSED, CandidateState.SCREENED, CandidateState.CERTIFIED)
    if candidate.state not in signable:
        raise ConflictError(f"candidate {candidate.id!r} is {candidate.state.value!r}; it cannot be signed any more")


def list_cycles(settings: Settings) -> list[Sequence[Any]]:
    """Rows of id, opening, closing, outcome."""
    with open_stores(existing(settings)) as stores:
        return [
            (
                cycle["id"],
                iso_time(cycle["opened_at"]),
                iso_time(cycle["closed_at"]) if cycle["closed_at"] else "",
                cycle["outcome"] or "open",
            )
            for cycle in stores.cycles.list_cycles()
        ]


def abandon_cycle(settings: Settings) -> JsonObject:
    """End the cycle that is open without finishing it; the next run starts afresh.

    Raises:
        NotFoundError: no cycle is open.
        ConflictError: a process is running it.
    """
    directory = existing(settings)
    with exclusive(cycle_lock(directory.root), "a cycle runs on this data directory"), open_stores(directory) as stores:
        current = stores.cycles.current()
        if current is None:
            raise NotFoundError("no cycle is open; 'tidegate cycle list' shows how all of them ended")
        stores.cycles.close_cycle(current[0], "failed", time=time.time())
        return {"cycle": current[0], "outcome": "failed"}


def show_cycle(settings: Settings, cycle_id: str) -> JsonObject:
    """Outputs of a cycle's steps."""
    with open_stores(existing(settings)) as stores:
        known = [cycle["id"] for cycle in stores.cycles.list_cycles()]
        if cycle_id not in known:
            raise NotFoundError(f"cycle {cycle_id!r} does not exist; known: {known}")
        return stores.cycles.steps(cycle_id)


def verify_audit_log(settings: Settings, file: Path | None) -> JsonObject:
    """Recompute the log; AuditError at the first difference."""
    if file is not None:
        return verify_log(read_audit_file(file))
    directory = existing(settings)
    with open_stores(directory) as stores:
        records = list(stores.audit.read())
        trusted = trusted_keys(directory, gate_state(records).controls)
        return verify_log(records, stores.releases.list_releases(), trusted=trusted)


def audit_lines(settings: Settings) -> Iterator[str]:
    """The log, one JSON object a line."""
    with open_stores(existing(settings)) as stores:
        for record in stores.audit.read():
            yield canonical_json(asdict(record))


async def send_feedback(settings: Settings, target: str, metric: str, value: Any) -> JsonObject:
    """Post feedback to the running server.

    Raises:
        CommandError: no server runs on this data directory, or it refuses.
    """
    address = DataDirectory.of(settings).server()
    if address is None:
        raise CommandError(f"no server runs on data directory {str(settings.data_dir)!r}; start 'tidegate serve'")
    name = "interaction_id" if target.startswith("chatcmpl-") else "episode_id"
    body = {"metric_name": metric, "value": value, name: target}
    headers = {"Authorization": f"Bearer {settings.server.api_keys[0]}"} if settings.server.api_keys else {}
    try:
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{address.url}/v1/feedback", json=body) as response,
        ):
            answer: dict[str, Any] = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CommandError(f"the server at {address.url} cannot be reached: {error}") from error
    if "error" in answer:
        raise CommandError(str(answer["error"]["message"]))
    return answer


def _release(stores: Stores, release_id: str) -> Release:
    for release in stores.releases.list_releases():
        if release.id == release_id:
            return release
    raise NotFoundError(f"release {release_id!r} does not exist; 'tidegate releases list' shows all")


def iso_time(seconds: float) -> str:
    """Unix seconds as a UTC time for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
