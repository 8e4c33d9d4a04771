"""The gate: the only way from trained weights to served weights.

:class:`~tidegate.gate.runner.Gate` screens and certifies a candidate, :mod:`~tidegate.gate.certificates` says what
may be served, :mod:`tidegate.core.gate` decides. Missing data, a timeout or an exception means no promotion.
"""

from tidegate.gate.arms import Arm
from tidegate.gate.certificates import Certificate, TrustedKeys, sign_certificate, verify_certificate
from tidegate.gate.evaluate import Grading, evaluate
from tidegate.gate.keys import KeyPair, public_key_from_hex
from tidegate.gate.policy import load_policy, parse_policy
from tidegate.gate.runner import Certified, Gate, Screened
from tidegate.gate.self_test import self_test

__all__ = [
    "Arm",
    "Certificate",
    "Certified",
    "Gate",
    "Grading",
    "KeyPair",
    "Screened",
    "TrustedKeys",
    "evaluate",
    "load_policy",
    "parse_policy",
    "public_key_from_hex",
    "self_test",
    "sign_certificate",
    "verify_certificate",
]
