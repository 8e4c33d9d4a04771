"""Files that are named by their content: hashing, checking and publishing them without half-written states.

An adapter directory holds ``adapter_model.safetensors``, ``adapter_config.json`` (PEFT's format) and
``tidegate.json`` (our manifest: base hash, hyperparameters, manifest hash). Its content hash covers the
weights, the fields of the config that change the computation, the base hash, and what the trainer says that the weights
compute, where the manifest holds it; not the path, not times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from tidegate.core.agreement import MANIFEST_KEY
from tidegate.core.errors import AdapterError, ConfigError
from tidegate.core.hashing import content_hash

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
MANIFEST_FILE = "tidegate.json"

_CHUNK_BYTES = 1 << 20
_CONFIG_FIELDS = (
    "peft_type",
    "r",
    "rank_pattern",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "lora_bias",
    "fan_in_fan_out",
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
)
_NAME_FIELDS = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")
"""Sets of module names that PEFT writes in any order; a string is a pattern and stays as it is."""


def file_hash(path: Path) -> str:
    """SHA-256 (64 hex digits) of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: the file is missing, not JSON, or not an object; the message names ``what``.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{what} {str(path)!r} does not exist") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{what} {str(path)!r} holds {type(value).__name__}; a JSON object is expected")
    return value


def adapter_hash(directory: Path) -> str:
    """Content hash of an adapter directory: 64 hex digits.

    Raises:
        AdapterError: a file is missing or malformed.
    """
    weights = directory / WEIGHTS_FILE
    if not weights.is_file():
        found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else "no such directory"
        raise AdapterError(
            f"adapter {str(directory)!r} has no {WEIGHTS_FILE} (found: {found}); only safetensors are accepted"
        )
    try:
        config = read_json(directory / CONFIG_FILE, "adapter configuration")
        manifest = read_json(directory / MANIFEST_FILE, "adapter manifest")
    except ConfigError as error:
        raise AdapterError(f"adapter {str(directory)!r} is incomplete: {error}") from error
    if not isinstance(manifest.get("base_sha256"), str):
        raise AdapterError(f"adapter {str(directory)!r}: {MANIFEST_FILE} names no base_sha256")
    try:
        return adapter_content_hash(file_hash(weights), config, manifest)
    except (TypeError, ValueError) as error:  # a NaN or a list of mixed types
        raise AdapterError(
            f"adapter {str(directory)!r}: {CONFIG_FILE} and {MANIFEST_FILE} cannot be hashed: {error}"
        ) from error


def adapter_content_hash(weights_sha256: str, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Content hash of an adapter from its parts, for a reader that holds the bytes already.

    Args:
        weights_sha256: SHA-256 of the weights file's bytes.
        config: PEFT's configuration; only the fields that change the computation count.
        manifest: only its base hash and the trainer's record count; without a record the hash is what it was before
            there were any.
    """
    fields = {name: config.get(name) for name in _CONFIG_FIELDS}
    for name in _NAME_FIELDS:
        value = config.get(name) or []
        fields[name] = value if isinstance(value, str) else sorted(value)
    parts = {"weights": weights_sha256, "config": fields, "base_sha256": manifest["base_sha256"]}
    if manifest.get(MANIFEST_KEY) is not None:
        parts[MANIFEST_KEY] = manifest[MANIFEST_KEY]
    return content_hash(parts)


def computation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of an adapter configuration that change what its weights compute; unset ones are left out."""
    return {name: config[name] for name in _CONFIG_FIELDS if config.get(name) not in (None, False, "none", {}, [])}


def adapter_manifest(directory: Path) -> dict[str, Any]:
    """An adapter's manifest.

    Raises:
        AdapterError: it is missing or no JSON object.
    """
    try:
        return read_json(directory / MANIFEST_FILE, "adapter manifest")
    except ConfigError as error:
        raise AdapterError(f"adapter {str(directory)!r} is incomplete: {error}") from error


def adapter_base(directory: Path) -> str:
    """The base hash that an adapter's manifest names.

    Raises:
        AdapterError: the manifest is missing or names none.
    """
    base = adapter_manifest(directory).get("base_sha256")
    if not isinstance(base, str):
        raise AdapterError(f"adapter {str(directory)!r}: {MANIFEST_FILE} names no base_sha256")
    return base


def fsync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    _fsync(directory)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old bytes, the new bytes, or nothing, after any crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _scratch_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


@contextlib.contextmanager
def directory_published_at(target: Path) -> Generator[Path]:
    """Give a scratch directory that becomes ``target`` in one rename when the block ends well.

    When ``target`` exists already the scratch copy is dropped: content-named directories never change.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch_name(target)
    scratch.mkdir()
    try:
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            _fsync(path)
        _rename_unless_there(scratch, target)
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _rename_unless_there(scratch: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        scratch.rename(target)
    except OSError:
        if not target.exists():  # else another process published the same content between the two lines
            raise


def _scratch_name(path: Path) -> Path:
    """A hidden sibling, different for each call: threads and processes may write the same path at once."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
