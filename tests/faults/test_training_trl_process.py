"""TRL in the worker process: published like any run, quiet to the outside, and of one hash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tidegate.artifacts import adapter_hash
from tidegate.core.types import JsonObject
from tidegate.training import run_training
from tidegate.training.run import train
from training_fixtures import tiny_job

WATCHED = """
import json, os, sys
work, said = sys.argv[1], {"network": [], "written": []}
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        said["network"].append(event)
    elif event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        said["written"].append(os.path.abspath(arguments[0]))
    elif event in ("os.mkdir", "os.rename"):
        said["written"].append(os.path.abspath(arguments[0]))
sys.addaudithook(watch)
from tidegate.training import worker
code = worker.main([os.path.join(work, "job.json")])
print(json.dumps(said), file=sys.stderr)
sys.exit(code)
"""


def temporary_folders_of_children() -> set[str]:
    """Where the running processes of this one put what they put aside."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
            found.update(value for name, _, value in (line.partition("=") for line in variables) if name == "TMPDIR")
    return found


def test_a_run_is_published_under_the_hash_that_it_has_in_any_process(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, backend="trl")
    events: list[JsonObject] = []
    temporary: set[str] = set()

    def on_progress(event: JsonObject) -> None:
        events.append(event)
        temporary.update(temporary_folders_of_children())

    report = run_training(job, timeout_s=240.0, on_progress=on_progress)
    assert [Path(folder).parent for folder in temporary] == [job.output_root]
    assert not any(Path(folder).exists() for folder in temporary)
    directory = Path(report.adapter_path)
    assert directory == job.output_root / adapter_hash(directory)
    assert [path.name for path in job.output_root.iterdir()] == [report.adapter_sha256]
    assert sorted(path.name for path in directory.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tidegate.json",
    ]
    assert [event.get("step") for event in events] == [None, 1, 2, 3, 4]
    torch.set_num_threads(1)
    here = train(job, tmp_path / "adapter", emit=lambda _: None, clock=time.monotonic)
    assert here.adapter_sha256 == report.adapter_sha256


def test_it_speaks_to_nobody_and_writes_to_its_own_folder_alone(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    job = tiny_job(tmp_path, backend="trl")
    (work / "job.json").write_text(json.dumps(job.to_json()))
    launcher_lives, held_open = os.pipe()  # a worker ends when its standard input does
    # Neither CI nor the offline variables, which would silence it by themselves.
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")}
    own = {"HOME": str(home), "TMPDIR": str(work), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, str(work)],
            stdin=launcher_lives,
            capture_output=True,
            text=True,
            check=True,
            cwd=work,
            env={**kept, **own},
        )
    finally:
        os.close(launcher_lives)
        os.close(held_open)
    said: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    assert said["network"] == []
    outside = [path for path in said["written"] if not path.startswith((str(work), "/dev/"))]
    assert outside == []
    assert not list(work.glob("trl-*"))
    assert list(home.iterdir()) == []
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["progress"] * 5 + ["report"]
