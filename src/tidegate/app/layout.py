"""Where things lie in a data directory, and the small files that processes find each other by."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from tidegate.artifacts import write_atomically
from tidegate.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A running server as other processes of the same machine reach it."""

    url: str
    admin_url: str
    pid: int

    @property
    def alive(self) -> bool:
        """Whether the process still exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDirectory:
    """Paths under one data directory. Creating it is explicit: :meth:`create`."""

    root: Path

    @property
    def open_database(self) -> Path:
        """Interactions of train and dev users, releases, cycles, audit log."""
        return self.root / "tidegate.db"

    @property
    def sealed_database(self) -> Path:
        """Interactions of sealed users and the gate's epochs; never opened by curation or training."""
        return self.root / "sealed.db"

    @property
    def adapters(self) -> Path:
        """Adapter directories by content hash."""
        return self.root / "adapters"

    @property
    def batches(self) -> Path:
        """Training batches by manifest hash."""
        return self.root / "batches"

    @property
    def certificates(self) -> Path:
        """Gate and person certificates by adapter hash."""
        return self.root / "certificates"

    @property
    def gate_key(self) -> Path:
        """Private key that signs the gate's certificates."""
        return self.root / "keys" / "gate.pem"

    @property
    def operator_key(self) -> Path:
        """Private key of the person who signs first releases and anchors."""
        return self.root / "keys" / "operator.pem"

    def create(self) -> DataDirectory:
        """Make the directories.

        Raises:
            ConfigError: the path is a file or may not be written.
        """
        try:
            for path in (self.root, self.adapters, self.batches, self.certificates, self.root / "keys"):
                path.mkdir(parents=True, exist_ok=True)
            (self.root / "keys").chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"data directory {str(self.root)!r} cannot be used: {error.strerror}; "
                "choose another with --data-dir or data_dir"
            ) from error
        return self

    def split_key(self) -> bytes:
        """The secret that assigns users to splits and hides their ids; made once, never changed."""
        return _secret_file(self.root / "keys" / "split.key")

    def admin_token(self) -> str:
        """Bearer token of the admin API, readable by the owner only."""
        return _secret_file(self.root / "keys" / "admin.token").hex()

    def announce_server(self, address: ServerAddress) -> None:
        """Tell other processes where the server is."""
        body = {"url": address.url, "admin_url": address.admin_url, "pid": address.pid}
        write_atomically(self.root / "server.json", json.dumps(body).encode())

    def withdraw_server(self) -> None:
        """Forget the announced server."""
        (self.root / "server.json").unlink(missing_ok=True)

    def server(self) -> ServerAddress | None:
        """The announced server if its process is alive."""
        try:
            body = json.loads((self.root / "server.json").read_text(encoding="utf-8"))
            address = ServerAddress(url=body["url"], admin_url=body["admin_url"], pid=int(body["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return address if address.alive else None


def _secret_file(path: Path) -> bytes:
    """32 random bytes (hex in the file), created once with owner-only permissions."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        # Linking fails when another process was first; its secret stands.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
        temporary.unlink()
    mode = path.stat().st_mode & 0o077
    if mode:
        raise ConfigError(
            f"{str(path)!r} is readable by others (mode {path.stat().st_mode & 0o777:o}); run chmod 600 on it"
        )
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} does not hold hexadecimal text; restore it from a backup") from error
    if len(secret) != 32:
        raise ConfigError(f"{str(path)!r} holds {len(secret)} bytes instead of 32; restore it from a backup")
    return secret
