"""The base model with LoRA matrices on every linear layer but the output head."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from tidegate.artifacts import CONFIG_FILE, WEIGHTS_FILE, adapter_base, adapter_hash, computation_of, read_json
from tidegate.core.errors import AdapterError, ConfigError, TrainingError
from tidegate.training.job import TrainingJob

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SAMPLED_BASE_TENSORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModel:
    """``base`` is the transformers model inside ``model``; ``tensors`` are the trained ones by their file names."""

    base: Any
    model: Any
    tokenizer: Any
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.nn.Parameter]

    @property
    def trainable_parameters(self) -> int:
        """Numbers that an update changes."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)


def load_model(job: TrainingJob) -> LoraModel:
    """Load the base model, add LoRA matrices and set them to their start.

    Without an initial adapter A is drawn from ``job.seed`` and B is zero, so that the model starts as the base.

    Raises:
        TrainingError: the model cannot be loaded, has no linear layer, or the initial adapter does not fit.
    """
    folder: Any = str(job.base_model)
    offline: Any = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **offline)
        base: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[job.training.dtype], use_safetensors=True, **offline
        )
    except Exception as error:  # the loaders raise whatever a damaged or foreign directory provokes
        raise TrainingError(f"base model {folder!r} cannot be loaded: {type(error).__name__}: {error}") from error
    base.config.use_cache = False
    base.requires_grad_(False)
    lora = LoraConfig(
        r=job.training.rank,
        lora_alpha=job.training.alpha,
        target_modules="all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", FutureWarning)  # PEFT still asks transformers by a deprecated name
        torch.manual_seed(job.seed)
        try:
            model: Any = get_peft_model(base, lora)
        except ValueError as error:
            raise TrainingError(f"base model {folder!r} takes no LoRA matrices: {error}") from error
    trained = LoraModel(
        base=base, model=model, tokenizer=tokenizer, config=_portable(model, job.base_sha256), tensors=_tensors(model)
    )
    if job.training.gradient_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
    compute_without_dropout(base)
    if job.initial_adapter is not None:
        _start_from(trained, job, job.initial_adapter)
    return trained


def compute_without_dropout(base: Any) -> None:
    """Put a model into evaluation mode, apart from what transformers checkpoints in training mode only."""
    base.eval()
    for module in base.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True  # what transformers asks for; the layers inside stay without dropout


def _portable(model: Any, base_sha256: str) -> dict[str, Any]:
    """PEFT's configuration with explicit sorted module names and the base's hash in place of its path."""
    config: dict[str, Any] = model.peft_config["default"].to_dict()
    config["target_modules"] = _module_names(model)
    config["base_model_name_or_path"] = base_sha256
    config["inference_mode"] = True
    return {name: _plain(value) for name, value in sorted(config.items())}


def _module_names(model: Any) -> list[str]:
    """The adapted modules by the last part of their names, as all engines know them; whole where that says too much."""
    adapted = {name for name, module in model.base_model.model.named_modules() if hasattr(module, "lora_A")}
    short = {name.rpartition(".")[2] for name in adapted}
    meant = {
        name
        for name, module in model.base_model.model.named_modules()
        if name.rpartition(".")[2] in short and (name in adapted or isinstance(module, torch.nn.Linear))
    }
    return sorted(short if meant == adapted else adapted)


def _plain(value: Any) -> Any:
    """Enums and sets as JSON."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", value)


def _tensors(model: Any) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters, each under the name that PEFT gives it in a file."""
    by_storage = {parameter.data_ptr(): parameter for parameter in model.parameters() if parameter.requires_grad}
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: by_storage[tensor.data_ptr()] for name, tensor in sorted(state.items())}


def _start_from(trained: LoraModel, job: TrainingJob, directory: Path) -> None:
    """Copy a champion's weights in; the optimizer's state always starts fresh."""
    try:
        found, base = adapter_hash(directory), adapter_base(directory)
        config = read_json(directory / CONFIG_FILE, "adapter configuration")
        weights = load_file(directory / WEIGHTS_FILE)
    except (AdapterError, ConfigError) as error:
        raise TrainingError(f"the initial adapter cannot be used: {error}") from error
    except Exception as error:  # safetensors raises its own untyped errors
        raise TrainingError(f"initial adapter {str(directory)!r}: {WEIGHTS_FILE} is unreadable: {error}") from error
    if job.parent_sha256 is not None and found != job.parent_sha256:
        raise TrainingError(f"initial adapter {str(directory)!r} hashes to {found}, the job names {job.parent_sha256}")
    if base != job.base_sha256:
        raise TrainingError(
            f"initial adapter {str(directory)!r} belongs to base {base}, the job's is {job.base_sha256}"
        )
    shape, wanted = computation_of(config), computation_of(trained.config)
    if shape != wanted:
        raise TrainingError(
            f"initial adapter {str(directory)!r} has {shape}, the settings ask for {wanted}; "
            "keep training.rank and training.alpha, or set training.restart = 'base'"
        )
    same_names = weights.keys() == trained.tensors.keys()
    if not same_names or any(weights[name].shape != tensor.shape for name, tensor in trained.tensors.items()):
        odd = sorted(weights.keys() ^ trained.tensors.keys())[:5]
        raise TrainingError(
            f"initial adapter {str(directory)!r} holds other tensors than this base takes (differing names: {odd}); "
            "set training.restart = 'base'"
        )
    with torch.no_grad():
        for name, tensor in trained.tensors.items():
            tensor.copy_(weights[name])


def base_fingerprint(trained: LoraModel) -> str:
    """Hash of a sample of the frozen tensors: the first, the middle and the last."""
    frozen = [(n, p) for n, p in sorted(trained.model.named_parameters()) if not p.requires_grad]
    digest = hashlib.sha256()
    for index in range(_SAMPLED_BASE_TENSORS):
        name, tensor = frozen[index * (len(frozen) - 1) // (_SAMPLED_BASE_TENSORS - 1)]
        digest.update(name.encode())
        digest.update(tensor.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
