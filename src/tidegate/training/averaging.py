"""Going only a part of the way: an adapter between two in weight space.

A challenger that started from the champion lies near it, and often what it learnt survives at half the distance while
less of what it forgot is lost (Wortsman et al. 2022, Robust fine-tuning of zero-shot models). The matrices A and B are
averaged one by one: that is a path from one adapter to the other, not an average of their products.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tidegate.artifacts import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    adapter_base,
    adapter_hash,
    computation_of,
    read_json,
)
from tidegate.core.errors import AdapterError
from tidegate.training.derived import Score, publish_derived


def average_adapters(
    start_dir: Path, end_dir: Path, out_root: Path, *, share: float, score: Score | None = None
) -> Path:
    """Write the adapter that lies ``share`` of the way from one adapter to another.

    Args:
        start_dir: a float32 adapter directory; with share 0 it would come out.
        end_dir: one of the same base and shape; with share 1 it would come out.
        out_root: where the result is published as ``<sha256>``.
        share: in (0, 1).
        score: computes what the trainer says of the result, where it said something of ``end_dir``.

    Returns:
        The directory of the result, a valid adapter whose manifest names both.

    Raises:
        AdapterError: a directory is no valid adapter, or the two do not fit each other.
        TrainingError: the result cannot be scored.
        ValueError: ``share`` is outside its range.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share = {share!r}; a number between 0 and 1 is accepted")
    start_sha256, end_sha256 = adapter_hash(start_dir), adapter_hash(end_dir)
    start, end = load_file(start_dir / WEIGHTS_FILE), load_file(end_dir / WEIGHTS_FILE)
    configs = [read_json(folder / CONFIG_FILE, "adapter configuration") for folder in (start_dir, end_dir)]
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (start, end)]
    scales = [computation_of(config) for config in configs]
    if adapter_base(start_dir) != adapter_base(end_dir) or shapes[0] != shapes[1] or scales[0] != scales[1]:
        raise AdapterError(
            f"adapters {start_sha256[:8]} and {end_sha256[:8]} differ in base, rank, scale or adapted modules; only "
            "adapters of one shape have something between them"
        )
    mixed = {name: tensor + np.float32(share) * (end[name] - tensor) for name, tensor in sorted(start.items())}
    manifest = read_json(end_dir / MANIFEST_FILE, "adapter manifest") | {
        "parent_sha256": start_sha256,
        "averaged": {"from": start_sha256, "to": end_sha256, "share": share},
    }
    return publish_derived(mixed, (end_dir / CONFIG_FILE).read_bytes(), manifest, out_root, score=score)
