"""Publishing an adapter that was computed from others instead of trained."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from safetensors.numpy import save_file

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash, directory_published_at
from tidegate.core.agreement import MANIFEST_KEY, record_in
from tidegate.core.types import JsonObject

Score: TypeAlias = Callable[[Path, Sequence[tuple[tuple[int, ...], int]]], Sequence[Sequence[float]]]
"""The trainer's log-probabilities of sequences (tokens, index of the first scored one) under an adapter directory."""


def publish_derived(
    tensors: Mapping[str, np.ndarray],
    config: bytes,
    manifest: JsonObject,
    out_root: Path,
    *,
    score: Score | None = None,
) -> Path:
    """Write weights, configuration and manifest as ``out_root/<sha256>``; returns that directory.

    What the trainer said of the weights that these were computed from holds for those alone. With ``score`` the same
    texts are scored anew; without it, or where nothing was said, the result has no such record.

    Raises:
        AdapterError, TrainingError: the weights cannot be scored.
    """
    record = None if score is None else record_in(manifest, adapter="the one that another is computed from")
    manifest = {name: value for name, value in manifest.items() if name != MANIFEST_KEY}
    out_root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".deriving-", dir=out_root) as work:
        made = Path(work)
        save_file(dict(tensors), made / WEIGHTS_FILE, metadata={"format": "pt"})
        (made / CONFIG_FILE).write_bytes(config)
        _write_manifest(made, manifest)
        if score is not None and record is not None:
            found = score(made, [(sequence.token_ids, sequence.first) for sequence in record.sequences])
            _write_manifest(made, {**manifest, MANIFEST_KEY: record.with_logprobs(found).to_json()})
        target = out_root / adapter_hash(made)
        with directory_published_at(target) as scratch:
            shutil.copytree(made, scratch, dirs_exist_ok=True)
    return target


def _write_manifest(directory: Path, manifest: JsonObject) -> None:
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
