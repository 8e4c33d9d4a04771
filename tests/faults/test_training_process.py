"""The worker as a process: reproducible, isolated, and without a trace when it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate.artifacts import adapter_hash
from tidegate.core.errors import TrainingError
from tidegate.core.types import JsonObject
from tidegate.training import TrainingJob, run_training
from training_fixtures import tiny_job

DEADLINE_S = 120.0


def nothing(progress: JsonObject) -> None:
    del progress


def children(pid: int | str = "self") -> list[int]:
    """Process ids of the direct children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found.extend(int(child) for child in (task / "children").read_text().split())
    return found


def workers(pid: int | str = "self") -> list[int]:
    return [child for child in children(pid) if b"tidegate.training.worker" in command_line(child)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.02)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def train(job: TrainingJob, **options: Any) -> Any:
    return run_training(job, **{"timeout_s": DEADLINE_S, "on_progress": nothing, **options})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingJob, Path, list[JsonObject]]:
    """A job that ran to its end: job, published directory, progress."""
    job = tiny_job(tmp_path_factory.mktemp("undisturbed"))
    events: list[JsonObject] = []
    report = train(job, on_progress=events.append)
    return job, Path(report.adapter_path), events


def test_a_run_is_published_under_its_hash(undisturbed: tuple[TrainingJob, Path, list[JsonObject]]) -> None:
    job, published, events = undisturbed
    assert published == job.output_root / adapter_hash(published)
    assert names(job.output_root) == [published.name]
    assert names(published) == ["adapter_config.json", "adapter_model.safetensors", "tidegate.json"]
    assert [event.get("step") for event in events] == [None, 1, 2, 3, 4]


def test_killed_in_the_middle_it_leaves_nothing_and_runs_again_to_the_same_bytes(
    undisturbed: tuple[TrainingJob, Path, list[JsonObject]], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, base_model=undisturbed[0].base_model)

    def kill(progress: JsonObject) -> None:
        if progress.get("step") == 2:
            (worker,) = workers()
            os.kill(worker, signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"SIGKILL .*training\.max_tokens_at_once.*gradient_checkpointing"):
        train(job, on_progress=kill)
    assert names(job.output_root) == []
    report = train(job)
    assert report.adapter_sha256 == undisturbed[1].name
    assert files(Path(report.adapter_path)) == files(undisturbed[1])


def test_a_state_stays_until_the_adapter_is_published(
    undisturbed: tuple[TrainingJob, Path, list[JsonObject]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tmp_path, base_model=undisturbed[0].base_model, checkpoint_steps=2)
    other = job.output_root / ".checkpoints" / "other"
    other.mkdir(parents=True)
    monkeypatch.setattr("tidegate.training.launch.adapter_hash", lambda _: "f" * 64)
    with pytest.raises(TrainingError, match="its files hash to"):
        train(job)
    monkeypatch.undo()
    assert len(names(job.output_root / ".checkpoints")) == 2
    report = train(job)
    assert report.resumed_at == 2
    assert names(job.output_root / ".checkpoints") == ["other"]


def test_a_run_that_takes_too_long_is_ended(
    undisturbed: tuple[TrainingJob, Path, list[JsonObject]], tmp_path: Path
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    job = tiny_job(tmp_path, base_model=undisturbed[0].base_model, epochs=5000)
    hours: list[float] = []
    seen: list[int] = []

    def clock() -> float:
        return 3600.0 * len(hours)

    def on_progress(progress: JsonObject) -> None:
        seen.extend(workers())
        if "step" in progress:
            hours.append(1.0)

    with pytest.raises(TrainingError, match=r"longer than 1800 s .*'step': 1.*training\.timeout_s"):
        train(job, timeout_s=1800.0, on_progress=on_progress, clock=clock)
    assert not any(map(is_running, seen))
    assert names(job.output_root) == []
    assert bystander.poll() is None
    bystander.communicate()


def test_an_error_of_a_listener_ends_the_worker(
    undisturbed: tuple[TrainingJob, Path, list[JsonObject]], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, base_model=undisturbed[0].base_model, epochs=5000)
    seen: list[int] = []

    def fail(progress: JsonObject) -> None:
        if "step" in progress:
            seen.extend(workers())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(job, on_progress=fail)
    assert seen
    assert not any(map(is_running, seen))
    assert names(job.output_root) == []


LAUNCH = """
import json, sys
from tidegate.training import TrainingJob, run_training
job = TrainingJob.from_json(json.loads(sys.argv[1]))
def show(progress):
    if "step" in progress:
        print(progress["step"], flush=True)
run_training(job, timeout_s=600, on_progress=show)
"""


def test_the_worker_ends_with_its_launcher_and_the_next_run_cleans_up(
    undisturbed: tuple[TrainingJob, Path, list[JsonObject]], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, base_model=undisturbed[0].base_model, epochs=5000)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, json.dumps(job.to_json())], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline().strip() == b"1"
    (worker,) = workers(launcher.pid)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: not is_running(worker), "the end of the orphaned worker")
    assert [name.startswith(".training-") for name in names(job.output_root)] == [True]
    report = train(tiny_job(tmp_path, base_model=undisturbed[0].base_model))
    assert names(job.output_root) == [report.adapter_sha256] == [undisturbed[1].name]


