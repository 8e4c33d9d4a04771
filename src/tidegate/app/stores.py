"""Opening the two databases of a data directory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.app.layout import DataDirectory
from tidegate.core.errors import StoreError
from tidegate.stores.sqlite import (
    SqlAuditLog,
    SqlCycleStore,
    SqlDatabase,
    SqlReleaseStore,
    SqlSealedStore,
    SqlTrajectoryStore,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of one data directory. ``sealed_*`` are for capture and the gate alone."""

    trajectories: SqlTrajectoryStore
    sealed_trajectories: SqlTrajectoryStore
    sealed_epochs: SqlSealedStore
    audit: SqlAuditLog
    releases: SqlReleaseStore
    cycles: SqlCycleStore
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
        StoreError: a file cannot be opened or written.
        SchemaVersionError: it was written by another version.
    """
    with (
        SqlDatabase.open(directory.open_database) as database,
        SqlDatabase.open(directory.sealed_database, role="sealed") as sealed,
    ):
        yield Stores(
            trajectories=SqlTrajectoryStore(database),
            sealed_trajectories=SqlTrajectoryStore(sealed),
            sealed_epochs=SqlSealedStore(sealed),
            audit=SqlAuditLog(database),
            releases=SqlReleaseStore(database),
            cycles=SqlCycleStore(database),
            databases=(database, sealed),
        )
