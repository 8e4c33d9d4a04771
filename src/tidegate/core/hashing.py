"""Canonical JSON and content hashes: the same value gives the same bytes on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Serialise ``value`` with sorted keys, no spaces, UTF-8 kept and NaN refused.

    Args:
        value: anything that :mod:`json` can serialise.

    Returns:
        One line of JSON.

    Raises:
        ValueError: ``value`` holds NaN or infinity.
        TypeError: ``value`` holds something that JSON cannot express.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def ordered_json(value: Any) -> str:
    """As :func:`canonical_json`, with keys in the order that they came in, for values whose order means something."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
