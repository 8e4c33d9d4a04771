"""LoRA adapters: read once, checked against their hash, the base and PEFT's format, merged into a copy.

A merged copy computes as fast as the base; every tensor that the adapter does not touch is shared with it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_content_hash
from tidegate.core.errors import AdapterError
from tidegate.core.types import AdapterRef

_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
# PEFT options that change the computation in ways that plain W + scale * B A does not express.
_REFUSED_OPTIONS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """A checked adapter. ``pairs`` maps a module name to A (rank, in) and B (out, rank); float32 or narrower."""

    ref: AdapterRef
    scale: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def read_adapter(ref: AdapterRef, *, base_sha256: str, model: Any) -> LoraWeights:
    """Read an adapter directory; what is hashed is exactly what is used.

    Args:
        ref: name, directory and expected content hash.
        base_sha256: hash of the base model that it must belong to.
        model: the base model.

    Raises:
        AdapterError: anything about the directory is not as it must be.
    """
    config, manifest, raw = _read_files(ref)
    base = manifest.get("base_sha256")
    if not isinstance(base, str):
        raise AdapterError(f"adapter {ref.name!r}: {MANIFEST_FILE} names no base_sha256")
    try:
        digest = adapter_content_hash(hashlib.sha256(raw).hexdigest(), config, manifest)
    except (TypeError, ValueError) as error:  # a NaN or a list of mixed types in one of them
        raise AdapterError(
            f"adapter {ref.name!r}: {CONFIG_FILE} and {MANIFEST_FILE} cannot be hashed: {error}"
        ) from error
    if digest != ref.sha256:
        raise AdapterError(
            f"adapter {ref.name!r} in {str(ref.path)!r} hashes to {digest}, expected {ref.sha256}: "
            "its files are not those that were released; restore them or release it anew"
        )
    if base != base_sha256:
        raise AdapterError(
            f"adapter {ref.name!r} was trained on base {base}, this engine serves base {base_sha256}; "
            "serve the base that it belongs to, or train it on this one"
        )
    scale, rank, targets = _checked_config(ref.name, config)
    try:
        tensors = load_safetensors(raw)
    except Exception as error:  # the reader raises its own untyped errors
        raise AdapterError(f"adapter {ref.name!r}: {WEIGHTS_FILE} cannot be read: {error}") from error
    pairs = _paired(ref.name, tensors)
    _check_fit(ref.name, pairs, model, rank, targets)
    return LoraWeights(ref=ref, scale=scale, pairs=pairs)


def merged_model(base: Any, weights: LoraWeights) -> Any:
    """A copy of ``base`` with W + scale * B A (computed in float32) where the adapter has a pair."""
    shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    merged = copy.deepcopy(base, shared)
    with torch.no_grad():
        for name, (lora_a, lora_b) in weights.pairs.items():
            module = merged.get_submodule(name)
            kept: torch.Tensor = module.weight
            update = torch.addmm(kept.float(), lora_b.float(), lora_a.float(), alpha=weights.scale)
            module.weight = torch.nn.Parameter(update.to(kept.dtype), requires_grad=False)
    return merged


def _read_files(ref: AdapterRef) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    found: list[dict[str, Any]] = []
    for name in (CONFIG_FILE, MANIFEST_FILE):
        try:
            value = json.loads((ref.path / name).read_bytes())
        except (OSError, ValueError) as error:
            raise AdapterError(f"adapter {ref.name!r} in {str(ref.path)!r}: {name} is unreadable: {error}") from error
        if not isinstance(value, dict):
            raise AdapterError(f"adapter {ref.name!r}: {name} holds {type(value).__name__}, not a JSON object")
        found.append(value)
    try:
        raw = (ref.path / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        files = _listed(ref.path)
        raise AdapterError(
            f"adapter {ref.name!r} in {str(ref.path)!r} has no readable {WEIGHTS_FILE} (found: {files}); "
            "only safetensors are accepted"
        ) from error
    return found[0], found[1], raw


def _listed(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir()) if path.is_dir() else []


def _checked_config(name: str, config: Mapping[str, Any]) -> tuple[float, int, frozenset[str]]:
    """Scale, rank and target module names of a plain LoRA configuration."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"adapter {name!r} has peft_type {config.get('peft_type')!r}; only 'LORA' can be served")
    used = {option: config[option] for option in _REFUSED_OPTIONS if config.get(option)}
    if config.get("bias", "none") != "none":
        used["bias"] = config["bias"]
    if used:
        raise AdapterError(f"adapter {name!r} uses {used}; only plain LoRA on linear weights can be served")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise AdapterError(f"adapter {name!r} has r = {rank!r}, lora_alpha = {alpha!r}; numbers, r >= 1, are expected")
    if not isinstance(targets, list) or not targets:
        raise AdapterError(f"adapter {name!r} has target_modules {targets!r}; a list of module names is expected")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), rank, frozenset(map(str, targets))


def _paired(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in sorted(tensors.items()):  # the file gives them in any order; messages name the first
        suffix = next((end for end in _SUFFIXES if key.endswith(end)), None)
        if suffix is None or not key.startswith(_PREFIX):
            raise AdapterError(
                f"adapter {name!r} holds tensor {key!r}; only {_PREFIX}<module>{_SUFFIXES[0]} and {_SUFFIXES[1]} "
                "can be served"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"adapter {name!r}: tensor {key!r} ({tensor.dtype}) holds NaN, infinity or no numbers")
        halves.setdefault(key[len(_PREFIX) : -len(suffix)], {})[suffix] = tensor
    lonely = sorted(module for module, pair in halves.items() if len(pair) != 2)
    if lonely or not halves:
        raise AdapterError(f"adapter {name!r} lacks one of A and B for modules {lonely or '(no tensors at all)'}")
    return {module: (pair[_SUFFIXES[0]], pair[_SUFFIXES[1]]) for module, pair in halves.items()}


def _check_fit(
    name: str,
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    model: Any,
    rank: int,
    targets: frozenset[str],
) -> None:
    linear = {key: module for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    expected = {key for key in linear if any(key == target or key.endswith(f".{target}") for target in targets)}
    if set(pairs) != expected:
        raise AdapterError(
            f"adapter {name!r} with target_modules {sorted(targets)} must hold the {len(expected)} linear modules of "
            f"this base that they name; missing: {sorted(expected - set(pairs))[:5]}, "
            f"not there: {sorted(set(pairs) - expected)[:5]}"
        )
    for module_name, (lora_a, lora_b) in pairs.items():
        out_features, in_features = linear[module_name].weight.shape
        shapes = (tuple(lora_a.shape), tuple(lora_b.shape))
        wanted = ((rank, in_features), (out_features, rank))
        if shapes != wanted:
            raise AdapterError(
                f"adapter {name!r}: module {module_name!r} has A and B of shapes {shapes}, expected {wanted} "
                f"(r = {rank}, weight {out_features} x {in_features})"
            )
