"""Training passes and cycles on a data directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tidegate.app.engines import Base, base_of, open_engine, resolve_base, with_upstream_model
from tidegate.app.gates import build_policy, save_certificate
from tidegate.app.layout import DataDirectory
from tidegate.app.locks import cycle_lock, exclusive
from tidegate.app.operations import existing
from tidegate.app.publishing import publisher_for
from tidegate.app.stores import Stores, open_stores
from tidegate.artifacts import adapter_base, adapter_hash, directory_published_at
from tidegate.config import Settings
from tidegate.config.training import supervised
from tidegate.core.errors import AdapterError, ConflictError, FrozenError, TaskFileError
from tidegate.core.gate.live_records import canary_of
from tidegate.core.gate.live_state import Trial
from tidegate.core.gate.state import gate_state
from tidegate.core.hashing import content_hash
from tidegate.core.selection.demonstrations import demonstration_example, read_demonstration
from tidegate.core.types import Candidate, CandidateState, Example, JsonObject, Messages, Split
from tidegate.curation import EXAMPLES_FILE, curate, write_batch
from tidegate.cycle.machine import CycleEvent, run_cycle
from tidegate.cycle.stages import CycleStages
from tidegate.cycle.steps import cycle_steps, new_config
from tidegate.engines.model_cache import base_hash
from tidegate.gate import Gate
from tidegate.gate.evaluate import Grading
from tidegate.gate.keys import KeyPair
from tidegate.ports import Engine
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.signals.tasks.file import read_json_lines
from tidegate.training import TrainingJob, backend_of, run_training


def read_demonstrations(path: Path) -> list[Example]:
    """Solved transcripts as training examples.

    Raises:
        TaskFileError: the file cannot be read, or a line holds no messages with an assistant turn.
    """
    examples: list[Example] = []
    for number, values in read_json_lines(path):
        messages = values.get("messages")
        opening, answer = _opening_and_answer(messages)
        if answer is None:
            raise TaskFileError(
                f"{path}:{number}: field 'messages' must be a list of chat messages that ends with the assistant's turn"
            )
        tools = tuple(values.get("tools") or ())
        examples.append(
            demonstration_example(
                f"demonstration/{content_hash([messages, tools])[:16]}",
                opening=opening,
                tools=tools,
                answer=answer,
                kind=str(values.get("kind") or "default"),
            )
        )
    if not examples:
        raise TaskFileError(f"{path}: the file holds no demonstration; one JSON object a line is expected")
    return examples


def _notes_for(say: Callable[[str], None]) -> Callable[[JsonObject], None]:
    """Of a run's progress, what a person who waits should know."""

    def tell(progress: JsonObject) -> None:
        if "note" in progress:
            say(str(progress["note"]))

    return tell


def _opening_and_answer(messages: Any) -> tuple[Messages, Messages | None]:
    """Split a transcript at the first assistant turn."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return (), None
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return tuple(messages[:first]), read_demonstration(messages[first:])


def train_demonstrations(settings: Settings, path: Path, *, say: Callable[[str], None]) -> JsonObject:
    """A supervised pass over demonstrations from the bare base model; registers a candidate."""
    backend_of(settings.training).require_installed()
    directory = DataDirectory.of(settings).create()
    examples = read_demonstrations(path)
    model_dir = resolve_base(settings, progress=say)
    base_sha256 = base_hash(model_dir)
    with open_stores(directory) as stores:
        now = time.time()
        batch = curate(
            (), (), (),
            settings=settings.curation, seed=settings.training.seed, now=now, verifiers={}, demonstrations=examples,
        )  # fmt: skip
        batch_dir = write_batch(batch, directory.batches)
        stores.trajectories.add_manifest(batch.hash, batch.manifest, time=now)
        job = TrainingJob(
            examples=batch_dir / EXAMPLES_FILE,
            base_model=model_dir,
            base_sha256=base_sha256,
            initial_adapter=None,
            training=supervised(settings.training),
            manifest_hash=batch.hash,
            parent_sha256=None,
            output_root=directory.adapters,
            threads=settings.model.threads,
            seed=settings.training.seed,
            success_threshold=settings.curation.success_threshold,
        )
        if settings.training.objective != "sft":
            say(f"demonstrations have no rewards: 'sft' trains them, not {settings.training.objective!r}")
        say(f"training on {len(batch.examples)} demonstrations")
        report = run_training(job, timeout_s=settings.training.timeout_s, nice=0, on_progress=_notes_for(say))
        candidate = Candidate(
            id=f"cand-{report.adapter_sha256[:8]}",
            adapter_sha256=report.adapter_sha256,
            base_sha256=base_sha256,
            manifest_hash=batch.hash,
            parent_sha256=None,
            state=CandidateState.PROPOSED,
            created_at=time.time(),
            origin="demonstrations",
        )
        stores.releases.add_candidate(candidate)
    return {"candidate": candidate.id, **report.summary()}


async def run_one_cycle(
    settings: Settings, *, candidate: Path | None, observe: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run or resume a cycle in this process; serving goes on in another.

    Raises:
        CycleError: a step failed.
        ConfigError: the backend of training is not installed.
        FrozenError: learning is frozen, or the policy is looser than the one in force.
        AdapterError: the proposed directory holds no adapter of this base model.
    """
    directory = existing(settings)
    if candidate is None:
        backend_of(settings.training).require_installed()
    os.nice(settings.cycle.nice)
    settings = await with_upstream_model(settings)
    base = await asyncio.to_thread(base_of, settings)
    proposed = None if candidate is None else take_in(directory, candidate, base_sha256=base.sha256)
    async with AsyncExitStack() as stack:
        stack.enter_context(exclusive(cycle_lock(directory.root), "another cycle runs on this data directory"))
        stores = stack.enter_context(open_stores(directory))
        _require_same_proposal(stores, proposed)
        hindrance = gate_state(stores.audit.read()).why_not_decide(build_policy(settings))
        if hindrance is not None:  # before anything is trained for nothing
            raise FrozenError(hindrance)
        engines = _LazyEngine(settings, base, stack)
        stages = build_stages(settings, directory, stores, engines, base=base)

        def tell(event: CycleEvent) -> None:
            observe(
                {"cycle": event.cycle_id, "step": event.step.value, "what": event.what, "detail": dict(event.detail)}
            )

        result = await run_cycle(
            store=stores.cycles,
            steps=cycle_steps(stages),
            new_cycle_id=lambda: f"cycle-{uuid.uuid4().hex[:12]}",
            new_config=lambda: new_config(stages, stores.cycles, proposed=proposed),
            clock=time.time,
            observe=tell,
        )
    return {
        "cycle": result.cycle_id,
        "outcome": result.outcome.value,
        "reasons": list(result.reasons),
        "steps": dict(result.steps),
    }


