"""Model directories, hub names, content hashes and the memory check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_fixtures import write_tiny_model
from tidegate.core.errors import ModelError
from tidegate.engines.model_cache import (
    base_hash,
    cache_root,
    check_memory,
    remembered_hash,
    resolve_model,
)
from tidegate.machine import available_memory_bytes


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def test_a_complete_directory_is_used_where_it_lies_and_stays_untouched(model_dir: Path, tmp_path: Path) -> None:
    before = sorted(file.name for file in model_dir.iterdir())
    assert resolve_model(str(model_dir)) == model_dir
    base_hash(model_dir, cache_dir=tmp_path / "cache")
    assert sorted(file.name for file in model_dir.iterdir()) == before


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", r"lacks config\.json"),
        ("model.safetensors", r"lacks \*\.safetensors"),
        ("tokenizer.json", r"lacks tokenizer \(tokenizer\.json or"),
    ],
)
def test_what_a_directory_lacks_is_named(model_dir: Path, removed: str, message: str) -> None:
    (model_dir / removed).unlink()
    with pytest.raises(ModelError, match=message):
        resolve_model(str(model_dir))


def test_pickle_weights_are_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickle weights \['pytorch_model\.bin'\].*safetensors"):
        resolve_model(str(model_dir))


def test_a_file_is_no_model_directory(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        resolve_model(str(model_dir / "config.json"))


def test_an_unreachable_hub_name_says_what_was_tried_and_what_to_do() -> None:
    code = (
        "from tidegate.engines.model_cache import resolve_model\n"
        "from tidegate.core.errors import ModelError\n"
        "try: resolve_model('nobody/nothing')\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"HF_HUB_OFFLINE": "1"}
    )
    assert "'nobody/nothing' is neither a directory nor one of ['smollm2-135m']" in done.stdout
    assert "pass the directory" in done.stdout


def test_the_base_hash_depends_on_names_and_bytes_alone(model_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = base_hash(model_dir, cache_dir=cache)
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert base_hash(copy, cache_dir=cache) == first
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    assert base_hash(copy, cache_dir=cache) != first
    assert len(first) == 64


def test_a_changed_file_is_hashed_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    file, cache = tmp_path / "f", tmp_path / "cache"
    file.write_bytes(b"one")
    first = remembered_hash(file, cache)
    (note,) = (cache / "hashes").iterdir()
    note.write_text(json.dumps({**json.loads(note.read_text()), "sha256": "f" * 64}))
    assert remembered_hash(file, cache) == "f" * 64  # the note was read, not the file
    file.write_bytes(b"three")
    second = remembered_hash(file, cache)
    assert second not in (first, "f" * 64)
    note.write_text("{damaged")
    assert remembered_hash(file, cache) == second


def test_a_cache_that_cannot_be_written_costs_no_more_than_time(tmp_path: Path) -> None:
    file, blocked = tmp_path / "f", tmp_path / "blocked"
    file.write_bytes(b"one")
    blocked.write_text("a file where the cache directory should be")
    assert remembered_hash(file, blocked) == remembered_hash(file, tmp_path / "cache")


def test_memory_is_compared_with_the_size_at_the_wanted_precision(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    check_memory(tmp_path, bytes_per_parameter=4, available_bytes=4000)
    with pytest.raises(ModelError, match=r"needs 0\.0 GB at 4 bytes each.*external engine"):
        check_memory(tmp_path, bytes_per_parameter=4, available_bytes=3999)
    check_memory(tmp_path, bytes_per_parameter=2, available_bytes=2000)
    assert (available_memory_bytes() or 1) > 0


@pytest.mark.parametrize("cut", [4, 20, -1])
def test_truncated_weights_are_refused_before_they_are_loaded(tmp_path: Path, cut: int) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000)}, weights)
    weights.write_bytes(weights.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"model\.safetensors' is damaged or truncated"):
        check_memory(tmp_path, bytes_per_parameter=4)


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIDEGATE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "tidegate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "tidegate"
    monkeypatch.setenv("TIDEGATE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
