"""The content hash of an adapter: what changes it and what doesn't."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tidegate.artifacts import (
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    adapter_base,
    adapter_hash,
    file_hash,
    read_json,
)
from tidegate.core.errors import AdapterError, ConfigError

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / WEIGHTS_FILE).write_bytes(b"weights")
    write(directory / CONFIG_FILE, CONFIG)
    write(directory / MANIFEST_FILE, {"base_sha256": "b" * 64, "seed": 0})
    return directory


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_the_hash_is_a_sha256(adapter: Path) -> None:
    assert len(adapter_hash(adapter)) == 64
    assert int(adapter_hash(adapter), 16) >= 0


def test_the_hash_is_the_same_in_another_place(adapter: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(adapter, copy)
    (copy / "README.md").write_text("a model card")
    assert adapter_hash(copy) == adapter_hash(adapter)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base_model_name_or_path", "/somewhere/else"),
        ("peft_version", "0.22"),
        ("inference_mode", True),
        ("target_modules", ["v_proj", "q_proj"]),
        ("alpha_pattern", None),
    ],
)
def test_what_does_not_change_the_computation_does_not_change_the_hash(adapter: Path, name: str, value: Any) -> None:
    before = adapter_hash(adapter)
    write(adapter / CONFIG_FILE, {**CONFIG, name: value})
    assert adapter_hash(adapter) == before


def test_other_manifest_fields_do_not_change_the_hash(adapter: Path) -> None:
    before = adapter_hash(adapter)
    write(adapter / MANIFEST_FILE, {"base_sha256": "b" * 64, "seed": 1})
    assert adapter_hash(adapter) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", 8),
        ("lora_alpha", 16),
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "all"),
        ("target_modules", ["q_proj"]),
        ("target_modules", "all-linear"),
        ("alpha_pattern", {"q_proj": 16}),
        ("rank_pattern", {"q_proj": 2}),
        ("layers_to_transform", [0]),
        ("modules_to_save", ["lm_head"]),
    ],
)
def test_what_changes_the_computation_changes_the_hash(adapter: Path, name: str, value: Any) -> None:
    before = adapter_hash(adapter)
    write(adapter / CONFIG_FILE, {**CONFIG, name: value})
    assert adapter_hash(adapter) != before


def test_a_pattern_is_not_a_set_of_letters(adapter: Path) -> None:
    hashes: set[str] = set()
    for pattern in ("q_proj|v", "v|q_proj"):
        write(adapter / CONFIG_FILE, {**CONFIG, "target_modules": pattern})
        hashes.add(adapter_hash(adapter))
    assert len(hashes) == 2


def test_weights_and_base_change_the_hash(adapter: Path) -> None:
    hashes = {adapter_hash(adapter)}
    (adapter / WEIGHTS_FILE).write_bytes(b"Weights")
    hashes.add(adapter_hash(adapter))
    write(adapter / MANIFEST_FILE, {"base_sha256": "c" * 64})
    hashes.add(adapter_hash(adapter))
    assert len(hashes) == 3
    assert adapter_base(adapter) == "c" * 64


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE])
def test_a_missing_file_is_named(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    with pytest.raises(AdapterError, match=name.replace(".", r"\.")):
        adapter_hash(adapter)


@pytest.mark.parametrize("name", [CONFIG_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_malformed_file_is_named(adapter: Path, name: str, content: str) -> None:
    (adapter / name).write_text(content)
    with pytest.raises(AdapterError, match=name.replace(".", r"\.")):
        adapter_hash(adapter)


def test_an_adapter_without_base_is_refused(adapter: Path) -> None:
    write(adapter / MANIFEST_FILE, {"base_sha256": None})
    with pytest.raises(AdapterError, match="no base_sha256"):
        adapter_hash(adapter)
    with pytest.raises(AdapterError, match="no base_sha256"):
        adapter_base(adapter)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no such directory"):
        adapter_hash(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match="incomplete"):
        adapter_base(tmp_path / "nowhere")


def test_pickled_weights_are_not_accepted(adapter: Path) -> None:
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match="only safetensors are accepted"):
        adapter_hash(adapter)


def test_large_files_are_hashed_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(b"a" * (1 << 20) + b"b")
    assert file_hash(file) == "371264331be3a89bb42c4fea3770469e9094f6ce8c8244b9ac2beb9ffd80e621"


def test_read_json_names_what_was_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy '.*nowhere' does not exist"):
        read_json(tmp_path / "nowhere", "policy")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_json(tmp_path, "policy")
