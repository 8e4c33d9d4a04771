"""Training speed and memory against TRL: one epoch of SFT, one GRPO update; same sequences, same cores, same dtype.

Both sides train LoRA r = 16 on all linear layers of SmolLM2-135M over the same token sequences: 64 calculator
episodes for SFT, 8 prompts with 8 answers each for GRPO, whose update is timed without the generation. Runs of both
sides alternate, each in a process of its own. Tokens are those of whole sequences, padding not counted. TRL computes
with its gradient checkpointing off, which is its faster setting. Options: ``dtype=float32|bfloat16`` and
``task=sft|grpo`` (both by default).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, Options, Row, measured, peer_environment
from tidegate.core.types import Example
from tidegate.engines.model_cache import resolve_model
from tidegate.signals.tasks.generate import demonstrations
from tidegate.training.launch import worker_environment

TRL = "trl==1.16.0"
OURS, PEERS = REPOSITORY / "benchmarks" / "peers" / "own_train.py", REPOSITORY / "benchmarks" / "peers" / "trl_train.py"
KINDS = ("chain_sum", "products", "basic_arithmetic", "leg_counting")


def run(options: Options) -> list[Row]:
    """Alternate the sides and report medians."""
    chosen, task_chosen = options.values.get("dtype"), options.values.get("task")
    peer = peer_environment("trl", [TRL, *same_versions("torch", "transformers", "peft", "accelerate")])
    found: defaultdict[tuple[str, str, str], list[Mapping[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model("smollm2-135m", progress=lambda text: print(text, file=sys.stderr))
        for task in [task_chosen] if task_chosen else ["sft", "grpo"]:
            data = Path(folder) / f"{task}.jsonl"
            data.write_text("".join(json.dumps(asdict(e)) + "\n" for e in _examples(task, model)), encoding="utf-8")
            for dtype in [chosen] if chosen else ["float32", "bfloat16"]:
                for _ in range(options.runs):
                    for side, python, script in (("ours", Path(sys.executable), OURS), ("trl", peer, PEERS)):
                        command = [str(python), str(script), task, dtype, str(data), str(model)]
                        found[task, dtype, side].append(_figures(command))
    rows: list[Row] = []
    for task, dtype in sorted({(task, dtype) for task, dtype, _ in found}):
        ours, trl = found[task, dtype, "ours"], found[task, dtype, "trl"]
        rows.append(_row(f"{task} {dtype}: speed", "tokens/s", ours, trl, "tokens_per_s", better="higher", target=2.5))
        rows.append(_row(f"{task} {dtype}: peak memory", "GiB", ours, trl, "peak_gib", better="lower", target=1 / 0.7))
    return rows


def _row(
    metric: str,
    unit: str,
    ours: Sequence[Mapping[str, float]],
    trl: Sequence[Mapping[str, float]],
    name: str,
    *,
    better: Any,
    target: float,
) -> Row:
    return measured(
        "train",
        metric,
        unit,
        [figures[name] for figures in ours],
        better=better,
        peer=[figures[name] for figures in trl],
        peer_name=TRL.replace("==", " "),
        target=target,
    )


def _figures(command: Sequence[str]) -> Mapping[str, float]:
    environment = worker_environment(os.environ, threads=len(os.sched_getaffinity(0)))  # threads that sleep, for both
    environment["PYTHONPATH"] = str(REPOSITORY / "src")
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    figures: Mapping[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{Path(command[1]).stem} {command[2]} {command[3]}: {figures}", file=sys.stderr)
    return figures


def same_versions(*names: str) -> list[str]:
    """Requirements that give a peer our versions of packages."""
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in names]


def _examples(task: str, model: Path) -> list[Example]:
    """Token-exact examples: demonstrations, or eight answers to each of eight prompts, half of them right."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    from tidegate.core.selection.demonstrations import demonstration_example  # noqa: PLC0415
    from tidegate.training.examples import render_example  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    shown = [pair for kind in KINDS for pair in demonstrations(kind, 16, seed=0)]
    examples: list[Example] = []
    if task == "sft":
        for number, (asked, answer) in enumerate(shown):
            given = demonstration_example(
                f"d{number:02}", opening=asked.messages, tools=asked.tools, answer=answer, kind=asked.kind
            )
            (sequence,) = render_example(tokenizer, given)
            examples.append(_tokens(f"d{number:02}", sequence.token_ids, sequence.loss_mask))
        return examples
    for prompt, (asked, _) in enumerate(shown[::8]):
        for number in range(8):
            answer = tuple(shown[(prompt * 8 + number) % len(shown)][1])[-1:]
            text = {
                "role": "assistant",
                "content": f"The answer to {asked.messages[-1]['content']} {answer[0]['content']}",
            }
            given = demonstration_example(
                f"p{prompt}a{number}", opening=asked.messages, tools=asked.tools, answer=(text,), kind=asked.kind
            )
            (sequence,) = render_example(tokenizer, given)
            scored = _tokens(f"p{prompt}a{number}", sequence.token_ids, sequence.loss_mask)
            examples.append(_scored(scored, float(number % 2), f"p{prompt}"))
    return examples


def _tokens(name: str, token_ids: tuple[int, ...], loss_mask: tuple[int, ...]) -> Example:
    return Example(id=name, weight=1.0, source="episode", kind="bench", token_ids=token_ids, loss_mask=loss_mask)


def _scored(example: Example, reward: float, group: str) -> Example:
    return Example(**{**asdict(example), "reward": reward, "group": group})
