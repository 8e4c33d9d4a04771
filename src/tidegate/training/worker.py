"""The process that trains: ``python -m tidegate.training.worker JOB.json [--nice N]``.

It reads the files that the job names, writes ``adapter/`` beside the job file and speaks JSON lines on stdout:
``{"event": "progress", ...}`` after each step, then ``{"event": "report", ...}`` or ``{"event": "error", ...}``. It
opens no database. When its standard input closes, the launcher is gone and it ends at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tidegate.core.errors import TidegateError
from tidegate.core.types import JsonObject
from tidegate.training.job import STAGING, TrainingJob


def main(arguments: list[str]) -> int:
    """Run one job; returns the exit code (0 an adapter was written, 1 an error was reported)."""
    out = _claim_stdout()
    threading.Thread(target=_end_with_launcher, daemon=True).start()

    def emit(event: str, body: JsonObject) -> None:
        out.write(json.dumps({"event": event, **body}) + "\n")
        out.flush()

    try:
        job_file = Path(arguments[0])
        if arguments[1:2] == ["--nice"]:
            os.nice(int(arguments[2]))
        report = _run(job_file, partial(emit, "progress"))
    except TidegateError as error:
        emit("error", {"code": error.code, "message": str(error)})
        return 1
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the launcher raises it as TrainingError
        emit("error", {"code": "internal_error", "message": f"{type(error).__name__}: {error}"})
        return 1
    emit("report", {"report": report})
    return 0


def _run(job_file: Path, emit: Callable[[JsonObject], None]) -> dict[str, Any]:
    job = TrainingJob.read(job_file)
    make_deterministic(job.compute_threads)
    from tidegate.training.run import train  # noqa: PLC0415

    return train(job, job_file.parent / STAGING, emit=emit, clock=time.monotonic).to_json()


def make_deterministic(threads: int) -> None:
    """One rounding order on one machine: fixed threads, deterministic kernels."""
    import torch  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory before it is overwritten finds bugs elsewhere; here it costs 4 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _claim_stdout() -> TextIO:
    """Keep stdout for the protocol; whatever libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _end_with_launcher() -> None:
    while os.read(0, 1024):
        pass
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
