"""A damaged copy is a valid adapter of its own, and worse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine_fixtures import write_adapter, write_tiny_model
from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_base, adapter_hash
from tidegate.core.errors import AdapterError
from tidegate.core.types import AdapterRef
from tidegate.training import degrade_adapter


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> AdapterRef:
    folder = tmp_path_factory.mktemp("degrade")
    return write_adapter(folder / "adapter", write_tiny_model(folder / "model"))


def test_the_copy_is_valid_named_by_content_and_says_what_it_is(source: AdapterRef, tmp_path: Path) -> None:
    copy = degrade_adapter(source.path, tmp_path, seed=1, scale=1.0)
    assert copy == tmp_path / adapter_hash(copy)
    assert copy.name != source.sha256
    assert adapter_base(copy) == adapter_base(source.path)
    assert (copy / CONFIG_FILE).read_bytes() == (source.path / CONFIG_FILE).read_bytes()
    manifest = json.loads((copy / MANIFEST_FILE).read_text())
    assert manifest["degraded"] == {"from": source.sha256, "seed": 1, "scale": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]


def test_the_noise_has_the_asked_size_and_the_source_is_untouched(source: AdapterRef, tmp_path: Path) -> None:
    copy = load_file(degrade_adapter(source.path, tmp_path, seed=1, scale=0.5) / WEIGHTS_FILE)
    original = load_file(source.path / WEIGHTS_FILE)
    assert adapter_hash(source.path) == source.sha256
    for name, tensor in original.items():
        assert float(np.std(copy[name] - tensor)) == pytest.approx(0.5 * float(tensor.std()), rel=0.3)


def test_the_seed_decides(source: AdapterRef, tmp_path: Path) -> None:
    first = degrade_adapter(source.path, tmp_path, seed=1, scale=1.0)
    assert degrade_adapter(source.path, tmp_path, seed=1, scale=1.0) == first
    assert degrade_adapter(source.path, tmp_path, seed=2, scale=1.0) != first


def test_bad_requests_are_refused(source: AdapterRef, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scale = 0"):
        degrade_adapter(source.path, tmp_path, seed=1, scale=0)
    with pytest.raises(AdapterError):
        degrade_adapter(tmp_path / "nowhere", tmp_path, seed=1, scale=1.0)
    assert list(tmp_path.iterdir()) == []
