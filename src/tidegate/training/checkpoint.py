"""The state of a run on disk, from which a killed run goes on to the very same adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from tidegate.artifacts import write_atomically
from tidegate.core.types import JsonObject
from tidegate.training.checkpoint_folder import SCHEMA, checkpoint_folder
from tidegate.training.job import TrainingJob

FILE = "checkpoint.safetensors"

_STATE = ("exp_avg", "exp_avg_sq", "step")


def checkpoint_of(job: TrainingJob) -> CheckpointFile:
    """The state of a job, which keeps none where ``training.checkpoint_steps`` is 0."""
    if job.training.checkpoint_steps == 0:
        return CheckpointFile(None, "")
    folder = checkpoint_folder(job)
    return CheckpointFile(folder, folder.name)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """Where the state of one job lies; ``folder`` None keeps none."""

    folder: Path | None
    fingerprint: str

    def save(
        self, tensors: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, progress: JsonObject
    ) -> None:
        """Replace the state on disk as a whole; ``progress`` is plain JSON.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        if self.folder is None:
            return
        state: dict[str, torch.Tensor] = {}
        for name, parameter in tensors.items():
            state[name] = parameter.detach()
            held: Mapping[str, torch.Tensor] = optimizer.state[parameter]
            state.update({f"{key}:{name}": held[key] for key in _STATE})
        told = json.dumps(progress)
        about = {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "progress": told,
            "sha256": _content_sha256(state, told),
        }
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
        if about.get("sha256") != _content_sha256(state, about.get("progress", "")):
            return None, "the checkpoint cannot be read (its content is not what was written)"
        with torch.no_grad():
            for name, parameter in tensors.items():
                parameter.copy_(state[name])
                optimizer.state[parameter] = {key: state[f"{key}:{name}"] for key in _STATE}
        return json.loads(about["progress"]), ""


def _content_sha256(state: Mapping[str, torch.Tensor], progress: str) -> str:
    digest = hashlib.sha256(progress.encode())
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
