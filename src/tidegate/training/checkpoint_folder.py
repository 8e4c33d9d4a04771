"""Where the state of a run lies, and when it goes. No torch here: the launcher removes what the worker wrote."""

from __future__ import annotations

import contextlib
import shutil
from importlib.metadata import version
from pathlib import Path

from tidegate.artifacts import file_hash
from tidegate.core.hashing import content_hash
from tidegate.training.backends import backend_of
from tidegate.training.job import TrainingJob

FOLDER = ".checkpoints"
SCHEMA = "tidegate.checkpoint/1"

_WITHOUT_EFFECT = ("timeout_s", "checkpoint_steps", "averaging", "seed")  # the job has a seed of its own

ABANDONED_S = 30 * 86400.0
"""Age after which nobody will go on with a run; younger ones may be under way, or wait to be."""


def job_fingerprint(job: TrainingJob) -> str:
    """Content hash of everything that decides what the run computes; where its files lie does not.

    Raises:
        OSError: the examples cannot be read.
    """
    values = job.to_json()
    for place in ("examples", "base_model", "initial_adapter", "output_root"):
        del values[place]
    values["threads"] = job.compute_threads
    values["training"] = {name: value for name, value in values["training"].items() if name not in _WITHOUT_EFFECT}
    versions = {name: version(name) for name in ("torch", *backend_of(job.training).packages)}
    return content_hash({"schema": SCHEMA, **versions, "examples": file_hash(job.examples), **values})


def checkpoint_folder(job: TrainingJob) -> Path:
    """Beside the adapters, under a name that stands for the whole job."""
    return job.output_root / FOLDER / job_fingerprint(job)


def remove_checkpoints(job: TrainingJob, *, now: float) -> None:
    """Forget the state of a job whose adapter is published, and states that were given up long ago.

    What cannot be removed now, as its disk or its examples are gone, is removed when it is old.

    Args:
        job: whose state goes; those of other jobs stay while they are young.
        now: seconds since the epoch.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(checkpoint_folder(job), ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in (job.output_root / FOLDER).iterdir():
            if now - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
        (job.output_root / FOLDER).rmdir()  # only when it is empty
