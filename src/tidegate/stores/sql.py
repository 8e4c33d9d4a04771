"""The stores over SQL under one name: what the composition root and the tests import."""

from tidegate.stores.audit import SqlAuditLog
from tidegate.stores.cycles import SqlCycleStore
from tidegate.stores.database import Location, SqlDatabase
from tidegate.stores.postgres_server import PostgresAddress, can_read
from tidegate.stores.releases import SqlReleaseStore
from tidegate.stores.sealed import SqlSealedStore
from tidegate.stores.shadows import SqlShadowStore
from tidegate.stores.trajectories import SqlTrajectoryStore

__all__ = [
    "Location",
    "PostgresAddress",
    "SqlAuditLog",
    "SqlCycleStore",
    "SqlDatabase",
    "SqlReleaseStore",
    "SqlSealedStore",
    "SqlShadowStore",
    "SqlTrajectoryStore",
    "can_read",
]
