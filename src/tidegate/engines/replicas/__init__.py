"""Several engines over the same base behind one engine port: acknowledged loads, failover, breakers, reconciliation."""

from tidegate.engines.replicas.members import Breaker, Limits
from tidegate.engines.replicas.replica_set import ReplicaSet

__all__ = ["Breaker", "Limits", "ReplicaSet"]
