"""One SQLite file: opening, migrating, transactions, and errors in plain words.

WAL mode with ``synchronous=FULL``: a commit that returned survives a power cut, readers never wait for the
writer. Writers take the lock at the start (``BEGIN IMMEDIATE``), so that any number of threads and processes
may write to one file without deadlocks; each waits up to the busy timeout for its turn.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from tidegate.artifacts import fsync_directory
from tidegate.core.errors import RequestError, SchemaVersionError, StoreError
from tidegate.stores.records import Role
from tidegate.stores.schema import REVISION, store_meta
from tidegate.stores.upgrade import known_revisions, upgrade

BUSY_TIMEOUT_S = 10.0
_MAGIC = b"SQLite format 3\0"
_WRITE = "tidegate_write"
_RETRY_S = 0.02
_IDS_PER_STATEMENT = 500  # far below SQLite's limit of 32,766 variables

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


class SqlDatabase:
    """A migrated database file that threads share. Build it with :meth:`open`; close it at the end."""

    def __init__(self, path: Path, role: Role, *, busy_timeout_s: float) -> None:
        """Prepare connections to an existing file; :meth:`open` is the public way in."""
        self.path = path
        self.role: Role = role
        self._busy_timeout_s = busy_timeout_s
        found = path.stat()
        self._identity = (found.st_dev, found.st_ino)
        self._engine = sa.create_engine(
            "sqlite+pysqlite://",
            creator=self._connect,
            poolclass=sa.QueuePool,
            max_overflow=-1,  # callers bound their threads; a pool limit would only turn load into errors
        )
        event.listen(self._engine, "begin", _begin)

    @classmethod
    def open(
        cls, path: Path, *, create: bool = True, role: Role = "open", busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> SqlDatabase:
        """Open a database, creating or migrating it as needed.

        Args:
            path: the file; its directory must exist.
            create: make the file when it does not exist.
            role: ``open`` for what may be trained on, ``sealed`` for the gate's own; fixed at creation.
            busy_timeout_s: longest wait for another writer.

        Raises:
            SchemaVersionError: another version of Tidegate wrote the file.
            StoreError: it is missing, no database, not ours, damaged, read-only, or of the other role.
        """
        _prepare_file(path, create=create)
        database = cls(path, role, busy_timeout_s=busy_timeout_s)
        try:
            with database.mapped("opened"):
                if not database._is_current():
                    database._use_wal()
                    database._migrate()
            with database.write("opened for writing"):
                pass  # a file that can't be written to is reported now, not at the first request
        except BaseException:
            database.close()
            raise
        return database

    @contextmanager
    def read(self, doing: str) -> Generator[sa.Connection]:
        """A read transaction: one consistent snapshot. ``doing`` completes "the database could not be ..."."""
        with self.mapped(doing), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self, doing: str) -> Generator[sa.Connection]:
        """A write transaction: committed and on disk when the block ends well, else undone.

        Raises:
            StoreError: the database cannot be written.
        """
        with self.mapped(doing), self._engine.connect() as connection:
            connection.execution_options(**{_WRITE: True})
            with connection.begin():
                yield connection
                self._check_in_place()

    def require_role(self, role: Role, what: str) -> None:
        """Refuse to keep ``what`` in a file of the other role.

        Raises:
            StoreError: the roles differ.
        """
        if self.role != role:
            raise StoreError(f"database {str(self.path)!r} has the role {self.role!r}; {what} needs one of {role!r}")

    def check(self) -> None:
        """Look for damage in the whole file; takes time in proportion to its size.

        Raises:
            StoreError: SQLite reports damage; the first finding is in the message.
        """
        with self.read("checked") as connection:
            finding = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if finding != "ok" or orphan is not None:
            detail = finding if finding != "ok" else f"a row of {orphan[0]!r} refers to nothing" if orphan else ""
            raise StoreError(f"database {str(self.path)!r} is damaged: {detail}; restore a backup")

    def close(self) -> None:
        """Close idle connections; the last process to do so folds the WAL into the file."""
        self._engine.dispose()

    def __enter__(self) -> SqlDatabase:
        """Return the database itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @contextmanager
    def mapped(self, doing: str) -> Generator[None]:
        """Turn every lower-level error of the block into a StoreError, or a RequestError for a bad value."""
        try:
            yield
        except SQLAlchemyError as error:
            raise self._explained(doing, getattr(error, "orig", None) or error) from error
        except (sqlite3.Error, OSError, UnicodeError, OverflowError) as error:
            raise self._explained(doing, error) from error

    def _explained(self, doing: str, error: BaseException) -> StoreError | RequestError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        if code in _BAD_VALUES or isinstance(
            error, UnicodeError | OverflowError | sqlite3.InterfaceError | sqlite3.DataError
        ):
            return RequestError(f"a value cannot be stored in {str(self.path)!r}: {error}; it is too large or no text")
        cause = _CAUSES.get(code)
        detail = f"{cause} ({error})" if cause else f"{error}"
        return StoreError(f"database {str(self.path)!r} could not be {doing}: {detail}")

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a file that went away must be an error, never a new empty database
        connection = sqlite3.connect(
            f"file:{quote(str(self.path.absolute()))}?mode=rw",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,  # transactions are begun by _begin alone
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_in_place(self) -> None:
        """An open connection would go on writing to a deleted or replaced file, and lose what it writes."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            raise StoreError(
                f"database {str(self.path)!r} was deleted or replaced while it was open; put the file back, or restart"
            )

    def _is_current(self) -> bool:
        """Whether the file is ours and of this version; False when it is empty or of an earlier version."""
        with self._engine.connect() as connection:
            inspector = sa.inspect(connection)
            tables = set(inspector.get_table_names())
            if not tables:
                return False
            if not {"alembic_version", store_meta.name} <= tables:
                raise StoreError(
                    f"database {str(self.path)!r} is not one of Tidegate's (tables: {sorted(tables)[:5]}); "
                    "name another file or move this one away"
                )
            revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
            role = connection.execute(sa.select(store_meta.c.value).where(store_meta.c.key == "role")).scalar()
        if revision != REVISION and revision not in known_revisions():
            raise SchemaVersionError(
                f"database {str(self.path)!r} has schema revision {revision!r}; this version of Tidegate knows up to "
                f"{REVISION!r}: run the version that wrote it, or a newer one, or name another data directory; "
                "the file was left as it is"
            )
        if role != self.role:
            raise StoreError(
                f"database {str(self.path)!r} has the role {role!r} and is opened as {self.role!r}; sealed and open "
                "traffic never share a file: name the right one"
            )
        return revision == REVISION

    def _use_wal(self) -> None:
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
                f"database {str(self.path)!r} cannot use a write-ahead log (mode {mode!r}); put the data directory on "
                "a local file system"
            )

    def _migrate(self) -> None:
        with self.write("migrated") as connection:
            upgrade(connection)  # a no-op when another process was first
            connection.execute(sa.insert(store_meta).prefix_with("OR IGNORE").values(key="role", value=self.role))
        self._is_current()  # the process that was first may have chosen the other role


def parts(ids: Iterable[str]) -> Iterator[list[str]]:
    """Ids in lists short enough for one SQL statement."""
    rest = iter(list(ids))
    while part := list(islice(rest, _IDS_PER_STATEMENT)):
        yield part


def _begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _prepare_file(path: Path, *, create: bool) -> None:
    """Reject what is no database without touching it; make an empty file where there is none."""
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
            raise StoreError(f"{where} is empty; 'tidegate init' or 'tidegate serve' makes a new one")
        if not path.parent.is_dir():
            raise StoreError(f"{where} cannot be made: its directory does not exist; make {str(path.parent)!r} first")
        if not create:
            raise StoreError(f"{where} does not exist; 'tidegate init' or 'tidegate serve' makes it")
        # Readable by its owner only: it holds what users wrote. SQLite gives its side files the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        fsync_directory(path.parent)
    except OSError as error:
        raise StoreError(
            f"{where} cannot be opened: {error.strerror or error}; check the path, the permissions and the free space"
        ) from error
