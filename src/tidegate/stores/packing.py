"""Token ids and log-probabilities as bytes: little-endian, self-describing, checked when they are read.

A packed array is one byte of encoding (0 plain, 1 deflate), four bytes of element count, then the elements.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from tidegate.core.errors import RequestError, StoreError

_HEADER = struct.Struct("<BI")
_ITEM_BYTES = 4
_PLAIN, _DEFLATE = 0, 1
_WORTH_TRYING_BYTES = 512  # below it the saving is lost in the row's own overhead
_WORTH_KEEPING = 0.8  # a smaller saving does not pay for decompressing at every read


def pack_token_ids(values: Sequence[int]) -> bytes:
    """Pack token ids (T,) as int32.

    Raises:
        RequestError: a value does not fit.
    """
    try:
        return _pack(np.asarray(values, dtype="<i4").tobytes(), len(values))
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"token ids cannot be stored: {error}; integers of 32 bits are accepted") from error


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    """Unpack what :func:`pack_token_ids` wrote.

    Raises:
        StoreError: the bytes are damaged.
    """
    return tuple(np.frombuffer(_unpack(data), dtype="<i4").tolist())


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Pack log-probabilities (T,) as float32: 7 digits, far below what any engine reproduces.

    Raises:
        RequestError: a value is no number.
    """
    try:
        return _pack(np.asarray(values, dtype="<f4").tobytes(), len(values))
    except (TypeError, ValueError) as error:
        raise RequestError(f"log-probabilities cannot be stored: {error}; numbers are accepted") from error


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """Unpack what :func:`pack_logprobs` wrote.

    Raises:
        StoreError: the bytes are damaged.
    """
    return tuple(np.frombuffer(_unpack(data), dtype="<f4").tolist())


def _pack(plain: bytes, count: int) -> bytes:
    if len(plain) >= _WORTH_TRYING_BYTES:
        small = zlib.compress(plain, 1)
        if len(small) <= _WORTH_KEEPING * len(plain):
            return _HEADER.pack(_DEFLATE, count) + small
    return _HEADER.pack(_PLAIN, count) + plain


def _unpack(data: bytes) -> bytes:
    if len(data) < _HEADER.size:
        raise StoreError(f"a packed array has {len(data)} bytes; at least {_HEADER.size} are expected: it is damaged")
    encoding, count = _HEADER.unpack_from(data)
    plain = data[_HEADER.size :]
    expected = count * _ITEM_BYTES
    if encoding == _DEFLATE:
        inflater = zlib.decompressobj()
        try:
            plain = inflater.decompress(plain, expected + 1)  # one more shows what is too long
        except zlib.error as error:
            raise StoreError(f"a packed array of {count} elements is damaged: {error}") from error
        if not inflater.eof or inflater.unused_data:  # the checksum was not reached, or something follows it
            raise StoreError(f"a packed array of {count} elements is damaged: its compressed form has another length")
    elif encoding != _PLAIN:
        raise StoreError(f"a packed array has the encoding {encoding!r}; 0 and 1 are known: it is damaged")
    if len(plain) != expected:
        raise StoreError(
            f"a packed array of {count} elements has {len(plain)} bytes instead of {expected}: it is damaged"
        )
    return plain
