"""Where things lie in a data directory, and the small files that processes find each other by."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.artifacts import write_atomically
from tidegate.config import Settings
from tidegate.config.database import DatabaseSettings
from tidegate.core.errors import ConfigError, ConflictError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A running server as other processes of the same machine reach it; ``pid`` is for people to read."""

    url: str
    admin_url: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDirectory:
    """Paths under one data directory. Creating it is explicit: :meth:`create`.

    ``database`` says where its databases lie, if not in the directory itself.
    """

    root: Path
    database: DatabaseSettings = field(default_factory=DatabaseSettings)

    @classmethod
    def of(cls, settings: Settings) -> DataDirectory:
        """The directory that the settings name."""
        return cls(root=settings.data_dir, database=settings.database)

    @property
    def open_database(self) -> Path:
        """SQLite: interactions of train and dev users, releases, cycles, audit log."""
        return self.root / "tidegate.db"

    @property
    def sealed_database(self) -> Path:
        """SQLite: interactions of sealed users and the gate's epochs; never opened by curation or training."""
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
    def rollouts(self) -> Path:
        """Answers that cycles asked for themselves, by manifest hash."""
        return self.root / "rollouts"

    @property
    def certificates(self) -> Path:
        """Gate and person certificates by adapter hash."""
        return self.root / "certificates"

    @property
    def statements(self) -> Path:
        """Signatures that wait for those of further people."""
        return self.root / "statements"

    @property
    def engines(self) -> Path:
        """Logs and locks of servers that Tidegate starts."""
        return self.root / "engines"

    @property
    def gate_key(self) -> Path:
        """Private key that signs the gate's certificates."""
        return self.root / "keys" / "gate.pem"

    @property
    def next_gate_key(self) -> Path:
        """The gate's key while it is being rotated in."""
        return self.root / "keys" / "gate.next.pem"

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
            for path in (self.root, self.adapters, self.batches, self.rollouts, self.certificates, self.root / "keys"):
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
        return _secret_file(self.split_key_file)

    @property
    def split_key_file(self) -> Path:
        """Where :meth:`split_key` keeps it."""
        return self.root / "keys" / "split.key"

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

    def announce_engines(self, sockets: Mapping[str, str]) -> None:
        """Tell other processes of this user where the servers listen that the server started, by their names."""
        write_atomically(self._engines, json.dumps(dict(sockets)).encode())

    def announced_engines(self) -> dict[str, str]:
        """What the running server announced; empty where it has started none."""
        try:
            found = json.loads(self._engines.read_text(encoding="utf-8"))
            return {str(name): str(socket) for name, socket in found.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def withdraw_engines(self) -> None:
        """Forget them."""
        self._engines.unlink(missing_ok=True)

    @property
    def _engines(self) -> Path:
        return self.engines / "sockets.json"

    @contextlib.contextmanager
    def served_alone(self) -> Generator[None]:
        """Hold the lock of the one server of this directory; it goes with the process, however that ends.

        Raises:
            ConflictError: another server holds it.
            ConfigError: the lock file cannot be made.
        """
        try:
            handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{str(self._lock)!r} cannot be opened: {error.strerror}; choose another directory with --data-dir"
            ) from error
        try:
            while not _locked(handle, fcntl.LOCK_EX):
                if self._is_served():  # else it was somebody's probe, which lasts an instant
                    raise ConflictError(self._told_taken())
            self.withdraw_server()  # what a server that was killed left
            self.withdraw_engines()
            yield
        finally:
            os.close(handle)

    def server(self) -> ServerAddress | None:
        """The running server, None when there is none.

        Raises:
            ConflictError: a server holds the directory and has not announced itself yet.
        """
        if not self._is_served():
            return None
        address = self._announced()
        if address is None:
            raise ConflictError(f"a server is starting on data directory {str(self.root)!r}; try again in a moment")
        return address

    @property
    def _lock(self) -> Path:
        return self.root / "serve.lock"

    def _announced(self) -> ServerAddress | None:
        try:
            body = json.loads((self.root / "server.json").read_text(encoding="utf-8"))
            return ServerAddress(url=str(body["url"]), admin_url=str(body["admin_url"]), pid=int(body["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _is_served(self) -> bool:
        try:
            handle = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise ConfigError(
                f"{str(self._lock)!r} cannot be read: {error.strerror}; run this as the user who runs the server"
            ) from error
        try:
            return not _locked(handle, fcntl.LOCK_SH)
        finally:
            os.close(handle)

    def _told_taken(self) -> str:
        address = self._announced()
        where = "by a server that is starting" if address is None else f"at {address.url} by process {address.pid}"
        return (
            f"data directory {str(self.root)!r} is served {where}; stop that server or name another directory with "
            "--data-dir"
        )


def _locked(handle: int, kind: int) -> bool:
    """Take a lock on an open file unless somebody else's stands against it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
