"""Random adapters for the small model: what is measured depends on their shapes, not on what they know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash
from tidegate.core.types import AdapterRef

RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_A_SCALE, _B_SCALE = 0.05, 0.02
"""Large enough that every logit moves, small enough that the model still writes words."""


def random_adapter(root: Path, model: Path, base_sha256: str, *, seed: int) -> AdapterRef:
    """A LoRA of rank 16 on every linear layer, in a folder of ``root`` that its content names."""
    stream = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                if name.split(".")[-2] not in TARGETS:
                    continue
                rows, columns = weights.get_slice(name).get_shape()
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=stream) * _A_SCALE
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=stream) * _B_SCALE
    folder = root / f"making-{seed}"
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0,
        "target_modules": list(TARGETS), "bias": "none", "use_dora": False, "use_rslora": False,
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(fields), encoding="utf-8")
    (folder / MANIFEST_FILE).write_text(json.dumps({"base_sha256": base_sha256}), encoding="utf-8")
    sha256 = adapter_hash(folder)
    named = root / sha256
    if named.exists():
        shutil.rmtree(folder)
    else:
        folder.rename(named)
    return AdapterRef(name=f"bench-{sha256[:8]}", path=named, sha256=sha256)
