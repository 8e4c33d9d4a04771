"""Packed arrays: exact, small where that is possible, and never silently wrong."""

from __future__ import annotations

import math

import pytest

from tidegate.core.errors import RequestError, StoreError
from tidegate.stores.packing import pack_logprobs, pack_token_ids, unpack_logprobs, unpack_token_ids


def test_the_layout_is_little_endian_and_self_describing():
    assert pack_token_ids([1, 256]) == bytes([0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0])
    assert pack_logprobs([-1.0]) == bytes([0, 1, 0, 0, 0, 0, 0, 0x80, 0xBF])
    assert pack_token_ids([]) == bytes(5)


def test_compression_only_where_it_pays():
    assert len(pack_token_ids(range(2000))) < 0.8 * 4 * 2000
    noise = [math.sin(n * n) for n in range(2000)]
    assert len(pack_logprobs(noise)) == 5 + 4 * 2000
    assert unpack_token_ids(pack_token_ids(range(2000))) == tuple(range(2000))


def test_infinite_log_probabilities_survive():
    assert unpack_logprobs(pack_logprobs([-math.inf, 0.0])) == (-math.inf, 0.0)


@pytest.mark.parametrize("values", [[2**31], ["x"], [None]])
def test_what_is_no_token_id_is_refused(values: list[object]):
    with pytest.raises(RequestError, match="token ids cannot be stored"):
        pack_token_ids(values)  # type: ignore[arg-type]


def test_what_is_no_number_is_refused():
    with pytest.raises(RequestError, match="log-probabilities cannot be stored"):
        pack_logprobs(["x"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:3],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\x07" + data[1:],
        lambda data: data[:1] + b"\xff" + data[2:],
    ],
)
@pytest.mark.parametrize("values", [[1, 2, 3], list(range(1000))])
def test_damage_is_noticed(damage, values: list[int]):
    data = pack_token_ids(values)
    with pytest.raises(StoreError, match="damaged"):
        unpack_token_ids(damage(data))
