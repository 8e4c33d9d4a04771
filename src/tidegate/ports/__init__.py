"""What a stage needs from the outside, in the words of the domain."""

from tidegate.ports.engine import Engine, EngineHealth, ProbeResult
from tidegate.ports.signals import Environment, Verifier
from tidegate.ports.stores import AuditLog, CycleStore, ReleaseStore, SealedStore, TrajectoryStore

__all__ = [
    "AuditLog",
    "CycleStore",
    "Engine",
    "EngineHealth",
    "Environment",
    "ProbeResult",
    "ReleaseStore",
    "SealedStore",
    "TrajectoryStore",
    "Verifier",
]
