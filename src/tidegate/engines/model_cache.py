"""From a model name to a directory with safetensors weights, checked and named by content.

``smollm2-135m`` is fetched, verified and converted once into the cache; a directory is checked and used where
it lies; anything else is a hub name. Nothing here imports torch unless a conversion is due, and nothing is ever
written into a directory that the user named.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidegate.artifacts import file_hash, write_atomically
from tidegate.core.errors import ModelError
from tidegate.core.hashing import content_hash
from tidegate.engines.known_models import KNOWN_MODELS, KnownModel, obtain_known_model
from tidegate.machine import available_memory_bytes

Progress = Callable[[str], None]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def cache_root() -> Path:
    """``$TIDEGATE_CACHE_DIR``, else ``$XDG_CACHE_HOME/tidegate``, else ``~/.cache/tidegate``."""
    explicit = os.environ.get("TIDEGATE_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate"


def resolve_model(spec: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The directory of a usable base model.

    Args:
        spec: a name in ``KNOWN_MODELS``, a directory, or a hub name.
        cache_dir: replaces :func:`cache_root`.
        progress: told in one line each what takes time.

    Raises:
        ModelError: the model cannot be found, fetched or verified, or lacks files.
    """
    report = progress or _silent
    known = KNOWN_MODELS.get(spec)
    if known is not None:
        return _resolve_known(known, cache_dir or cache_root(), report)
    path = Path(spec).expanduser()
    if path.exists():
        check_model_directory(path)
        return path
    return _resolve_hub(spec, report)


def check_model_directory(path: Path) -> None:
    """Refuse a directory that cannot be served.

    Raises:
        ModelError: no directory, or ``config.json``, safetensors weights or the tokenizer are missing.
    """
    if not path.is_dir():
        raise ModelError(f"model {str(path)!r} is not a directory; name the folder that holds config.json")
    missing: list[str] = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not weight_files(path):
        pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in path.glob(pattern))
        if pickles:
            raise ModelError(
                f"model {str(path)!r} has only pickle weights {pickles}, which can run code when read; "
                "convert them to safetensors (model.save_pretrained) first"
            )
        missing.append("*.safetensors")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("tokenizer (" + " or ".join(_TOKENIZER_FILES) + ")")
    if missing:
        found = sorted(file.name for file in path.iterdir())[:20]
        raise ModelError(f"model directory {str(path)!r} lacks {', '.join(missing)}; found: {found}")


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model, by name."""
    return sorted(file for file in model_dir.glob("*.safetensors") if not file.name.startswith("adapter_"))


def base_hash(model_dir: Path, *, cache_dir: Path | None = None) -> str:
    """Content hash (64 hex digits) over the names and SHA-256 of the weight files.

    File hashes are remembered in the cache directory under size and modification time, so that a second start
    does not read the weights for it.

    Raises:
        ModelError: there are no safetensors weights, or they cannot be read.
    """
    check_model_directory(model_dir)
    root = cache_dir or cache_root()
    try:
        return content_hash({file.name: remembered_hash(file, root) for file in weight_files(model_dir)})
    except OSError as error:
        raise ModelError(f"the weights of model {str(model_dir)!r} cannot be read: {error}") from error


def remembered_hash(file: Path, root: Path) -> str:
    """SHA-256 of a file, read again only when its size or modification time changed."""
    state = file.stat()
    resolved = str(file.resolve())
    note = root / "hashes" / f"{hashlib.sha256(resolved.encode()).hexdigest()[:32]}.json"
    key = {"path": resolved, "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    try:
        known: Any = json.loads(note.read_text(encoding="utf-8"))
        if isinstance(known, dict) and {name: known.get(name) for name in key} == key and len(known["sha256"]) == 64:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note yet, or a damaged one: the file itself is the truth
    digest = file_hash(file)
    with contextlib.suppress(OSError):  # a read-only or full cache costs time at the next start, nothing else
        write_atomically(note, json.dumps({**key, "sha256": digest}).encode())
    return digest


def check_memory(model_dir: Path, *, bytes_per_parameter: int, available_bytes: int | None = None) -> None:
    """Refuse a model whose weights do not fit into memory, before loading them.

    Args:
        model_dir: a directory that :func:`check_model_directory` accepts.
        bytes_per_parameter: 4 for float32, 2 for bfloat16.
        available_bytes: memory to use; None asks the system.

    Raises:
        ModelError: the weights need more, or a weight file's header is damaged.
    """
    parameters = sum(_parameter_count(file) for file in weight_files(model_dir))
    needed = parameters * bytes_per_parameter
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if available is not None and needed > available:
        raise ModelError(
            f"model {str(model_dir)!r} has {parameters / 1e6:.0f} M parameters and needs {needed / 1e9:.1f} GB "
            f"at {bytes_per_parameter} bytes each, but {available / 1e9:.1f} GB of memory are available; "
            "choose a smaller model, set model.dtype = 'bfloat16', or serve it with an external engine"
        )


def weight_header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file by name, each with ``dtype``, ``shape`` and ``data_offsets``; no data is read.

    Raises:
        ModelError: the file is damaged or truncated.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > size - 8:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(handle.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{8 + length + end} bytes announced, {size} present")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"weight file {str(file)!r} is damaged or truncated: {error}; fetch it again") from error
    return tensors


def _parameter_count(file: Path) -> int:
    """Elements in a safetensors file."""
    entries = weight_header(file).values()
    spans = [(entry["data_offsets"][1] - entry["data_offsets"][0], entry["dtype"]) for entry in entries]
    return sum(span // _ITEM_BYTES.get(dtype, 1) for span, dtype in spans)


def _resolve_known(known: KnownModel, root: Path, report: Progress) -> Path:
    def verified(weights: Path) -> bool:
        return known.weights_sha256 in (None, remembered_hash(weights, root))

    return obtain_known_model(known, root, verified, report)


def _resolve_hub(spec: str, report: Progress) -> Path:
    try:
        import huggingface_hub  # noqa: PLC0415 - part of the embedded extra
    except ImportError as error:
        raise ModelError(
            f"model {spec!r} is no directory, and fetching from a hub needs the 'embedded' extra; "
            "pip install 'tidegate[embedded]' or pass a directory"
        ) from error
    report(f"fetching {spec} from the model hub")
    try:
        path = Path(huggingface_hub.snapshot_download(spec, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"model {spec!r} is neither a directory nor one of {sorted(KNOWN_MODELS)}, and fetching it from the "
            f"model hub failed: {type(error).__name__}: {reason[0] if reason else ''}; download it on a machine "
            "with network and pass the directory (config.json, *.safetensors, tokenizer)"
        ) from error
    check_model_directory(path)
    return path


def _silent(line: str) -> None:
    del line
