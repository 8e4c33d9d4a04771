"""Bounds on the schemas that clients may have answers held to."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.core.json_schemas import MAX_BRANCHES, MAX_DEPTH, MAX_NODES, MAX_PROPERTIES, check_schema


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        nested(MAX_DEPTH),
        {"properties": {str(n): {} for n in range(MAX_PROPERTIES)}},
        {"anyOf": [{}] * MAX_BRANCHES},
        {"enum": list(range(MAX_NODES - 2))},
        {"multipleOf": 0.01, "maximum": 1e15, "minimum": -(10**15)},
        {"properties": {"multipleOf": {"type": "integer"}, "x-guidance": {}}},
    ],
)
def test_what_lies_within_bounds_is_accepted(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
        (nested(100_000), f"more than {MAX_DEPTH} levels"),
        ({"items": {"properties": {str(n): {} for n in range(MAX_PROPERTIES + 1)}}}, "257 properties"),
        ({"items": {"oneOf": [{}] * (MAX_BRANCHES + 1)}}, "oneOf has 65 branches"),
        ({"enum": list(range(MAX_NODES))}, f"more than {MAX_NODES} keywords"),
        ({"items": {"multipleOf": 1001}}, "multipleOf is 1001"),
        ({"maximum": 10**400}, "a number beyond"),
        ({"maximum": float("nan")}, "a number beyond"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
    ],
)
def test_what_lies_beyond_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_schema(schema)
