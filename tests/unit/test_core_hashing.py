"""Canonical JSON: one value, one spelling."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.hashing import canonical_json, content_hash

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(values)
def test_canonical_json_reads_back_and_is_stable(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    assert "\n" not in text


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_order_of_keys_does_not_matter(value: dict[str, int]) -> None:
    assert content_hash(dict(reversed(value.items()))) == content_hash(value)


def test_the_spelling_is_fixed() -> None:
    value = {"b": [1, 2.5, None, True], "a": "é\n"}
    text = '{"a":"é\\n","b":[1,2.5,null,true]}'
    assert canonical_json(value) == text
    assert content_hash(value) == hashlib.sha256(text.encode()).hexdigest()


def test_another_process_with_another_hash_seed_agrees() -> None:
    code = "from tidegate.core.hashing import content_hash; print(content_hash({k: k for k in 'tidegate'}))"
    command = [sys.executable, "-c", code]
    hashes = {
        subprocess.run(command, env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True).stdout
        for seed in ("1", "2")
    }
    assert hashes == {content_hash({k: k for k in "tidegate"}) + "\n"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)
    with pytest.raises(TypeError):
        canonical_json({1, 2})
