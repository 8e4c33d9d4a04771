"""The state of a run on disk, from which a killed run goes on to the very same adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from tidegate.artifacts import file_hash, write_atomically
from tidegate.core.hashing import content_hash
from tidegate.core.types import JsonObject
from tidegate.training.job import TrainingJob

FOLDER = ".checkpoints"
FILE = "checkpoint.safetensors"
SCHEMA = "tidegate.checkpoint/1"

_STATE = ("exp_avg", "exp_avg_sq", "step")


def job_fingerprint(job: TrainingJob) -> str:
    """Content hash of everything that decides what the run computes; where its files lie does not."""
    values = job.to_json()
    for place in ("examples", "base_model", "initial_adapter", "output_root"):
        del values[place]
    values["threads"] = job.compute_threads
    return content_hash({"schema": SCHEMA, "torch": torch.__version__, "examples": file_hash(job.examples), **values})


def checkpoint_of(job: TrainingJob) -> CheckpointFile:
    """Where a job's state lies: beside the adapters, under a name that stands for the whole job."""
    if job.training.checkpoint_steps == 0:
        return CheckpointFile(None, "")
    fingerprint = job_fingerprint(job)
    return CheckpointFile(job.output_root / FOLDER / fingerprint, fingerprint)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """Where the state of one job lies; ``folder`` None keeps none."""

    folder: Path | None
    fingerprint: str

    def save(
        self, tensors: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, progress: JsonObject
    ) -> None:
        """Replace the state on disk as a whole; ``progress`` is plain JSON."""
        if self.folder is None:
            return
        state: dict[str, torch.Tensor] = {}
        for name, parameter in tensors.items():
            state[name] = parameter.detach()
            held: Mapping[str, torch.Tensor] = optimizer.state[parameter]
            state.update({f"{key}:{name}": held[key] for key in _STATE})
        about = {"schema": SCHEMA, "fingerprint": self.fingerprint, "progress": json.dumps(progress)}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / FILE, save(state, metadata=about))

    def load(
        self, tensors: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any] | None, str]:
        """Put the state on disk into parameters and optimizer.

        Returns:
            The saved progress, None when there is nothing usable; and why a file that is there was not used.
        """
        path = None if self.folder is None else self.folder / FILE
        if path is None or not path.exists():
            return None, ""
        try:
            with safe_open(path, framework="pt") as stored:
                about: Mapping[str, str] = stored.metadata() or {}
                names: Sequence[str] = list(stored.keys())
                state = {name: stored.get_tensor(name) for name in names}
        except Exception as error:  # noqa: BLE001 - safetensors raises its own untyped errors
            return None, f"the checkpoint cannot be read ({error})"
        wanted = {key for name in tensors for key in (name, *(f"{part}:{name}" for part in _STATE))}
        if about.get("fingerprint") != self.fingerprint or set(state) != wanted:
            return None, "the checkpoint belongs to another run"
        with torch.no_grad():
            for name, parameter in tensors.items():
                parameter.copy_(state[name])
                optimizer.state[parameter] = {key: state[f"{key}:{name}"] for key in _STATE}
        return json.loads(about["progress"]), ""

    def remove(self) -> None:
        """Forget the states of a run that ended well, and of all that were given up before it.

        Another run that is under way beside it loses a state that it writes again.
        """
        if self.folder is not None:
            shutil.rmtree(self.folder.parent, ignore_errors=True)
