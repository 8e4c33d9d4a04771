"""Damaging an adapter on purpose, to show that the gate refuses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash, read_json
from tidegate.training.derived import publish_derived


def degrade_adapter(source_dir: Path, out_root: Path, *, seed: int, scale: float) -> Path:
    """Write a copy of an adapter with noise added to its weights.

    Args:
        source_dir: a float32 adapter directory.
        out_root: where the copy is published as ``<sha256>``.
        seed: decides the noise; the same seed gives the same copy.
        scale: standard deviation of the noise relative to that of each tensor, > 0. At 4 most of what was
            learned survives, at 16 nothing does (EXPERIMENTS.md).

    Returns:
        The directory of the copy: a valid adapter with a hash of its own and a manifest that says what it is.

    Raises:
        AdapterError: the source is no valid adapter.
        ValueError: ``scale`` is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale = {scale!r} would damage nothing; a positive number is expected")
    source_sha256 = adapter_hash(source_dir)
    config = (source_dir / CONFIG_FILE).read_bytes()
    manifest = read_json(source_dir / MANIFEST_FILE, "adapter manifest")
    stream = np.random.default_rng(seed)
    noisy: dict[str, np.ndarray] = {}
    for name, tensor in sorted(load_file(source_dir / WEIGHTS_FILE).items()):
        noise = stream.standard_normal(tensor.shape, dtype=np.float32)
        noisy[name] = tensor + np.float32(scale * float(tensor.std())) * noise
    manifest |= {
        "parent_sha256": source_sha256,
        "degraded": {"from": source_sha256, "seed": seed, "scale": scale},
    }
    return publish_derived(noisy, config, manifest, out_root)