def test_a_failed_guard_arrives_as_the_workers_own_words(
    undisturbed: tuple[TrainingJob, Path, list[JsonObject]], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, base_model=undisturbed[0].base_model, learning_rate=1e30)
    with pytest.raises(TrainingError, match=r"^step 2 of 4: .*not finite"):
        train(job)
    assert names(job.output_root) == []


def test_a_worker_that_cannot_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no interpreter here >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    job = tiny_job(tmp_path)
    with pytest.raises(TrainingError, match="exit code 3; last line: no interpreter here"):
        train(job)
    assert names(job.output_root) == []


def test_without_a_launcher_a_worker_ends_at_once(tmp_path: Path) -> None:
    job_file = tmp_path / "job.json"
    job_file.write_text(json.dumps(tiny_job(tmp_path).to_json()))
    command = [sys.executable, "-m", "tidegate.training.worker", str(job_file)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (70, b"")
    assert not (tmp_path / "adapter").exists()


RUN_AND_LIST = """
import sys
from tidegate.training import worker
code = worker.main(sys.argv[1:])
others = ("sqlite3", "sqlalchemy", "trl", "datasets")
names = sorted(name for name in sys.modules if name.startswith("tidegate.") or name in others)
print("\\n".join(names), file=sys.stderr)
sys.exit(code)
"""


def test_the_worker_imports_no_store_and_speaks_only_json(
    undisturbed: tuple[TrainingJob, Path, list[JsonObject]], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, base_model=undisturbed[0].base_model)
    job_file = tmp_path / "work" / "job.json"
    job_file.parent.mkdir()
    job_file.write_text(json.dumps(job.to_json()))
    launcher_lives, held_open = os.pipe()  # a worker ends when its standard input does
    uncovered = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN_AND_LIST, str(job_file)],
            stdin=launcher_lives,
            capture_output=True,
            text=True,
            check=True,
            env={**uncovered, "OMP_NUM_THREADS": "1"},  # the coverage tool itself imports sqlite3
        )
    finally:
        os.close(launcher_lives)
        os.close(held_open)
    imported = set(done.stderr.split())
    assert "tidegate.training.run" in imported
    allowed = ("tidegate.training", "tidegate.core", "tidegate.config", "tidegate.artifacts", "tidegate.machine")
    assert not [name for name in imported if name.startswith("tidegate.") and not name.startswith(allowed)]
    assert not imported & {"sqlite3", "sqlalchemy", "trl", "datasets"}
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["progress"] * 5 + ["report"]
