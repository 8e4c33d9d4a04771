"""Signing keys in files that only their owner can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tidegate.artifacts import fsync_directory
from tidegate.core.errors import ConfigError

_MAX_BYTES = 1 << 16
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An Ed25519 key. Never printed: only ``public_hex`` leaves it."""

    _private: Ed25519PrivateKey

    @classmethod
    def load_or_create(cls, path: Path) -> KeyPair:
        """Read the key file, or write a new key with mode 0600 when there is none.

        Raises:
            ConfigError: the file can be read by others, belongs to another user, is no regular file, or
                holds no Ed25519 private key in PEM form.
        """
        if not os.path.lexists(path):
            _write_new(path, Ed25519PrivateKey.generate())
        return cls(_read(path))

    @classmethod
    def load(cls, path: Path) -> KeyPair:
        """Read a key file that must exist.

        Raises:
            ConfigError: as :meth:`load_or_create`, or there is none.
        """
        if not os.path.lexists(path):
            raise ConfigError(f"key file {str(path)!r} does not exist; make one with 'tidegate gate keygen {path}'")
        return cls(_read(path))

    @classmethod
    def create(cls, path: Path) -> KeyPair:
        """Write a new key with mode 0600.

        Raises:
            ConfigError: something lies there already, or it cannot be written.
        """
        if os.path.lexists(path):
            raise ConfigError(f"{str(path)!r} exists; a key is never written over: choose another file name")
        return cls.load_or_create(path)

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The half that verifies."""
        return self._private.public_key()

    @property
    def public_hex(self) -> str:
        """The public key as 64 hex digits."""
        return self.public_key.public_bytes_raw().hex()

    def sign(self, data: bytes) -> bytes:
        """An Ed25519 signature (64 bytes); the same data gives the same signature."""
        return self._private.sign(data)

    def secret_for(self, label: str) -> str:
        """A secret (64 hex digits) that only the holder of the key can compute, one for each label."""
        return hmac.new(self._private.private_bytes_raw(), label.encode(), hashlib.sha256).hexdigest()


def public_key_from_hex(text: str) -> Ed25519PublicKey:
    """The public key that ``KeyPair.public_hex`` wrote.

    Raises:
        ConfigError: not 64 hex digits.
    """
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except ValueError as error:
        raise ConfigError(f"public key {text!r} is not an Ed25519 key; 64 hex digits are accepted") from error


def _write_new(path: Path, key: Ed25519PrivateKey) -> None:
    """Publish a complete file under ``path`` unless another process was first."""
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _link_if_absent(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(path.parent)
    except OSError as error:
        raise ConfigError(f"key file {str(path)!r} cannot be written: {error}; choose a writable data_dir") from error


def _link_if_absent(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return


def _read(path: Path) -> Ed25519PrivateKey:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"key file {str(path)!r} cannot be opened: {error}; a regular file that you own is accepted"
        ) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"key file {str(path)!r} is no regular file; move it away and a new key is written")
        _check_access(path, mode=stat.S_IMODE(status.st_mode), owner=status.st_uid, user=os.geteuid())
        data = os.read(handle, _MAX_BYTES)
    finally:
        os.close(handle)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"key file {str(path)!r} holds no private key in PEM form: {error}; restore it from a backup. With a new "
            "key every earlier certificate must be signed again"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"key file {str(path)!r} holds a {type(key).__name__}; an Ed25519 private key is accepted")
    return key


def _check_access(path: Path, *, mode: int, owner: int, user: int) -> None:
    if owner != user:
        raise ConfigError(
            f"key file {str(path)!r} belongs to user {owner}, this process runs as user {user}; run as the owner, or "
            f"'chown {user} {path}' if you trust its content"
        )
    if mode & _OTHERS:
        raise ConfigError(
            f"key file {str(path)!r} has mode {mode:04o}, so that others may have read it; 0600 is accepted: "
            f"'chmod 600 {path}', or move it away to get a new key"
        )
