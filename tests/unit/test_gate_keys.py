"""Key files: made once, private, refused when others could have read them."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from tidegate.core.errors import ConfigError
from tidegate.gate import KeyPair, public_key_from_hex
from tidegate.gate.keys import _check_access, _write_new


def test_a_key_is_made_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "gate.pem"
    first = KeyPair.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyPair.load_or_create(path).public_hex == first.public_hex
    assert sorted(p.name for p in path.parent.iterdir()) == ["gate.pem"]
    assert public_key_from_hex(first.public_hex) == first.public_key


def test_two_processes_that_start_together_get_one_key(tmp_path: Path) -> None:
    path = tmp_path / "gate.pem"
    found: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        found.append(KeyPair.load_or_create(path).public_hex)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_key_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "gate.pem"
    key = KeyPair.load_or_create(path)
    _write_new(path, KeyPair.load_or_create(tmp_path / "other.pem")._private)
    assert KeyPair.load_or_create(path).public_hex == key.public_hex


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o777])
def test_wider_permissions_are_refused_with_the_way_to_mend(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "gate.pem"
    KeyPair.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600 {path}"):
        KeyPair.load_or_create(path)
    path.chmod(0o600)
    KeyPair.load_or_create(path)


def test_another_owner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"belongs to user 7, this process runs as user 8.*chown 8"):
        _check_access(tmp_path / "gate.pem", mode=0o600, owner=7, user=8)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gate.pem"
    path.touch(mode=0o600)
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match="no private key in PEM form"):
        KeyPair.load_or_create(path)
    other = generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(other)
    with pytest.raises(ConfigError, match="an Ed25519 private key is accepted"):
        KeyPair.load_or_create(path)


def test_links_pipes_and_directories_are_refused(tmp_path: Path) -> None:
    KeyPair.load_or_create(tmp_path / "real.pem")
    (tmp_path / "link.pem").symlink_to(tmp_path / "real.pem")
    with pytest.raises(ConfigError, match="cannot be opened"):
        KeyPair.load_or_create(tmp_path / "link.pem")
    (tmp_path / "dangling.pem").symlink_to(tmp_path / "nowhere.pem")
    with pytest.raises(ConfigError, match="cannot be opened"):
        KeyPair.load_or_create(tmp_path / "dangling.pem")
    os.mkfifo(tmp_path / "pipe.pem", 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        KeyPair.load_or_create(tmp_path / "pipe.pem")
    (tmp_path / "folder.pem").mkdir()
    with pytest.raises(ConfigError, match="no regular file"):
        KeyPair.load_or_create(tmp_path / "folder.pem")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        KeyPair.load_or_create(tmp_path / "file" / "gate.pem")


def test_secrets_depend_on_key_and_label(tmp_path: Path) -> None:
    one, two = KeyPair.load_or_create(tmp_path / "1"), KeyPair.load_or_create(tmp_path / "2")
    secrets = {key.secret_for(label) for key in (one, two) for label in ("a", "b")}
    assert len(secrets) == 4
    assert one.secret_for("a") == KeyPair.load_or_create(tmp_path / "1").secret_for("a")


def test_a_key_does_not_print_itself(tmp_path: Path) -> None:
    key = KeyPair.load_or_create(tmp_path / "1")
    assert key._private.private_bytes_raw().hex() not in repr(key)


@pytest.mark.parametrize("text", ["", "zz", "ab" * 31])
def test_a_bad_public_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="64 hex digits are accepted"):
        public_key_from_hex(text)
