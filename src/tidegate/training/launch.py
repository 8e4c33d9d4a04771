"""Running a training job in a process of its own and publishing what it made.

The worker gets a clean environment, its own process group and a scratch directory beside the adapters. Only
after it has ended well and the adapter's hash has been recomputed is the directory published, in one rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from tidegate.artifacts import adapter_hash, directory_published_at, write_atomically
from tidegate.core.errors import TrainingError
from tidegate.core.types import JsonObject
from tidegate.training.backends import backend_of
from tidegate.training.checkpoint_folder import remove_checkpoints
from tidegate.training.job import STAGING, TrainingJob, TrainingReport

_WORK_PREFIX = ".training-"
_LOCK = "lock"
_LOG = "worker.log"
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_ERROR_CHARACTERS = 500
_OUT_OF_MEMORY = (
    " (often: out of memory; lower training.max_tokens_at_once or training.max_length, or set "
    "training.gradient_checkpointing = true)"
)


def run_training(
    job: TrainingJob,
    *,
    timeout_s: float,
    nice: int = 0,
    on_progress: Callable[[JsonObject], None],
    poll_s: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
) -> TrainingReport:
    """Train in a subprocess; blocks until it has ended.

    Args:
        job: what to train.
        timeout_s: the worker is killed after this many seconds.
        nice: how far the worker steps back on the processor, 0 to 19.
        on_progress: called once before the first step with a plan (sequences, tokens, memory_bound_bytes), after each
            step with step, steps, epoch, loss, grad_norm, figures, tokens_per_s, eta_s, and with a note, a sentence for
            people, where something did not go as planned and training goes on.
        poll_s: longest time between two looks at the clock, seconds.
        clock: seconds.

    Returns:
        The report; ``report.adapter_path`` is published and complete.

    Raises:
        ConfigError: the backend is not installed, or can't train such a batch; nothing was started then.
        TrainingError: a guard failed, the worker died or took too long; nothing is published then.
    """
    backend = backend_of(job.training)
    backend.require_installed()
    backend.require_batch(job)
    job.output_root.mkdir(parents=True, exist_ok=True)
    with _work_directory(job.output_root) as work:
        job_file = work / "job.json"
        write_atomically(job_file, json.dumps(job.to_json(), indent=2).encode())
        report = _supervise(
            job, job_file, timeout_s=timeout_s, nice=nice, on_progress=on_progress, poll_s=poll_s, clock=clock
        )
        found = adapter_hash(work / STAGING)
        if found != report.adapter_sha256:
            raise TrainingError(f"the worker reported adapter {report.adapter_sha256}, its files hash to {found}")
        with directory_published_at(job.output_root / found) as scratch:
            shutil.copytree(work / STAGING, scratch, dirs_exist_ok=True)
    remove_checkpoints(job, now=time.time())  # not before: until here a run that is cut off goes on from it
    return report


def _supervise(
    job: TrainingJob,
    job_file: Path,
    *,
    timeout_s: float,
    nice: int,
    on_progress: Callable[[JsonObject], None],
    poll_s: float,
    clock: Callable[[], float],
) -> TrainingReport:
    deadline = clock() + timeout_s
    last: dict[str, Any] = {}
    with (job_file.parent / _LOG).open("wb") as log, _worker(job, job_file, nice, log) as process:
        for event in _events(process, deadline, poll_s, clock):
            kind = event.pop("event", None)
            if kind == "progress":
                on_progress(event)
            last = {"event": kind, **event}
        if clock() >= deadline and process.poll() is None:
            raise TrainingError(
                f"training took longer than {timeout_s:g} s and was ended; last heard: {last or 'nothing'}. "
                "Raise training.timeout_s, or lower training.epochs or curation.max_examples"
            )
        try:
            code = process.wait(timeout=max(0.0, deadline - clock()))
        except subprocess.TimeoutExpired as error:
            raise TrainingError(f"the training process did not end within {timeout_s:g} s and was killed") from error
    if code == 0 and last.get("event") == "report":
        return TrainingReport.from_json(last["report"])
    raise TrainingError(_failure(code, last, job_file.parent / _LOG))


@contextlib.contextmanager
def _worker(job: TrainingJob, job_file: Path, nice: int, log: Any) -> Generator[subprocess.Popen[bytes]]:
    """The running worker; whatever happens, it is gone after the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate.training.worker", str(job_file), "--nice", str(nice)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=job_file.parent,
        # What libraries put aside goes with the folder, also when the worker is killed.
        env={**worker_environment(os.environ, threads=job.compute_threads), "TMPDIR": str(job_file.parent)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def worker_environment(environment: Any, *, threads: int) -> dict[str, str]:
    """The variables that a worker gets: none of Tidegate's own, fixed threads, no network."""
    kept = {
        name: value for name, value in environment.items() if name in _INHERITED or name.startswith("COVERAGE_PROCESS")
    }
    return {
        **kept,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MKL_DYNAMIC": "FALSE",
        "OMP_DYNAMIC": "FALSE",
        # Threads that spin while they wait take the processor from serving, and from their own sisters: with others
        # at work a step took ten times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
    }


def _events(
    process: subprocess.Popen[bytes], deadline: float, poll_s: float, clock: Callable[[], float]
) -> Generator[dict[str, Any]]:
    """JSON objects from the worker's stdout until it closes or the deadline passes."""
    assert process.stdout is not None  # noqa: S101 - opened as a pipe above
    handle = process.stdout.fileno()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while (left := deadline - clock()) > 0:
            if not selector.select(timeout=min(left, poll_s)):
                continue
            chunk = os.read(handle, 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # half a line of a killed worker is no news
                    value = json.loads(line)
                    if isinstance(value, dict):
                        yield value


def _failure(code: int, last: dict[str, Any], log: Path) -> str:
    if last.get("event") == "error":
        return str(last["message"])
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1][-_ERROR_CHARACTERS:] if lines else "nothing on stderr"
    if code < 0:
        name = signal.Signals(-code).name
        hint = _OUT_OF_MEMORY if -code == signal.SIGKILL else ""
        return f"the training process was ended by {name}{hint}; last line: {said}"
    return f"the training process ended with exit code {code}; last line: {said}"


@contextlib.contextmanager
def _work_directory(root: Path) -> Generator[Path]:
    """A scratch directory that is removed afterwards, or by the next run when this process dies."""
    _remove_abandoned(root)
    created = Path(tempfile.mkdtemp(prefix=".starting-", dir=root))
    with (created / _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        work = root / created.name.replace(".starting-", _WORK_PREFIX)
        created.rename(work)  # only now under the name that others clean up: it is locked already
        try:
            yield work.absolute()
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    """Remove scratch directories whose process is gone: nobody holds their lock."""
    for path in root.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError), (path / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
