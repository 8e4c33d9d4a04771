"""The trainer's forward pass over given tokens, in a process: ``python -m tidegate.training.scoring JOB.json``.

For comparing what serving states with what training would compute. It trains nothing and reads no example; it loads the
base and the adapter as a run does that starts from them. The result lies beside the job file. Importing this needs no
torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.artifacts import CONFIG_FILE, read_json, write_atomically
from tidegate.config.training import TrainingSettings
from tidegate.core.errors import AdapterError, ConfigError, TidegateError, TrainingError
from tidegate.training.job import TrainingJob
from tidegate.training.launch import worker_environment
from tidegate.training.worker import make_deterministic

RESULT = "result.json"
_SHOWN_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringJob:
    """Which weights score what.

    ``adapter`` None is the bare base model; ``dtype`` is that of the base weights, ``temperature`` > 0. ``sequences``
    are (tokens (T,), index in [1, T) of the first one that is scored).
    """

    base_model: Path
    base_sha256: str
    adapter: Path | None
    dtype: str
    threads: int
    temperature: float
    sequences: tuple[tuple[tuple[int, ...], int], ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; paths are absolute."""
        return {
            "base_model": str(self.base_model.absolute()),
            "base_sha256": self.base_sha256,
            "adapter": None if self.adapter is None else str(self.adapter.absolute()),
            "dtype": self.dtype,
            "threads": self.threads,
            "temperature": self.temperature,
            "sequences": [[list(tokens), first] for tokens, first in self.sequences],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ScoringJob:
        """The inverse of :meth:`to_json`."""
        return cls(
            base_model=Path(values["base_model"]),
            base_sha256=values["base_sha256"],
            adapter=None if values["adapter"] is None else Path(values["adapter"]),
            dtype=values["dtype"],
            threads=values["threads"],
            temperature=values["temperature"],
            sequences=tuple((tuple(tokens), first) for tokens, first in values["sequences"]),
        )


def score_sequences(job: ScoringJob, *, timeout_s: float) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities in nats of each sequence's scored tokens; blocks until the process has ended.

    Raises:
        TrainingError: the weights cannot be loaded, or the process fails or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="tidegate-scoring-") as folder:
        job_file = Path(folder) / "job.json"
        write_atomically(job_file, json.dumps(job.to_json()).encode())
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tidegate.training.scoring", str(job_file)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd=folder,
                env=worker_environment(os.environ, threads=_threads(job)),
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TrainingError(f"the trainer's forward pass took longer than {timeout_s:g} s and was ended") from error
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            said = lines[-1][-_SHOWN_CHARACTERS:] if lines else "nothing on stderr"
            raise TrainingError(f"the trainer's forward pass ended with exit code {done.returncode}: {said}")
        found = read_json(Path(folder) / RESULT, "result of the trainer's forward pass")
        return tuple(tuple(logprobs) for logprobs in found["logprobs"])


def main(arguments: Sequence[str]) -> int:
    """Run one job; returns the exit code."""
    job_file = Path(arguments[0])
    try:
        job = ScoringJob.from_json(read_json(job_file, "scoring job"))
        make_deterministic(_threads(job))
        found = score_here(job)
    except TidegateError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    write_atomically(job_file.parent / RESULT, json.dumps({"logprobs": found}).encode())
    return 0


def score_here(job: ScoringJob) -> tuple[tuple[float, ...], ...]:
    """What :func:`score_sequences` gives, computed in this process."""
    from tidegate.training.agreement import scored_sequence, sequence_logprobs  # noqa: PLC0415
    from tidegate.training.forward import prepare_forward  # noqa: PLC0415
    from tidegate.training.model import load_model  # noqa: PLC0415

    run = _as_run(job)
    trained = load_model(run)
    sequences = [
        scored_sequence(str(number), tokens, first=first) for number, (tokens, first) in enumerate(job.sequences)
    ]
    forward = prepare_forward(trained.base, trained.model, sequences)
    found = sequence_logprobs(
        forward, sequences, max_nodes=run.training.max_tokens_at_once, temperature=job.temperature
    )
    return tuple(found[sequence] for sequence in sequences)


def _as_run(job: ScoringJob) -> TrainingJob:
    """The run that would start from these weights; without a step it needs no examples and no place for its result."""
    shape: dict[str, Any] = {}
    if job.adapter is not None:
        try:
            config = read_json(job.adapter / CONFIG_FILE, "adapter configuration")
        except ConfigError as error:
            raise AdapterError(str(error)) from error
        shape = {"rank": config.get("r"), "alpha": config.get("lora_alpha")}
    return TrainingJob(
        examples=Path(os.devnull),
        base_model=job.base_model,
        base_sha256=job.base_sha256,
        initial_adapter=job.adapter,
        training=TrainingSettings.model_validate({"dtype": job.dtype, **shape}),
        manifest_hash=None,
        parent_sha256=None,
        output_root=Path(os.devnull),
        threads=job.threads,
        seed=0,
        success_threshold=1.0,
    )


def _threads(job: ScoringJob) -> int:
    return job.threads or len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
