"""One timed training run of Tidegate: ``own_train.py TASK DTYPE DATA MODEL`` prints figures as a line of JSON."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tidegate.config.training import TrainingSettings
from tidegate.training import TrainingJob
from tidegate.training.run import train
from tidegate.training.worker import make_deterministic

task, dtype, data, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingSettings(
        objective="sft" if task == "sft" else "grpo",
        epochs=1,
        batch_size=8 if task == "sft" else 64,
        dtype="float32" if dtype == "float32" else "bfloat16",
        checkpoint_steps=0,
    )
    job = TrainingJob(
        examples=Path(data), base_model=Path(model), base_sha256="b" * 64, initial_adapter=None, training=settings,
        manifest_hash=None, parent_sha256=None, output_root=Path(folder), threads=0, seed=0,
        success_threshold=1.0,
    )  # fmt: skip
    make_deterministic(job.compute_threads)
    times: list[float] = []

    def emit(event: Any) -> None:
        if "plan" in event or "step" in event:
            times.append(time.perf_counter())

    report = train(job, Path(folder) / "adapter", emit=emit, clock=time.perf_counter)
seconds = times[-1] - times[0]
print(
    json.dumps(
        {
            "tokens_per_s": report.tokens / seconds,
            "seconds": seconds,
            "tokens": report.tokens,
            "steps": report.steps,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
    )
)
