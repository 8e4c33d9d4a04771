"""GGUF weights to bfloat16 safetensors, deterministically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tidegate.core.errors import ModelError
from tidegate.engines.embedded.quiet import no_progress_bars

# Fields that describe the GGUF file and not the network; a config with them cannot be saved or misleads a loader.
_DROPPED_FIELDS = (
    "quantization_config",
    "_pre_quantization_dtype",
    "transformers_version",
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
)


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write config, bfloat16 weights, tokenizer and chat template of a Llama model into ``target``.

    Raises:
        ModelError: the file cannot be read, or holds another architecture.
        OSError: ``target`` cannot be written.
    """
    folder: Any = str(gguf.parent)
    try:
        with no_progress_bars():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
            source: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    except Exception as error:  # the readers raise whatever a damaged file provokes
        raise ModelError(f"{gguf.name} cannot be read as a GGUF model: {error}") from error
    if source.config.model_type != "llama":
        raise ModelError(f"{gguf.name} holds a {source.config.model_type!r} model; only 'llama' can be converted")
    fields: dict[str, Any] = {k: v for k, v in source.config.to_dict().items() if k not in _DROPPED_FIELDS}
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    model.to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in source.state_dict().items()})
    with no_progress_bars():
        model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
