"""What a training run is asked to do and what it reports; plain values that travel as JSON. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tidegate.artifacts import read_json
from tidegate.config.training import TrainingSettings
from tidegate.core.errors import ConfigError, TrainingError
from tidegate.core.types import AdapterRef, JsonObject

STAGING = "adapter"
"""Folder beside the job file into which the worker writes the adapter."""

_PATHS = ("examples", "base_model", "initial_adapter", "output_root")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One LoRA run. The trainer sees these files and nothing else: no database, no data directory.

    ``examples`` is a JSON Lines file of ``Example``; ``initial_adapter`` None starts from the bare base model, and
    ``parent_sha256`` is the content hash that ``initial_adapter`` must have. The adapter is published as
    ``output_root/<sha256>``. ``threads`` 0 takes all processors; another number of threads gives another
    adapter, as sums are rounded in another order. ``seed`` stands above ``training.seed``.
    ``success_threshold`` is the reward from which on an answer is right, in [0, 1], as curation takes it.
    """

    examples: Path
    base_model: Path
    base_sha256: str
    initial_adapter: Path | None
    training: TrainingSettings
    manifest_hash: str | None
    parent_sha256: str | None
    output_root: Path
    threads: int
    seed: int
    success_threshold: float

    @property
    def compute_threads(self) -> int:
        """The number of threads that ``threads`` stands for on this machine."""
        return self.threads or len(os.sched_getaffinity(0))

    def to_json(self) -> dict[str, Any]:
        """A JSON object; paths are absolute."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["training"] = self.training.model_dump(mode="json")
        for name in _PATHS:
            values[name] = None if values[name] is None else str(values[name].absolute())
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainingJob:
        """The inverse of :meth:`to_json`.

        Raises:
            TrainingError: a field is missing, unknown or not usable.
        """
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise TrainingError(f"a training job has the fields {sorted(known)}; found {sorted(values)}")
        parsed = dict(values)
        for name in _PATHS:
            parsed[name] = None if values[name] is None else Path(values[name])
        try:
            parsed["training"] = TrainingSettings.model_validate(values["training"])
        except ValidationError as error:
            raise TrainingError(f"training settings {values['training']!r} are not usable: {error}") from error
        return cls(**parsed)

    @classmethod
    def read(cls, path: Path) -> TrainingJob:
        """Read a job file.

        Raises:
            TrainingError: it is missing or malformed.
        """
        try:
            return cls.from_json(read_json(path, "training job"))
        except ConfigError as error:
            raise TrainingError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a run did.

    ``dropped`` counts sequences that were left out by reason. ``series`` has more figures with one entry a step (None
    where a step has no value), those of :class:`tidegate.training.updates.StepFigures`. ``memory_bound`` is the bound
    in bytes that was stated before the first step, None where the base is of an unknown shape; ``resumed_at`` the step
    of the checkpoint that the run went on from, 0 without one.

    ``tokens`` counts the tokens of all sequences over all epochs, ``tokens_computed`` those that were
    computed (shared beginnings once), ``tokens_trained`` the predicted ones. ``losses`` and ``grad_norms`` have one
    entry a step; losses in nats a token, gradient norms before clipping. ``configured`` and ``effective``
    hold the same hyperparameters as asked for and as measured. ``guards`` says what was checked, with numbers.
    """

    adapter_sha256: str
    adapter_path: str
    steps: int
    examples: int
    sequences: int
    dropped: Mapping[str, int]
    tokens: int
    tokens_computed: int
    tokens_trained: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    series: Mapping[str, tuple[float | None, ...]]
    memory_bound: int | None
    resumed_at: int
    seconds: float
    trainable_parameters: int
    configured: JsonObject
    effective: JsonObject
    guards: JsonObject

    @property
    def loss_first(self) -> float:
        """Loss of the first step, before any update."""
        return self.losses[0]

    @property
    def loss_last(self) -> float:
        """Loss of the last step."""
        return self.losses[-1]

    @property
    def adapter(self) -> AdapterRef:
        """The published adapter under its candidate name."""
        return AdapterRef(
            name=f"cand-{self.adapter_sha256[:8]}", path=Path(self.adapter_path), sha256=self.adapter_sha256
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainingReport:
        """The inverse of :meth:`to_json`."""
        parsed = dict(values)
        for name in ("losses", "grad_norms"):
            parsed[name] = tuple(values[name])
        parsed["series"] = {name: tuple(column) for name, column in values["series"].items()}
        return cls(**parsed)

    def summary(self) -> dict[str, Any]:
        """The figures worth a line in a log or a table."""
        return {
            "adapter_sha256": self.adapter_sha256,
            "adapter_path": self.adapter_path,
            "steps": self.steps,
            "examples": self.examples,
            "sequences": self.sequences,
            "dropped": dict(self.dropped),
            "tokens": self.tokens,
            "tokens_computed": self.tokens_computed,
            "tokens_trained": self.tokens_trained,
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "seconds": self.seconds,
        }
