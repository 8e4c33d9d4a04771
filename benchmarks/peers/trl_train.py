"""One timed training run of TRL: ``trl_train.py TASK DTYPE DATA MODEL`` prints figures as a line of JSON.

Runs in an environment that holds TRL and nothing of Tidegate. SFT takes the token ids with a completion mask. For
GRPO the recorded answers stand in for the generation: ``_generate`` gives them back at once, and everything after it
is TRL's own.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

task, dtype, data, model_path = sys.argv[1:]
examples = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
precision = torch.float32 if dtype == "float32" else torch.bfloat16
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=precision, local_files_only=True)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
times: list[float] = []


class Stopwatch(TrainerCallback):
    """Notes when training starts and when each step has ended."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        times.append(time.perf_counter())


common: dict[str, Any] = {
    "num_train_epochs": 1, "learning_rate": 5e-4, "gradient_checkpointing": False, "report_to": "none", "use_cpu": True,
    "bf16": False, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "seed": 0,
}  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    if task == "sft":
        from trl import SFTConfig, SFTTrainer

        rows = [{"input_ids": e["token_ids"], "completion_mask": e["loss_mask"]} for e in examples]
        trainer: Any = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder, per_device_train_batch_size=8, max_length=None, packing=False,
                completion_only_loss=True, **common,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[Stopwatch()],
        )  # fmt: skip
    else:
        from trl import GRPOConfig, GRPOTrainer

        first = {e["group"]: e["loss_mask"].index(1) for e in examples}
        prompts = {e["group"]: e["token_ids"][: first[e["group"]]] for e in examples}
        answers = {g: [e["token_ids"][first[g] :] for e in examples if e["group"] == g] for g in prompts}

        def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
            del prompts
            return [float(number % 2) for number in range(len(completions))]

        class Recorded(GRPOTrainer):
            """Answers with what was recorded instead of generating."""

            def _generate(self, groups: Any) -> Any:
                asked = [prompts[group] for group in groups]
                numbers = [groups[:index].count(group) for index, group in enumerate(groups)]
                given = [answers[group][number] for group, number in zip(groups, numbers, strict=True)]
                return asked, given, None, tokenizer.batch_decode(given), None, {}, None, None

        rows = [{"prompt": group} for group in prompts]
        trainer = Recorded(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder, per_device_train_batch_size=8, gradient_accumulation_steps=8, num_generations=8,
                max_completion_length=128, beta=0.0, **common,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[Stopwatch()],
        )  # fmt: skip
    trainer.train()
tokens = sum(len(e["token_ids"]) for e in examples)
seconds = times[-1] - times[0]
print(
    json.dumps(
        {
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "tokens": tokens,
            "steps": len(times) - 1,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
    )
)
