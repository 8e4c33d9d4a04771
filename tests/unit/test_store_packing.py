"""Packed arrays: exact, small where that is possible, and never silently wrong."""

from __future__ import annotations

import math
import struct
import zlib

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


@pytest.mark.parametrize(("highest", "width", "code"), [(65_535, 2, 0x20), (65_536, 3, 0x30), (2**24 - 1, 3, 0x30)])
def test_token_ids_are_as_wide_as_the_largest_of_them(highest: int, width: int, code: int):
    values = (0, *(n * 7919 % 50_000 for n in range(500)), highest)
    packed = pack_token_ids(values)
    assert (packed[0], len(packed)) == (code, 5 + width * len(values))
    assert unpack_token_ids(packed) == values
    many = values * 20
    assert pack_token_ids(many)[0] == code | 1, "long arrays are deflated besides where that pays"
    assert unpack_token_ids(pack_token_ids(many)) == many


@pytest.mark.parametrize("odd", [-1, 2**24, 2**31 - 1, -(2**31)])
def test_what_fits_into_no_narrow_form_is_kept_whole(odd: int):
    values = (*range(500), odd)
    packed = pack_token_ids(values)
    assert (packed[0], len(packed)) == (0, 5 + 4 * len(values))
    assert unpack_token_ids(packed) == values


def test_arrays_of_earlier_versions_are_read():
    plain = struct.pack("<1000i", *range(1000))
    assert unpack_token_ids(struct.pack("<BI", 1, 1000) + zlib.compress(plain, 1)) == tuple(range(1000))
    assert unpack_token_ids(struct.pack("<BI", 0, 1000) + plain) == tuple(range(1000))


def test_narrow_elements_are_no_log_probabilities():
    with pytest.raises(StoreError, match="damaged"):
        unpack_logprobs(pack_token_ids(range(1000)))


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
@pytest.mark.parametrize("values", [[1, 2, 3], list(range(1000)), [7, 70_000] * 500, [7, 70_000] * 5000])
def test_damage_is_noticed(damage, values: list[int]):
    data = pack_token_ids(values)
    with pytest.raises(StoreError, match="damaged"):
        unpack_token_ids(damage(data))
