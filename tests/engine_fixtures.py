"""A tiny random Llama with a byte tokenizer, adapters for it, and helpers to call an engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_hash
from tidegate.core.chat import encode_prompt
from tidegate.core.generation import collect
from tidegate.core.types import AdapterRef, Choice, GenerationRequest, Sampling
from tidegate.engines.embedded.engine import EmbeddedEngine
from tidegate.engines.model_cache import base_hash
from tidegate.ports import Engine

HIDDEN, INTERMEDIATE, RANK = 32, 48, 4
LONGEST = 1 << 17  # tokens; more than any test waits for
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", unk_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_tiny_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A two-layer Llama with grouped queries; large initial weights make its answers vary."""
    tokenizer = byte_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_reciting_model(folder: Path, *requests: GenerationRequest, text: str) -> Path:
    """A model that greedily answers each of ``requests`` with exactly ``text`` and the end token.

    The hidden states of a random model at the answer's positions are linearly independent when there are fewer of
    them than dimensions; the output layer is solved for.
    """
    write_tiny_model(folder, hidden_size=320, num_attention_heads=4, head_dim=16, tie_word_embeddings=False)
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = byte_tokenizer()
    states: list[torch.Tensor] = []
    targets: list[int] = []
    for request in requests:
        prompt = encode_prompt(tokenizer, request.messages, request.tools)
        answer_ids = [*tokenizer.encode(text, add_special_tokens=False), 2]
        with torch.no_grad():
            hidden = model.model(torch.tensor([[*prompt, *answer_ids[:-1]]])).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 :].double())
        targets += answer_ids
    features = torch.cat(states)
    wanted = 20.0 * torch.nn.functional.one_hot(torch.tensor(targets), len(tokenizer)).double()
    solved = torch.linalg.lstsq(features, wanted, driver="gelsd").solution
    model.lm_head.weight.data = solved.T.float().contiguous()
    model.save_pretrained(folder)
    return folder


def lora_tensors(seed: int, *, size: float = 0.3, layers: int = 2) -> dict[str, torch.Tensor]:
    """Random A and B for every target of every layer of the tiny model, under PEFT's names."""
    shapes = {f"model.layers.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in SHAPES.items()}
    return lora_for(shapes, ["q_proj", "v_proj", "down_proj"], seed=seed, size=size)


def lora_fitting(model_dir: Path, *, seed: int) -> dict[str, torch.Tensor]:
    """Random A and B for a model that may be wider than the tiny one."""
    config = json.loads((model_dir / "config.json").read_text())
    if config["hidden_size"] == HIDDEN:
        return lora_tensors(seed)
    with safe_open(model_dir / "model.safetensors", framework="pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return lora_for(shapes, ["q_proj", "v_proj", "down_proj"], seed=seed, size=0.3)


def lora_for(
    shapes: Mapping[str, tuple[int, ...]], targets: Sequence[str], *, seed: int, size: float
) -> dict[str, torch.Tensor]:
    """Random A and B for the weights (out, in) among ``shapes`` whose module is a target."""
    stream = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name.split(".")[-2] in targets:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, shape[1], generator=stream) * size
            tensors[f"{stem}.lora_B.weight"] = torch.randn(shape[0], RANK, generator=stream) * size
    return tensors


def write_adapter(
    folder: Path,
    model_dir: Path,
    *,
    name: str | None = None,
    seed: int = 1,
    tensors: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    base_sha256: str | None = None,
) -> AdapterRef:
    """An adapter directory as training publishes it, and its reference."""
    folder.mkdir(parents=True)
    save_file(dict(tensors or lora_fitting(model_dir, seed=seed)), folder / WEIGHTS_FILE)
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps({**fields, **(config or {})}))
    (folder / MANIFEST_FILE).write_text(json.dumps({"base_sha256": base_sha256 or base_hash(model_dir)}))
    return AdapterRef(name=name or folder.name, path=folder, sha256=adapter_hash(folder))


def call(content: str = "hello", *, request_id: str = "r", **options: Any) -> GenerationRequest:
    """A request with one user message; ``options`` are fields of Sampling, or ``adapter`` and ``tools``."""
    fields = {key: options.pop(key) for key in ("adapter", "tools") if key in options}
    sampling = Sampling(**{"max_tokens": 12, "temperature": 0.0, **options})
    messages = ({"role": "user", "content": content},)
    return GenerationRequest(request_id=request_id, messages=messages, sampling=sampling, **fields)


async def answer(engine: Engine, request: GenerationRequest) -> tuple[tuple[int, ...], tuple[Choice, ...]]:
    """Prompt tokens and choices of one call."""
    fold = await collect(engine.generate(request))
    return fold.prompt_token_ids, fold.choices()


@contextlib.asynccontextmanager
async def running(model_dir: Path, **options: Any) -> AsyncGenerator[EmbeddedEngine]:
    """An engine on one thread with room for answers that do not end within a test."""
    defaults = {"threads": 1, "dtype": "float32", "max_context": LONGEST}
    async with EmbeddedEngine(model_dir, **{**defaults, **options}) as engine:
        yield engine


def endless(engine: EmbeddedEngine, content: str, **options: Any) -> GenerationRequest:
    """A request whose answer only cancelling ends; from now on no token of this engine ends an answer."""
    assert engine._state is not None
    engine._state.vocabulary.end_ids = frozenset()
    return call(content, **{"max_tokens": LONGEST // 2, "temperature": 1.0, **options})


def lane_of(engine: EmbeddedEngine, adapter: str | None = None) -> Any:
    """The lane behind a resident adapter; for faults that only a broken model shows."""
    state = engine._state
    assert state is not None
    return state.residents._table[adapter].lane
