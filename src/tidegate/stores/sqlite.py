"""The SQLite backend under one name: what the composition root and the tests import."""

from tidegate.stores.audit import SqlAuditLog
from tidegate.stores.cycles import SqlCycleStore
from tidegate.stores.database import SqlDatabase
from tidegate.stores.releases import SqlReleaseStore
from tidegate.stores.sealed import SqlSealedStore
from tidegate.stores.trajectories import SqlTrajectoryStore

__all__ = [
    "SqlAuditLog",
    "SqlCycleStore",
    "SqlDatabase",
    "SqlReleaseStore",
    "SqlSealedStore",
    "SqlTrajectoryStore",
]
