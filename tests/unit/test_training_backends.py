"""Which backend trains: what each refuses, before anything is loaded."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tidegate.app.learning import train_demonstrations
from tidegate.config import Settings, load_settings
from tidegate.config.training import TrainingSettings, supervised
from tidegate.core.errors import ConfigError
from tidegate.training import TrainingJob, backend_of, run_training
from tidegate.training.backends import TrlBackend
from training_fixtures import agent_example, tiny_job


def start(job: TrainingJob) -> Any:
    return run_training(job, timeout_s=60.0, on_progress=lambda _: None)


def settings_of(folder: Path, text: str) -> Settings:
    file = folder / "tidegate.toml"
    file.write_text(f"[training]\n{text}\n")
    return load_settings(file)


@pytest.mark.parametrize("objective", ["grpo", "reinforce", "gspo", "cispo", "kto"])
def test_objectives_that_trl_lacks_for_recorded_answers_are_refused(tmp_path: Path, objective: str) -> None:
    with pytest.raises(ConfigError, match=rf"objective = '{objective}' with backend = 'trl'.*'sft' and 'dpo'.*'own'"):
        settings_of(tmp_path, f'backend = "trl"\nobjective = "{objective}"')


def test_the_divergence_from_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kl_coefficient = 0\.1 with backend = 'trl'.*leave it 0.*'own'"):
        settings_of(tmp_path, 'backend = "trl"\nkl_coefficient = 0.1')


def test_what_trl_takes_is_taken(tmp_path: Path) -> None:
    assert settings_of(tmp_path, 'backend = "trl"\nobjective = "dpo"').training.backend == "trl"
    assert supervised(TrainingSettings(backend="trl", objective="dpo")).backend == "trl"
    assert TrainingSettings().backend == "own"
    with pytest.raises(ConfigError, match=r"training\.backend = 'verl'"):
        settings_of(tmp_path, 'backend = "verl"')


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_unequal_weights_are_refused_before_a_process_starts(tmp_path: Path, objective: str) -> None:
    examples = [agent_example(0), agent_example(1, weight=0.5), agent_example(2)]
    job = tiny_job(tmp_path, examples=examples, backend="trl", objective=objective)
    with pytest.raises(ConfigError, match=r"unequal weights \(0\.5 of 'e1' to 1 of 'e2'\).*training\.backend = 'own'"):
        start(job)
    assert not job.output_root.exists()
    backend_of(TrainingSettings()).require_batch(job)


def test_weights_that_differ_by_rounding_are_equal(tmp_path: Path) -> None:
    examples = [agent_example(0, weight=1.000000001), agent_example(1)]
    TrlBackend().require_batch(tiny_job(tmp_path, examples=examples, backend="trl"))
    TrlBackend().require_batch(tiny_job(tmp_path, examples=[], backend="trl"))


@pytest.mark.parametrize("absent", ["trl", "datasets", "accelerate"])
def test_a_missing_package_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setattr("tidegate.training.backends.find_spec", lambda name: None if name == absent else object())
    job = tiny_job(tmp_path, backend="trl")
    with pytest.raises(ConfigError, match=rf"needs the package '{absent}'.*pip install 'tidegate\[trl\]'.*'own'"):
        start(job)
    assert not job.output_root.exists()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    TrlBackend().require_installed()
    monkeypatch.setattr("tidegate.training.backends.version", lambda name: "1.15.2" if name == "trl" else version(name))
    with pytest.raises(ConfigError, match=r"trl 1\.15\.2 installed; it needs trl 1\.16\.x"):
        TrlBackend().require_installed()


def test_a_pass_over_demonstrations_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.training.backends.find_spec", lambda _: None)
    file = tmp_path / "tidegate.toml"
    file.write_text(f'data_dir = "{tmp_path / "data"}"\n[training]\nbackend = "trl"\n')
    with pytest.raises(ConfigError, match=r"tidegate\[trl\]"):
        train_demonstrations(load_settings(file), tmp_path / "missing.jsonl", say=lambda _: None)
    assert not (tmp_path / "data").exists()
