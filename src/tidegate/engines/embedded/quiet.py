"""Keeping the libraries' progress bars off stderr, where Tidegate shows its own progress."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from transformers.utils import logging


@contextlib.contextmanager
def no_progress_bars() -> Generator[None]:
    """Without transformers' progress bars inside the block; the setting comes back afterwards."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
