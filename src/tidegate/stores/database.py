"""One database, wherever it lies: opening, migrating, transactions, and errors in plain words."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from tidegate.core.errors import RequestError, SchemaVersionError, StoreError
from tidegate.stores.backend import Backend
from tidegate.stores.postgres_server import PostgresAddress, PostgresServer
from tidegate.stores.records import Role
from tidegate.stores.schema import REVISION, store_meta
from tidegate.stores.sqlite_file import SqliteFile
from tidegate.stores.upgrade import known_revisions, upgrade

BUSY_TIMEOUT_S = 10.0
_WRITE = "tidegate_write"
_IDS_PER_STATEMENT = 500  # far below SQLite's limit of 32,766 variables

Location: TypeAlias = Path | PostgresAddress
"""A SQLite file, or a schema of a PostgreSQL database."""


class SqlDatabase:
    """A migrated database that threads share. Build it with :meth:`open`; close it at the end."""

    def __init__(self, backend: Backend, role: Role) -> None:
        """Prepare connections to an existing place; :meth:`open` is the public way in."""
        self.name = backend.name
        self.role: Role = role
        self._backend = backend
        self._engine = backend.engine()
        event.listen(self._engine, "begin", self._begin)

    @classmethod
    def open(
        cls, where: Location, *, create: bool = True, role: Role = "open", busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> SqlDatabase:
        """Open a database, creating or migrating it as needed.

        Args:
            where: a SQLite file, whose directory must exist, or a PostgreSQL database, which must exist itself.
            create: make the file or the tables when they do not exist.
            role: ``open`` for what may be trained on, ``sealed`` for the gate's own; fixed at creation.
            busy_timeout_s: longest wait for another writer.

        Raises:
            ConfigError: the address of a PostgreSQL database cannot be read, or its driver is missing.
            SchemaVersionError: another version of Tidegate wrote the database.
            StoreError: it is missing, no database, not ours, damaged, read-only, or of the other role.
        """
        backend = _backend(where, busy_timeout_s)
        backend.prepare(create=create)
        database = cls(backend, role)
        try:
            with database.mapped("opened"):
                if not database._is_current(create=create):
                    backend.set_up()
                    database._migrate()
            with database.write("opened for writing"):
                pass  # a database that can't be written to is reported now, not at the first request
        except BaseException:
            database.close()
            raise
        return database

    @classmethod
    def is_made(cls, where: Location) -> bool:
        """Whether a database was made there, by whichever version.

        Raises:
            StoreError: its server cannot be asked.
        """
        if isinstance(where, Path):
            return where.exists()
        with cls(_backend(where, BUSY_TIMEOUT_S), "open") as database, database.read("looked for") as connection:
            return sa.inspect(connection).has_table(store_meta.name)

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
                self._backend.check_in_place()

    def require_role(self, role: Role, what: str) -> None:
        """Refuse to keep ``what`` in a database of the other role.

        Raises:
            StoreError: the roles differ.
        """
        if self.role != role:
            raise StoreError(f"database {self.name!r} has the role {self.role!r}; {what} needs one of {role!r}")

    def noted(self, key: str) -> str | None:
        """What :meth:`note` kept under ``key``, if anything."""
        with self.read("read") as connection:
            return _noted(connection, key)

    def note(self, key: str, value: str) -> str:
        """Keep a fact about the database itself, for good. Returns what stands: the first value that was noted."""
        with self.write("written to") as connection:
            return _note(connection, key, value)

    def check(self) -> None:
        """Look for damage in the whole database; takes time in proportion to its size.

        Raises:
            StoreError: there is damage; the first finding is in the message.
        """
        with self.read("checked") as connection:
            damage = self._backend.damage(connection)
        if damage is not None:
            raise StoreError(f"database {self.name!r} is damaged: {damage}; restore a backup")

    def close(self) -> None:
        """Close idle connections; the last process to do so folds SQLite's WAL into the file."""
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
        except self._backend.errors as error:
            raise self._explained(doing, error) from error

    def _explained(self, doing: str, error: BaseException) -> StoreError | RequestError:
        fault = self._backend.fault(error)
        if fault.is_value:
            return RequestError(
                f"a value cannot be stored in {self.name!r}: {fault.detail}; it is too large or no text"
            )
        return StoreError(f"database {self.name!r} could not be {doing}: {fault.detail}")

    def _begin(self, connection: sa.Connection) -> None:
        self._backend.begin(connection, writes=connection.get_execution_options().get(_WRITE, False))

    def _is_current(self, *, create: bool) -> bool:
        """Whether the database is ours and of this version; False when it is empty or of an earlier version."""
        with self._engine.connect() as connection:
            tables = set(sa.inspect(connection).get_table_names())
            if not tables and not create:
                raise StoreError(f"database {self.name!r} is empty; 'tidegate serve' makes its tables")
            if not tables:
                return False
            if not {"alembic_version", store_meta.name} <= tables:
                raise StoreError(
                    f"database {self.name!r} is not one of Tidegate's (tables: {sorted(tables)[:5]}); "
                    "name another one or move this one away"
                )
            revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
            role = _noted(connection, "role")
        if revision != REVISION and revision not in known_revisions():
            raise SchemaVersionError(
                f"database {self.name!r} has schema revision {revision!r}; this version of Tidegate knows up to "
                f"{REVISION!r}: run the version that wrote it, or a newer one, or name another data directory; "
                "the database was left as it is"
            )
        if role != self.role:
            raise StoreError(
                f"database {self.name!r} has the role {role!r} and is opened as {self.role!r}; sealed and open "
                "traffic never share a database: name the right one"
            )
        return revision == REVISION

    def _migrate(self) -> None:
        with self.write("migrated") as connection:
            upgrade(connection)  # a no-op when another process was first
            _note(connection, "role", self.role)
        self._is_current(create=True)  # the process that was first may have chosen the other role


def parts(ids: Iterable[str]) -> Iterator[list[str]]:
    """Ids in lists short enough for one SQL statement."""
    rest = iter(list(ids))
    while part := list(islice(rest, _IDS_PER_STATEMENT)):
        yield part


def _backend(where: Location, busy_timeout_s: float) -> Backend:
    if isinstance(where, Path):
        return SqliteFile(where, busy_timeout_s=busy_timeout_s)
    return PostgresServer(where, busy_timeout_s=busy_timeout_s)


def _noted(connection: sa.Connection, key: str) -> str | None:
    return connection.execute(sa.select(store_meta.c.value).where(store_meta.c.key == key)).scalar()


def _note(connection: sa.Connection, key: str, value: str) -> str:
    standing = _noted(connection, key)
    if standing is None:
        connection.execute(sa.insert(store_meta).values(key=key, value=value))
    return value if standing is None else standing
