"""The gate's promises as measurements: rules of promotion, canary and detector on streams whose truth is known.

Nothing here decides about a candidate. The rules and processes are those that the gate uses; randomness is handed in.
"""

from tidegate.core.gate.simulation.report import TABLES, Setup, Table

__all__ = ["TABLES", "Setup", "Table"]
