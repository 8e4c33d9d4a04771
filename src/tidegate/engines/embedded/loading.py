"""Loading a base model: memory, dtype, end tokens, and proof that its architecture computes right in slots."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tidegate.core.errors import ModelError
from tidegate.engines.embedded.forward import Runner, architecture, refuse_unsupported_attention
from tidegate.engines.embedded.quiet import no_progress_bars
from tidegate.engines.embedded.slots import SlotCache
from tidegate.engines.model_cache import check_memory, check_model_directory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# End-of-turn tokens of common chat formats; they count where the chat template writes them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|eom_id|>", "</s>")
# Largest difference between logits in slots and without a cache, relative to their size: rounding stays far
# below it, a wrong position or mask far above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShape:
    """What one token leaves behind in each layer."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def slots(self, *, max_rows: int, max_columns: int) -> SlotCache:
        """An empty slot cache for this model."""
        return SlotCache(
            layers=self.layers,
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            max_rows=max_rows,
            max_columns=max_columns,
            dtype=self.dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A loaded base model. ``max_positions``: longest sequence it was made for; ``vocabulary_size``: its logits."""

    runner: Runner
    tokenizer: Any
    end_ids: frozenset[int]
    shape: SlotShape
    max_positions: int
    vocabulary_size: int


def choose_dtype(name: str) -> torch.dtype:
    """The dtype for a setting; ``auto`` is bfloat16 only where the processor computes in it natively.

    Elsewhere bfloat16 is emulated and measured two to three times slower than float32.

    Raises:
        ModelError: unknown name.
    """
    if name == "auto":
        native = any(
            getattr(torch.cpu, check, bool)() for check in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        )
        return torch.bfloat16 if native else torch.float32
    if name not in _DTYPES:
        raise ModelError(f"model.dtype = {name!r} is unknown; choose 'auto', 'float32' or 'bfloat16'")
    return _DTYPES[name]


def load_base(model_dir: Path, dtype: torch.dtype) -> BaseModel:
    """Load and check a base model.

    Raises:
        ModelError: files are missing, memory is short, the architecture is not supported, or the slots do not
            reproduce the model's own logits.
    """
    check_model_directory(model_dir)
    check_memory(model_dir, bytes_per_parameter=dtype.itemsize)
    folder: Any = str(model_dir)
    offline: Any = {"local_files_only": True, "trust_remote_code": False}
    try:
        with no_progress_bars():
            config: Any = AutoConfig.from_pretrained(folder, **offline)
            refuse_unsupported_attention(config)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, **offline)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **offline)
    except ModelError:
        raise
    except Exception as error:  # the loaders raise whatever a damaged or foreign directory provokes
        raise ModelError(f"model {folder!r} cannot be loaded: {type(error).__name__}: {error}") from error
    model.eval().requires_grad_(False)
    runner = Runner(model)
    text_config = model.config.get_text_config(decoder=True)
    try:
        with torch.inference_mode():
            shape = _slot_shape(model)
            _prove_slots(runner, shape, int(text_config.vocab_size))
    except ModelError:
        raise
    except Exception as error:  # an architecture that takes other arguments fails in its own way
        raise ModelError(
            f"architecture {architecture(model.config)!r} cannot be served by the embedded engine "
            f"({type(error).__name__}: {error}); serve it with an external engine"
        ) from error
    return BaseModel(
        runner=runner,
        tokenizer=tokenizer,
        end_ids=end_token_ids(model, tokenizer),
        shape=shape,
        max_positions=int(getattr(text_config, "max_position_embeddings", None) or 1 << 30),
        vocabulary_size=int(text_config.vocab_size),
    )


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer, by any of the places that name one."""
    found: set[int] = set()
    sources = (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True), tokenizer)
    for source in sources:
        value: Any = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, (list, tuple)) else [value])
    vocabulary: dict[str, int] = tokenizer.get_added_vocab()
    template = json.dumps(tokenizer.chat_template or "", ensure_ascii=False)
    found.update(vocabulary[token] for token in _TURN_ENDS if token in vocabulary and token in template)
    return frozenset(int(token_id) for token_id in found)


def _slot_shape(model: Any) -> SlotShape:
    cache: Any = DynamicCache()
    model(input_ids=torch.tensor([[0]]), cache=cache, use_cache=True, logits_to_keep=1)
    shapes = {(tuple(keys.shape[1:]), tuple(values.shape[1:])) for keys, values, *_ in cache}
    if len(shapes) != 1:
        raise ModelError(
            f"architecture {architecture(model.config)!r} keeps different states in different layers "
            f"({sorted(shapes)}); the embedded engine needs equal ones; serve it with an external engine"
        )
    ((heads, _, key_dim), (_, _, value_dim)) = shapes.pop()
    return SlotShape(layers=len(cache), heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=model.dtype)


def _prove_slots(runner: Runner, shape: SlotShape, vocabulary: int) -> None:
    """Two rows of different lengths, padded, then one step further, against the model without a cache."""
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, 9), generator=stream)
    lengths = (4, 8)
    slots = shape.slots(max_rows=2, max_columns=16)
    slots.reserve(2, 9)
    prompt = torch.arange(8).expand(2, 8)
    first = runner.advance(slots, 0, tokens[:, :8], prompt, (3, 7))
    step = torch.stack([tokens[row, length : length + 1] for row, length in enumerate(lengths)])
    second = runner.advance(slots, 0, step, torch.tensor([[length] for length in lengths]), (0,))
    for row, length in enumerate(lengths):
        expected = runner.plain_logits(tokens[row, : length + 1].tolist())[-2:]
        computed = torch.stack([first[row, row], second[row, 0]]).float()
        difference = float((computed - expected).abs().max())
        allowed = _TOLERANCE[shape.dtype] * max(1.0, float(expected.abs().max()))
        if not difference <= allowed:
            raise ModelError(
                f"architecture {architecture(runner.model.config)!r} gives other logits in the embedded engine than "
                f"by itself (difference {difference:.2g}, allowed {allowed:.2g}); serve it with an external engine"
            )
