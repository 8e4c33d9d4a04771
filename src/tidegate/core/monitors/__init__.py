"""How broad each served release still is, from the traffic that it answered: figures, and their comparison with the
anchor's. They show, and decide nothing: the certified test over sealed samples is :mod:`tidegate.core.gate.collapse`.
"""

from tidegate.core.monitors.answers import RecordedAnswer, recorded_answers
from tidegate.core.monitors.comparison import SHIPPED_LIMITS, Comparison, compare
from tidegate.core.monitors.measures import Monitors, by_kind, measure

__all__ = [
    "SHIPPED_LIMITS",
    "Comparison",
    "Monitors",
    "RecordedAnswer",
    "by_kind",
    "compare",
    "measure",
    "recorded_answers",
]
