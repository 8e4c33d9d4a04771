"""The arithmetic behind the gate: exact tests, intervals, power, diversity and the error ledger.

Pure functions of counts and probabilities. Nothing here reads a clock, a file or a random generator.
"""

from tidegate.core.statistics.diversity import effective_strategies, pass_at_k
from tidegate.core.statistics.intervals import tango_interval, tango_lower_bound
from tidegate.core.statistics.ledger import ErrorRate, Ledger
from tidegate.core.statistics.paired import paired_e_value, sign_test
from tidegate.core.statistics.power import detectable_gain, required_pairs

__all__ = [
    "ErrorRate",
    "Ledger",
    "detectable_gain",
    "effective_strategies",
    "paired_e_value",
    "pass_at_k",
    "required_pairs",
    "sign_test",
    "tango_interval",
    "tango_lower_bound",
]
