"""Jobs travel as JSON, and nothing torch comes along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.config.training import TrainingSettings
from tidegate.core.errors import TrainingError
from tidegate.training import TrainingJob
from tidegate.training.launch import worker_environment


def job(folder: Path) -> TrainingJob:
    return TrainingJob(
        examples=folder / "examples.jsonl",
        base_model=folder / "model",
        base_sha256="b" * 64,
        initial_adapter=None,
        training=TrainingSettings(epochs=3),
        manifest_hash="m",
        parent_sha256=None,
        output_root=folder / "out",
        threads=0,
        seed=5,
        success_threshold=0.8,
    )


def test_a_job_survives_the_journey(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job(tmp_path).to_json()))
    assert TrainingJob.read(path) == job(tmp_path)
    assert job(tmp_path).compute_threads >= 1


def test_relative_paths_become_absolute() -> None:
    values = job(Path("somewhere")).to_json()
    assert all(Path(values[name]).is_absolute() for name in ("examples", "base_model", "output_root"))


def test_unusable_jobs_are_named(tmp_path: Path) -> None:
    values = job(tmp_path).to_json()
    with pytest.raises(TrainingError, match="surprise"):
        TrainingJob.from_json({**values, "surprise": 1})
    with pytest.raises(TrainingError, match="epochs"):
        TrainingJob.from_json({**values, "training": {"epochs": 0}})
    with pytest.raises(TrainingError, match="does not exist"):
        TrainingJob.read(tmp_path / "missing.json")


def test_the_trainer_is_told_of_no_database(tmp_path: Path) -> None:
    given = {"PATH": "/bin", "TIDEGATE_DATA_DIR": "/data", "TIDEGATE_SERVER__PORT": "1", "AWS_SECRET": "x"}
    environment = worker_environment(given, threads=2)
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert not [name for name in environment if name.startswith(("TIDEGATE", "AWS"))]
    assert not [name for name in job(tmp_path).to_json() if "data" in name]


def test_asking_for_training_imports_no_torch() -> None:
    code = "import sys, tidegate.training; print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
