"""The arithmetic behind the gate: exact tests, intervals, evidence over time, power, diversity and the error ledger.

Pure functions of counts, outcomes and probabilities. Nothing here reads a clock or a file; randomness is handed in.
"""

from tidegate.core.statistics.diversity import distinct_n, effective_strategies, pass_at_k, vendi_score
from tidegate.core.statistics.intervals import tango_excludes_loss, tango_interval, tango_lower_bound
from tidegate.core.statistics.ledger import ErrorRate, Ledger
from tidegate.core.statistics.paired import paired_e_value, sign_test
from tidegate.core.statistics.permutation import sign_flip_test
from tidegate.core.statistics.power import detectable_gain, exact_pairs, required_pairs, sign_test_power
from tidegate.core.statistics.sequential import (
    CanaryEvidence,
    EDetector,
    betting_p_value,
    canary_evidence,
    canary_paths,
    detector_paths,
)

__all__ = [
    "CanaryEvidence",
    "EDetector",
    "ErrorRate",
    "Ledger",
    "betting_p_value",
    "canary_evidence",
    "canary_paths",
    "detectable_gain",
    "detector_paths",
    "distinct_n",
    "effective_strategies",
    "exact_pairs",
    "paired_e_value",
    "pass_at_k",
    "required_pairs",
    "sign_flip_test",
    "sign_test",
    "sign_test_power",
    "tango_excludes_loss",
    "tango_interval",
    "tango_lower_bound",
    "vendi_score",
]