def _require_same_proposal(stores: Stores, proposed: str | None) -> None:
    """An interrupted cycle is finished before another adapter is judged."""
    current = stores.cycles.current()
    if current is not None and proposed is not None and current[1].get("proposed") != proposed:
        raise ConflictError(
            f"cycle {current[0]!r} is open and judges something else; finish it with 'tidegate cycle run', or end it "
            "with 'tidegate cycle abandon', then propose the adapter again"
        )


def take_in(directory: DataDirectory, adapter: Path, *, base_sha256: str) -> str:
    """Copy a foreign adapter directory under its content hash; returns the hash.

    Raises:
        AdapterError: it is damaged or was trained over another base.
    """
    sha256 = adapter_hash(adapter)
    base = adapter_base(adapter)
    if base != base_sha256:
        raise AdapterError(
            f"adapter {str(adapter)!r} was trained over base {base[:12]}, this model is {base_sha256[:12]}; "
            "train it again over this base"
        )
    target = directory.adapters / sha256
    if not target.exists():
        with directory_published_at(target) as scratch:
            shutil.copytree(adapter, scratch, dirs_exist_ok=True)
            if adapter_hash(scratch) != sha256:
                raise AdapterError(f"adapter {str(adapter)!r} changed while it was copied; propose it again")
    return sha256


class _LazyEngine:
    """One engine for the steps that need one, started by the first of them and kept to the end of the cycle."""

    def __init__(self, settings: Settings, base: Base, stack: AsyncExitStack) -> None:
        self._settings = settings
        self._base = base
        self._stack = stack
        self._engine: Engine | None = None

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[Engine]:
        if self._engine is None:
            engine = open_engine(self._settings, self._base, replica="cycle")
            self._engine = await self._stack.enter_async_context(engine)
        yield self._engine


class _Canary:
    """The canary as the cycle meets it: started through the publisher, followed in the log."""

    def __init__(self, start: Callable[[str, str], Awaitable[JsonObject]], stores: Stores) -> None:
        self.start = start
        self._stores = stores

    def trial(self, candidate_id: str) -> Trial | None:
        return canary_of(self._stores.audit.read(), candidate_id)


def build_stages(
    settings: Settings,
    directory: DataDirectory,
    stores: Stores,
    open_engine: _LazyEngine,
    *,
    base: Base,
) -> CycleStages:
    """Wire a cycle's stages."""
    verifiers, environments = builtin_verifiers(), builtin_environments()
    policy = build_policy(settings)
    grading = Grading(
        verifiers=verifiers,
        environments=environments,
        max_calls=settings.cycle.max_calls,
        concurrency=settings.cycle.concurrency,
        timeout_s=settings.cycle.episode_timeout_s,
        clock=time.monotonic,
    )

    @asynccontextmanager
    async def open_gate(on_progress: Callable[[str, int, int], None]) -> AsyncGenerator[Gate]:
        async with open_engine() as engine:
            yield Gate(
                policy=policy,
                audit=stores.audit,
                sealed=stores.sealed_epochs,
                engine=engine,
                key=KeyPair.load_or_create(directory.gate_key),
                grading=grading,
                clock=time.time,
                on_progress=on_progress,
            )

    async def publish(candidate_id: str, against: str) -> JsonObject:
        async with publisher_for(directory, stores, open_engine, settings=settings, clock=time.time) as publisher:
            return await publisher.publish(candidate_id, against=against)

    async def start_canary(candidate_id: str, against: str) -> JsonObject:
        async with publisher_for(directory, stores, open_engine, settings=settings, clock=time.time) as publisher:
            return await publisher.start_canary(candidate_id, against=against)

    return CycleStages(
        settings=settings,
        trajectories=stores.trajectories,
        manifests=stores.trajectories,
        sealed_episodes=lambda: stores.sealed_trajectories.list_episodes(splits=(Split.SEALED,)),
        releases=stores.releases,
        verifiers=verifiers,
        grading=grading,
        open_engine=open_engine,
        open_gate=open_gate,
        publish=publish,
        canary=None if policy.canary == "none" else _Canary(start_canary, stores),
        quarantined=lambda: gate_state(stores.audit.read()).live.quarantined,
        save_certificate=lambda certificate: save_certificate(directory, certificate),
        base_model=base.directory,
        base_sha256=base.sha256,
        adapters_dir=directory.adapters,
        batches_dir=directory.batches,
        rollouts_dir=directory.rollouts,
        clock=time.time,
    )
