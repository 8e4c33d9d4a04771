"""Curation: which of the recorded episodes train, with a manifest that accounts for every one of them."""

from tidegate.curation.batch import Batch, read_batch, write_batch
from tidegate.curation.curate import curate

__all__ = ["Batch", "curate", "read_batch", "write_batch"]
