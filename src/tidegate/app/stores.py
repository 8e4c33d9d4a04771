"""Opening the two databases of a data directory."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import SecretStr

from tidegate.app.layout import DataDirectory
from tidegate.core.errors import ConfigError, StoreError
from tidegate.stores.sql import (
    Location,
    PostgresAddress,
    SqlAuditLog,
    SqlCycleStore,
    SqlDatabase,
    SqlReleaseStore,
    SqlSealedStore,
    SqlShadowStore,
    SqlTrajectoryStore,
    can_read,
)

_OWNER = "data_directory"
_FINGERPRINT = b"the data directory that a database belongs to"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of one data directory. ``sealed_*`` are for capture and the gate alone."""

    trajectories: SqlTrajectoryStore
    sealed_trajectories: SqlTrajectoryStore
    sealed_epochs: SqlSealedStore
    audit: SqlAuditLog
    releases: SqlReleaseStore
    cycles: SqlCycleStore
    shadows: SqlShadowStore
    databases: tuple[SqlDatabase, ...]

    def problems(self) -> list[str]:
        """Why an interaction could not be committed now; empty when it could."""
        found: list[str] = []
        for database in self.databases:
            try:
                # Takes and gives back the write lock, which is what a commit needs first.
                with database.write("checked for readiness"):
                    pass
            except StoreError as error:
                found.append(str(error))
        return found


@contextmanager
def open_stores(directory: DataDirectory) -> Generator[Stores]:
    """Open (and migrate) both databases for the length of a block.

    Raises:
        ConfigError: the driver of PostgreSQL is not installed, or SQLite files in the directory would be passed over.
        StoreError: a database cannot be opened or written, or belongs to another data directory.
        SchemaVersionError: it was written by another version.
    """
    _require_no_files_beside_a_server(directory)
    where, sealed_where = _locations(directory)
    with SqlDatabase.open(where) as database, SqlDatabase.open(sealed_where, role="sealed") as sealed:
        if directory.database.url is not None:
            for each in (database, sealed):
                _require_owner(each, directory)
        yield Stores(
            trajectories=SqlTrajectoryStore(database),
            sealed_trajectories=SqlTrajectoryStore(sealed),
            sealed_epochs=SqlSealedStore(sealed),
            audit=SqlAuditLog(database),
            releases=SqlReleaseStore(database),
            cycles=SqlCycleStore(database),
            shadows=SqlShadowStore(database),
            databases=(database, sealed),
        )


def has_database(directory: DataDirectory) -> bool:
    """Whether the directory was used before.

    Raises:
        StoreError: the database server cannot be asked.
    """
    return SqlDatabase.is_made(_locations(directory)[0])


def reader_of_sealed(directory: DataDirectory) -> str | None:
    """Says so where whoever knows ``database.url`` alone can read the sealed database, or where that is not known.

    None where it is shut.
    """
    settings = directory.database
    if settings.url is None or settings.sealed_url is None:
        return None
    mine = _address(settings.url, settings.password)
    try:
        if not can_read(_address(settings.sealed_url, settings.sealed_password), by=mine):
            return None
    except StoreError as error:
        return (
            f"whether the user of database.url {settings.shown_url!r} can read the sealed database is unknown: {error}"
        )
    return (
        f"the user of database.url {settings.shown_url!r} can read the sealed database; give that one a user "
        "and rights of its own, or whoever trains can read what the gate tests with"
    )


def _require_no_files_beside_a_server(directory: DataDirectory) -> None:
    """Releases in a file that is passed over would be served no longer, and nobody would say so."""
    left = [path.name for path in (directory.open_database, directory.sealed_database) if path.exists()]
    if directory.database.url is not None and left:
        raise ConfigError(
            f"database.url is set, and {str(directory.root)!r} holds {' and '.join(left)}: what lies there, releases "
            "and the audit log included, would be passed over, for nothing carries it over. Name another data_dir, or "
            "move these files away to begin anew"
        )


def _locations(directory: DataDirectory) -> tuple[Location, Location]:
    """Where the open and the sealed database lie."""
    settings = directory.database
    if settings.url is None or settings.sealed_url is None:
        return directory.open_database, directory.sealed_database
    return _address(settings.url, settings.password), _address(settings.sealed_url, settings.sealed_password)


def _address(url: SecretStr, password: SecretStr | None) -> PostgresAddress:
    return PostgresAddress(
        url=url.get_secret_value(), password=None if password is None else password.get_secret_value()
    )


def _require_owner(database: SqlDatabase, directory: DataDirectory) -> None:
    """A database on a server is used with the split key that its traffic was split with, and with no other.

    A file lies beside its keys. A server can be named from anywhere, and another key would send users whom the gate
    tests with to training.
    """
    owner = database.noted(_OWNER)
    if owner is None or directory.split_key_file.exists():
        mine = hashlib.sha256(_FINGERPRINT + directory.split_key()).hexdigest()
        if database.note(_OWNER, mine) == mine:
            return
    raise StoreError(
        f"database {database.name!r} belongs to another data directory than {str(directory.root)!r}, or that has lost "
        "keys/split.key; name the directory that it was made with, restore its keys, or name an empty database"
    )
