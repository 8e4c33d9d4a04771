"""GRPO by TRL over recorded answers: ``trl_grpo.py RATE EXAMPLES MODEL ADAPTER OUT`` trains on and saves the adapter.

Runs in an environment that holds TRL and nothing of Tidegate. ``RATE`` is a learning rate or ``default``; everything
else is TRL's default except what the data fixes: as many answers a prompt and a step as were recorded. The recorded
answers and their rewards stand in for the generation and are trained on once. TRL takes groups of one size: the one
that keeps most answers. Prompts with fewer are left out, and of more the last ones; the last line says how many remain.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

rate, data, model_path, adapter_path, out = sys.argv[1:]
examples = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
model = PeftModel.from_pretrained(base, adapter_path, is_trainable=True)

groups: dict[str, list[dict[str, Any]]] = {}
for example in examples:
    groups.setdefault(example["group"], []).append(example)
sizes = sorted({len(made) for made in groups.values()} - {1})
most = max(sizes, key=lambda size: size * sum(len(made) >= size for made in groups.values()))
groups = {name: made[:most] for name, made in groups.items() if len(made) >= most}  # TRL takes groups of one size
opening = {name: made[0]["loss_mask"].index(1) for name, made in groups.items()}


def numbered(asked: list[str]) -> list[dict[str, Any]]:
    """The recorded answer for each place in a batch of prompts."""
    return [groups[name][asked[:place].count(name)] for place, name in enumerate(asked)]


def reward(prompts: list[str], completions: Any, **_: Any) -> list[float]:
    """What the verifier said of the recorded answers."""
    del completions
    return [float(made["reward"]) for made in numbered(prompts)]


class Recorded(GRPOTrainer):
    """Answers with what was recorded instead of generating."""

    def _generate(self, asked: Any) -> Any:
        made = numbered(asked)
        prompts = [e["token_ids"][: opening[name]] for e, name in zip(made, asked, strict=True)]
        given = [e["token_ids"][opening[name] :] for e, name in zip(made, asked, strict=True)]
        spoken = [e["loss_mask"][opening[name] :] for e, name in zip(made, asked, strict=True)]
        return prompts, given, spoken, tokenizer.batch_decode(given), None, {}, None, None


longest = max(len(e["token_ids"]) - opening[name] for name, made in groups.items() for e in made)
with tempfile.TemporaryDirectory() as folder:
    trainer = Recorded(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder, num_train_epochs=1, per_device_train_batch_size=most, num_generations=most,
            max_completion_length=longest, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            disable_tqdm=True, seed=0, **({} if rate == "default" else {"learning_rate": float(rate)}),
        ),
        train_dataset=Dataset.from_list([{"prompt": name} for name in groups]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
trainer.model.save_pretrained(out)
print(f"trained on {most * len(groups)} answers to {len(groups)} prompts in {trainer.state.global_step} steps")
