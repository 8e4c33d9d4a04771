"""From a batch of examples to a candidate adapter, in a process of its own. Importing this needs no torch."""

from tidegate.training.averaging import average_adapters
from tidegate.training.backends import backend_of
from tidegate.training.degrade import degrade_adapter
from tidegate.training.derived import Score
from tidegate.training.job import TrainingJob, TrainingReport
from tidegate.training.launch import run_training
from tidegate.training.scoring import ScoringJob, score_sequences

__all__ = [
    "Score",
    "ScoringJob",
    "TrainingJob",
    "TrainingReport",
    "average_adapters",
    "backend_of",
    "degrade_adapter",
    "run_training",
    "score_sequences",
]
