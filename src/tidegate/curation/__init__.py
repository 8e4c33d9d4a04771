"""Curation: which of the recorded episodes train, with a manifest that accounts for every one of them."""

from tidegate.curation.batch import EXAMPLES_FILE, Batch, read_batch, write_batch
from tidegate.curation.curate import curate
from tidegate.curation.rollouts import Judged, Rollouts, make_rollouts, no_rollouts, read_rollouts, write_rollouts
from tidegate.curation.shown import episodes_shown

__all__ = [
    "EXAMPLES_FILE",
    "Batch",
    "Judged",
    "Rollouts",
    "curate",
    "episodes_shown",
    "make_rollouts",
    "no_rollouts",
    "read_batch",
    "read_rollouts",
    "write_batch",
    "write_rollouts",
]
