"""A SQLite file as the place of a database.

WAL mode with ``synchronous=FULL``: a commit that returned survives a power cut, readers never wait for the
writer. Writers take the lock at the start (``BEGIN IMMEDIATE``), so that any number of threads and processes
may write to one file without deadlocks; each waits up to the busy timeout for its turn.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from tidegate.artifacts import fsync_directory
from tidegate.core.errors import StoreError
from tidegate.stores.backend import Fault

_MAGIC = b"SQLite format 3\0"
_RETRY_S = 0.02

_CAUSES = {
    sqlite3.SQLITE_FULL: "the disk is full; free space or move the data directory",
    sqlite3.SQLITE_BUSY: "another process held its write lock for too long; end that process or try again",
    sqlite3.SQLITE_LOCKED: "another connection holds it; try again",
    sqlite3.SQLITE_READONLY: "it is read-only; give this user write access to the file and its directory",
    sqlite3.SQLITE_PERM: "access is denied; give this user read and write access",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that file and directory exist and are accessible",
    sqlite3.SQLITE_CORRUPT: "it is damaged; keep the file for inspection and restore a backup",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database; name another file or move this one away",
    sqlite3.SQLITE_IOERR: "reading or writing the disk failed (full, over quota, or faulty); check the disk",
    sqlite3.SQLITE_NOMEM: "memory ran out; free memory and try again",
}
_BAD_VALUES = (sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH)


class SqliteFile:
    """The backend :class:`tidegate.stores.backend.Backend` over one file."""

    errors: tuple[type[BaseException], ...] = (sqlite3.Error, OSError, UnicodeError, OverflowError)

    def __init__(self, path: Path, *, busy_timeout_s: float) -> None:
        """Name the file; nothing is opened yet."""
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._identity: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def prepare(self, *, create: bool) -> None:
        """Reject what is no database without touching it; make an empty file where there is none.

        Raises:
            StoreError: there is no file, or one of another kind.
        """
        _prepare_file(self.path, create=create)
        found = self.path.stat()
        self._identity = (found.st_dev, found.st_ino)

    def engine(self) -> sa.Engine:
        """Connections to the file."""
        return sa.create_engine(
            "sqlite+pysqlite://",
            creator=self._connect,
            poolclass=sa.QueuePool,
            max_overflow=-1,  # callers bound their threads; a pool limit would only turn load into errors
        )

    def begin(self, connection: sa.Connection, *, writes: bool) -> None:
        """Begin a transaction; a writer takes the lock at once."""
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    def set_up(self) -> None:
        """Use a write-ahead log, for good.

        Raises:
            StoreError: the file system has no shared memory for one.
        """
        deadline = time.monotonic() + self._busy_timeout_s
        with closing(self._connect()) as connection:
            while True:
                try:
                    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                    break
                except sqlite3.OperationalError as error:
                    # Two processes that create one file: SQLite reports this lock without waiting for it.
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                        raise
                    time.sleep(_RETRY_S)
        if mode != "wal":
            raise StoreError(
                f"database {self.name!r} cannot use a write-ahead log (mode {mode!r}); put the data directory on "
                "a local file system"
            )

    def check_in_place(self) -> None:
        """An open connection would go on writing to a deleted or replaced file, and lose what it writes.

        Raises:
            StoreError: the file is not where it was.
        """
        try:
            found = self.path.stat()
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            raise StoreError(
                f"database {self.name!r} was deleted or replaced while it was open; put the file back, or restart"
            )

    def damage(self, connection: sa.Connection) -> str | None:
        """What SQLite itself finds, and rows that refer to nothing."""
        finding = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        if finding != "ok":
            return str(finding)
        orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        return None if orphan is None else f"a row of {orphan[0]!r} refers to nothing"

    def fault(self, error: BaseException) -> Fault:
        """By SQLite's primary result code."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        is_value = code in _BAD_VALUES or isinstance(
            error, UnicodeError | OverflowError | sqlite3.InterfaceError | sqlite3.DataError
        )
        cause = _CAUSES.get(code)
        return Fault(is_value=is_value, detail=f"{cause} ({error})" if cause else f"{error}")

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a file that went away must be an error, never a new empty database
        connection = sqlite3.connect(
            f"file:{quote(str(self.path.absolute()))}?mode=rw",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,  # transactions are begun by begin() alone
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection


def _prepare_file(path: Path, *, create: bool) -> None:
    where = f"database {str(path)!r}"
    try:
        if path.is_dir():
            raise StoreError(f"{where} is a directory; name a file in it")
        if path.exists():
            with path.open("rb") as file:
                head = file.read(len(_MAGIC))
            if head not in (b"", _MAGIC):
                raise StoreError(
                    f"{where} is not a SQLite database (it begins with {head!r}); name another file or move this one "
                    "away; it was left as it is"
                )
            if head or create:
                return
            raise StoreError(f"{where} is empty; 'tidegate serve' makes a new one")
        if not path.parent.is_dir():
            raise StoreError(f"{where} cannot be made: its directory does not exist; make {str(path.parent)!r} first")
        if not create:
            raise StoreError(f"{where} does not exist; 'tidegate serve' makes it")
        # Readable by its owner only: it holds what users wrote. SQLite gives its side files the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        fsync_directory(path.parent)
    except OSError as error:
        raise StoreError(
            f"{where} cannot be opened: {error.strerror or error}; check the path, the permissions and the free space"
        ) from error
