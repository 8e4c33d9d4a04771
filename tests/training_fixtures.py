"""Jobs on a tiny random Llama, and sequences to train it on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_fixtures import byte_tokenizer, write_tiny_model
from tidegate.config.training import TrainingSettings
from tidegate.core.types import Example, JsonObject
from tidegate.training import TrainingJob

BASE_SHA256 = "b" * 64
TOOLS: tuple[JsonObject, ...] = (
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
        },
    },
)


def agent_example(number: int, *, weight: float = 1.0) -> Example:
    """Two model calls: a tool call, then the answer."""
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": f'{{"e": "{number}+1"}}'}}
    messages: tuple[JsonObject, ...] = (
        {"role": "system", "content": "Use it."},
        {"role": "user", "content": f"{number}+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": str(number + 1)},
        {"role": "assistant", "content": f"{number + 1}"},
    )
    return Example(
        id=f"e{number}",
        weight=weight,
        source="demonstration",
        kind="sum",
        messages=messages,
        tools=TOOLS,
        trained_messages=(2, 4),
    )


def token_example(tokens: Iterable[int], *, trained: int, name: str = "t", weight: float = 1.0) -> Example:
    """The last ``trained`` tokens are the completion."""
    token_ids = tuple(tokens)
    mask = tuple(int(index >= len(token_ids) - trained) for index in range(len(token_ids)))
    return Example(id=name, weight=weight, source="episode", kind="sum", token_ids=token_ids, loss_mask=mask)


def write_examples(path: Path, examples: Iterable[Example]) -> Path:
    """JSON Lines as curation writes them."""
    path.write_text("".join(json.dumps(asdict(example)) + "\n" for example in examples), encoding="utf-8")
    return path


def tiny_job(folder: Path, *, examples: Iterable[Example] | None = None, **changes: Any) -> TrainingJob:
    """A job of a few steps; ``changes`` are fields of the job or of its training settings."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model)
    shown = tuple(agent_example(number) for number in range(6)) if examples is None else tuple(examples)
    defaults: dict[str, Any] = {"rank": 4, "alpha": 8, "epochs": 2, "batch_size": 3, "learning_rate": 1e-2}
    settings = {name: changes.pop(name, value) for name, value in defaults.items()}
    settings |= {name: changes.pop(name) for name in list(changes) if name in TrainingSettings.model_fields}
    fields: dict[str, Any] = {
        "examples": write_examples(folder / "examples.jsonl", shown),
        "base_model": model,
        "base_sha256": BASE_SHA256,
        "initial_adapter": None,
        "manifest_hash": "m" * 64,
        "parent_sha256": None,
        "output_root": folder / "adapters",
        "threads": 1,
        "seed": 0,
        "success_threshold": 1.0,
    }
    return TrainingJob(training=TrainingSettings(**settings), **{**fields, **changes})


def trained_adapter(folder: Path) -> tuple[Path, Path, str]:
    """Model directory, folder of adapters by content, and the content hash of the one in it, which the trainer made."""
    import torch

    from tidegate.engines.model_cache import base_hash
    from tidegate.training.run import train

    torch.set_num_threads(1)
    job = tiny_job(folder, epochs=2)
    job = tiny_job(folder, epochs=2, base_sha256=base_hash(job.base_model))
    report = train(job, folder / "staging", emit=lambda _: None, clock=lambda: 0.0)
    job.output_root.mkdir()
    (folder / "staging").rename(job.output_root / report.adapter_sha256)
    return job.base_model, job.output_root, report.adapter_sha256


__all__ = [
    "BASE_SHA256",
    "TOOLS",
    "agent_example",
    "byte_tokenizer",
    "tiny_job",
    "token_example",
    "trained_adapter",
    "write_examples",
    "write_tiny_model",
]
