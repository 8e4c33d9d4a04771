"""Bounds on JSON Schemas that clients send: what an answer is held to is compiled for everybody's decoding thread.

Without them ``{"type":"integer","multipleOf":999983}`` takes seconds and hundreds of megabytes to compile, and a schema
with 5,000 optional properties tenths of a second for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32
MAX_NODES = 4_000
"""Keywords, properties and listed values together."""
MAX_PROPERTIES = 256
MAX_BRANCHES = 64
MAX_MULTIPLE = 1_000
MAX_NUMBER = 10**15
_BRANCHING = ("anyOf", "oneOf", "allOf")


def check_schema(schema: Any) -> None:
    """Refuse a schema that is too large to hold answers to.

    Raises:
        ValueError: what is too large, and how large it may be.
    """
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise ValueError("the keyword 'x-guidance' is not accepted; leave it out")
    nodes = 0
    left: list[tuple[Any, int]] = [(schema, 1)]
    while left:
        value, depth = left.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if nodes + len(left) > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} keywords, properties and values")
        if isinstance(value, Mapping):
            _check_keywords(value)
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            left += [(inner, depth + 1) for inner in value]
        elif isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= MAX_NUMBER:
            raise ValueError(f"it holds a number beyond +-{MAX_NUMBER:.0e}")


def _check_keywords(schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
        raise ValueError(f"an object has {len(properties)} properties; at most {MAX_PROPERTIES} are accepted")
    for name in _BRANCHING:
        branches = schema.get(name)
        if isinstance(branches, list) and len(branches) > MAX_BRANCHES:
            raise ValueError(f"{name} has {len(branches)} branches; at most {MAX_BRANCHES} are accepted")
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not isinstance(multiple, bool) and abs(multiple) > MAX_MULTIPLE:
        raise ValueError(f"multipleOf is {multiple!r:.40}; at most {MAX_MULTIPLE} is accepted")
