"""Publishing an adapter that was computed from others instead of trained."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash, directory_published_at
from tidegate.core.agreement import MANIFEST_KEY
from tidegate.core.types import JsonObject


def publish_derived(tensors: Mapping[str, np.ndarray], config: bytes, manifest: JsonObject, out_root: Path) -> Path:
    """Write weights, configuration and manifest as ``out_root/<sha256>``; returns that directory.

    What the trainer said of the weights that these were computed from is left out: it holds for those alone.
    """
    manifest = {name: value for name, value in manifest.items() if name != MANIFEST_KEY}
    out_root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".deriving-", dir=out_root) as work:
        made = Path(work)
        save_file(dict(tensors), made / WEIGHTS_FILE, metadata={"format": "pt"})
        (made / CONFIG_FILE).write_bytes(config)
        (made / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        target = out_root / adapter_hash(made)
        with directory_published_at(target) as scratch:
            shutil.copytree(made, scratch, dirs_exist_ok=True)
    return target
