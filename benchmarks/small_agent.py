"""Agents on the small model, outside of serving: train an adapter, ask it, curate its answers."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate.artifacts import MANIFEST_FILE, adapter_hash
from tidegate.config.settings import CurationSettings
from tidegate.config.training import TrainingSettings
from tidegate.core.selection.demonstrations import demonstration_example
from tidegate.core.selection.exploring import Asked
from tidegate.core.types import AdapterRef, Example, Messages, Outcome, Sampling, Task
from tidegate.curation import Judged, curate
from tidegate.cycle.rollouts import Sampler, fault_in
from tidegate.engines.embedded import EmbeddedEngine
from tidegate.gate import Arm, Grading
from tidegate.gate.arms import loaded
from tidegate.gate.evaluate import Call
from tidegate.gate.screening import measured_calls, reference_kl
from tidegate.signals.environments import builtin_environments
from tidegate.signals.tasks.generate import demonstrations, generate_tasks
from tidegate.signals.verifiers import builtin_verifiers
from tidegate.training import TrainingJob, run_training
from tidegate.training.launch import worker_environment

KINDS = ("chain_sum", "products", "basic_arithmetic")
LIVE = Sampling(temperature=1.0, max_tokens=40)
_LONG_AGO = 1e6
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Judged answers and what they cost: ``tokens`` sampled, ``faults`` answers that an error cut short.

    ``kl``: divergence from a reference in nats per token, where one was given.
    """

    judged: tuple[Judged, ...]
    tokens: int
    faults: int
    kl: float | None

    @property
    def success(self) -> float:
        """Share of the answers that pass."""
        return sum(found.verdict.outcome is Outcome.PASS for found in self.judged) / len(self.judged)


