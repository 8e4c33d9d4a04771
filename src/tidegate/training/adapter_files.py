"""Writing an adapter directory: the same run gives the same bytes; no path and no time is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash
from tidegate.core.agreement import MANIFEST_KEY, AgreementRecord
from tidegate.training.backends import backend_of
from tidegate.training.job import TrainingJob
from tidegate.training.model import LoraModel

SCHEMA = "tidegate.adapter/1"

_PACKAGES = ("tidegate", "torch", "transformers", "peft")


def write_adapter(
    directory: Path,
    trained: LoraModel,
    job: TrainingJob,
    *,
    effective: Mapping[str, Any],
    losses: tuple[float, ...],
    agreement: AgreementRecord | None,
) -> str:
    """Write weights, PEFT configuration and manifest into an empty directory; returns the content hash.

    ``agreement`` is what these weights compute here, for the engine that will serve them to be held to.
    """
    directory.mkdir(parents=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in trained.tensors.items()}
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    _write_json(directory / CONFIG_FILE, trained.config)
    _write_json(
        directory / MANIFEST_FILE,
        {
            "schema": SCHEMA,
            "base_sha256": job.base_sha256,
            "manifest_hash": job.manifest_hash,
            "parent_sha256": job.parent_sha256,
            "seed": job.seed,
            "hyperparameters": job.training.model_dump(mode="json"),
            "effective": dict(effective),
            "loss_curve": list(losses),
            **({} if agreement is None else {MANIFEST_KEY: agreement.to_json()}),
            "versions": {name: version(name) for name in (*_PACKAGES, *backend_of(job.training).packages)},
        },
    )
    return adapter_hash(directory)


def largest_b(trained: LoraModel) -> float:
    """Largest absolute entry of all B matrices; 0 means that the adapter computes nothing."""
    with torch.no_grad():
        return max(float(t.abs().max()) for name, t in trained.tensors.items() if ".lora_B." in name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
