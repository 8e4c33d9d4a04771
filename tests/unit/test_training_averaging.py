"""An adapter between two: where it lies, what it says of itself, and what has nothing between."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine_fixtures import write_adapter, write_tiny_model
from tidegate.artifacts import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, adapter_base, adapter_hash
from tidegate.core.errors import AdapterError
from tidegate.training import average_adapters, degrade_adapter


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter and one that lies elsewhere."""
    folder = tmp_path_factory.mktemp("average")
    start = write_adapter(folder / "adapter", write_tiny_model(folder / "model")).path
    return start, degrade_adapter(start, folder, seed=1, scale=1.0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_it_lies_its_share_of_the_way(ends: tuple[Path, Path], tmp_path: Path, share: float) -> None:
    made = average_adapters(*ends, tmp_path, share=share)
    start, end, found = (load_file(folder / WEIGHTS_FILE) for folder in (*ends, made))
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, (1 - share) * start[name] + share * end[name], rtol=1e-5, atol=1e-6)
    assert made == tmp_path / adapter_hash(made)
    assert adapter_base(made) == adapter_base(ends[0])
    about = json.loads((made / MANIFEST_FILE).read_text(encoding="utf-8"))
    assert about["averaged"] == {"from": adapter_hash(ends[0]), "to": adapter_hash(ends[1]), "share": share}
    assert about["parent_sha256"] == adapter_hash(ends[0])
    assert [path.name for path in tmp_path.iterdir()] == [made.name]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_the_ends_are_no_averages(ends: tuple[Path, Path], tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        average_adapters(*ends, tmp_path, share=share)


def test_adapters_of_another_shape_have_nothing_between(ends: tuple[Path, Path], tmp_path: Path) -> None:
    smaller = tmp_path / "smaller"
    shutil.copytree(ends[1], smaller)
    whole = load_file(smaller / WEIGHTS_FILE)
    tensors = {name: tensor[:1] if ".lora_A." in name else tensor[:, :1] for name, tensor in whole.items()}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, smaller / WEIGHTS_FILE)
    scaled = tmp_path / "scaled"
    shutil.copytree(ends[1], scaled)
    config = json.loads((scaled / CONFIG_FILE).read_text(encoding="utf-8"))
    (scaled / CONFIG_FILE).write_text(json.dumps({**config, "lora_alpha": 3}), encoding="utf-8")
    for other in (smaller, scaled):
        with pytest.raises(AdapterError, match="differ in base, rank, scale"):
            average_adapters(ends[0], other, tmp_path / "out", share=0.5)
    assert not (tmp_path / "out").exists()