class SmallAgent:
    """Engine, trainer and tasks of one benchmark; ``folder`` holds its adapters and batches."""

    def __init__(self, folder: Path, model: Path, engine: EmbeddedEngine, decoding: Sampling) -> None:
        """Use :func:`small_agent`."""
        self._folder = folder
        self._model = model
        self._engine = engine
        self._decoding = decoding
        self._batches = 0

    def seed_examples(self, seed: int, kinds: Sequence[str] = KINDS, count: int = 8) -> list[Example]:
        """Demonstrations, ``count`` of each kind."""
        return [
            demonstration(f"d-{kind}-{number}", task, answer)
            for kind in kinds
            for number, (task, answer) in enumerate(demonstrations(kind, count, seed))
        ]

    def tasks(self, seed: int, count: int, kinds: Sequence[str] = KINDS, *, without: Sequence[Task] = ()) -> list[Task]:
        """About ``count`` distinct tasks, evenly of each kind, none of ``without``, in a random order."""
        asked = {task.id for task in without}
        drawn = [t for kind in kinds for t in generate_tasks(kind, count // len(kinds), seed, exclude=asked)]
        random.Random(seed).shuffle(drawn)  # noqa: S311 - an order, no secret
        return drawn

    def train(self, examples: Sequence[Example], parent: AdapterRef | None, seed: int, **settings: Any) -> AdapterRef:
        """Train in a process of its own, from the parent's weights."""
        file = self._written(examples)
        job = TrainingJob(
            examples=file,
            base_model=self._model,
            base_sha256=self._engine.base_sha256,
            initial_adapter=None if parent is None else parent.path,
            training=TrainingSettings(checkpoint_steps=0, **settings),
            manifest_hash=None,
            parent_sha256=None if parent is None else parent.sha256,
            output_root=self._folder / "adapters",
            threads=0,
            seed=seed,
            success_threshold=CurationSettings().success_threshold,
        )
        return run_training(job, timeout_s=_TIMEOUT_S, on_progress=lambda _: None).adapter

    def train_elsewhere(self, command: Sequence[str], examples: Sequence[Example], parent: AdapterRef) -> AdapterRef:
        """Have a peer train: ``command`` gets the files of examples, base model and parent, and the folder to write to.

        What comes back has the parent's description of its base, without which no engine would take it.

        Raises:
            subprocess.CalledProcessError: the peer failed; its message stands on stderr.
        """
        file = self._written(examples)
        folder = self._folder / f"peer-{self._batches}"
        subprocess.run(
            [*command, str(file), str(self._model), str(parent.path), str(folder)],
            check=True,
            stdout=sys.stderr,
            env=worker_environment(os.environ, threads=len(os.sched_getaffinity(0))),
        )
        shutil.copy(parent.path / MANIFEST_FILE, folder / MANIFEST_FILE)
        return AdapterRef(name=folder.name, path=folder, sha256=adapter_hash(folder))

    def _written(self, examples: Sequence[Example]) -> Path:
        self._batches += 1
        file = self._folder / f"examples-{self._batches}.jsonl"
        file.write_text("".join(json.dumps(asdict(example)) + "\n" for example in examples), encoding="utf-8")
        return file

    async def ask(
        self,
        adapter: AdapterRef,
        tasks: Sequence[Task],
        *,
        samples: int,
        seed: int,
        reference: AdapterRef | None = None,
    ) -> Generated:
        """Several answers to each task, and their divergence from what ``reference`` would say."""
        judged: list[Judged] = []
        calls: dict[str, list[Call]] = {}
        tokens = faults = 0
        arm = Arm.of(adapter, base_sha256=self._engine.base_sha256)
        sampler = Sampler(
            engine=self._engine,
            arm=arm,
            grading=Grading(
                verifiers=builtin_verifiers(), environments=builtin_environments(), max_calls=4, concurrency=32,
                timeout_s=600.0, clock=time.monotonic,
            ),
            decoding=self._decoding,
            seed=seed,
            release_id=adapter.name,
            time=_LONG_AGO,
            on_answer=lambda: None,
        )  # fmt: skip
        async with loaded(self._engine, arm):
            for draw in range(samples):
                for task_id, found in (await sampler.ask(tasks, draw=str(draw))).items():
                    if fault_in(found) is not None:
                        faults += 1
                        continue
                    task = next(task for task in tasks if task.id == task_id)
                    asked = Asked(task=task, user_key=task_id, solved=0, judged=0)
                    judged.append(sampler.record(asked, found, draw=str(draw)))
                    tokens += sum(len(call.choice.token_ids) for call in found.calls)
                    calls.setdefault(task_id, []).extend(found.calls)
            kl = None
            if reference is not None:
                other = Arm.of(reference, base_sha256=self._engine.base_sha256)
                kl = await reference_kl(self._engine, arm, other, measured_calls(calls, salt=arm.sha256))
        return Generated(
            judged=tuple(judged), tokens=tokens, faults=faults, kl=None if kl is None else kl.nats_per_token
        )

    def curated(
        self,
        generated: Generated,
        seed: int,
        *,
        keep_failures: bool,
        shown: Sequence[Example] = (),
        **settings: Any,
    ) -> tuple[Example, ...]:
        """The batch that a cycle would make of these answers."""
        batch = curate(
            [found.episode for found in generated.judged],
            [found.verdict for found in generated.judged],
            [],
            settings=CurationSettings(**settings),
            seed=seed,
            now=_LONG_AGO,
            verifiers=builtin_verifiers(),
            demonstrations=shown,
            keep_failures=keep_failures,
        )
        return batch.examples


def demonstration(name: str, task: Task, answer: Messages) -> Example:
    """The example of a task and the messages that solve it."""
    return demonstration_example(name, opening=task.messages, tools=task.tools, answer=answer, kind=task.kind)


def by_kind(generated: Generated) -> Mapping[str, float]:
    """Share of the answers that pass, by kind of task."""
    passed: dict[str, list[bool]] = {}
    for found in generated.judged:
        task = found.episode.task
        passed.setdefault(task.kind if task else "", []).append(found.verdict.outcome is Outcome.PASS)
    return {kind: sum(values) / len(values) for kind, values in passed.items()}


@asynccontextmanager
async def small_agent(folder: Path, model: Path, decoding: Sampling = LIVE) -> AsyncGenerator[SmallAgent]:
    """A running engine over the small model that answers with ``decoding``, closed afterwards."""
    engine = EmbeddedEngine(model)
    await engine.start()
    try:
        yield SmallAgent(folder, model, engine, decoding)
    finally:
        await engine.close()
