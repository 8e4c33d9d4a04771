"""Token ids and log-probabilities as bytes: little-endian, self-describing, checked when they are read.

A packed array is one byte of encoding, four bytes of element count, then the elements. The lower half of the encoding
says how they are kept (0 plain, 1 deflate), the upper half how wide each is (0 four bytes, 2 and 3 so many, unsigned).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.core.errors import RequestError, StoreError

_HEADER = struct.Struct("<BI")
_ITEM_BYTES = 4
_PLAIN, _DEFLATE = 0, 1
_NARROW = {2: 0x20, 3: 0x30}  # by bytes of an element
_WIDTHS = {0x00: _ITEM_BYTES, **{code: width for width, code in _NARROW.items()}}
_WORTH_NARROWING_BYTES = 512  # below it the saving is lost in the row's own overhead
_WORTH_TRYING_BYTES = 4096  # deflate costs more than all the rest of a record; it finds what repeats in long prompts
_WORTH_KEEPING = 0.8  # a smaller saving does not pay for decompressing at every read


def pack_token_ids(values: Sequence[int]) -> bytes:
    """Pack token ids (T,) as int32.

    Raises:
        RequestError: a value does not fit.
    """
    try:
        return _pack(*_narrowed(np.asarray(values, dtype="<i4")), len(values))
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"token ids cannot be stored: {error}; integers of 32 bits are accepted") from error


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    """Unpack what :func:`pack_token_ids` wrote.

    Raises:
        StoreError: the bytes are damaged.
    """
    width, plain = _unpack(data)
    if width == 2:
        return tuple(np.frombuffer(plain, dtype="<u2").tolist())
    if width == 3:
        wide = np.zeros((len(plain) // 3, _ITEM_BYTES), dtype=np.uint8)
        wide[:, :3] = np.frombuffer(plain, dtype=np.uint8).reshape(-1, 3)
        plain = wide.tobytes()
    return tuple(np.frombuffer(plain, dtype="<i4").tolist())


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Pack log-probabilities (T,) as float32: 7 digits, far below what any engine reproduces.

    Raises:
        RequestError: a value is no number.
    """
    try:
        return _pack(_ITEM_BYTES, np.asarray(values, dtype="<f4").tobytes(), len(values))
    except (TypeError, ValueError) as error:
        raise RequestError(f"log-probabilities cannot be stored: {error}; numbers are accepted") from error


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """Unpack what :func:`pack_logprobs` wrote.

    Raises:
        StoreError: the bytes are damaged.
    """
    width, plain = _unpack(data)
    if width != _ITEM_BYTES:
        raise StoreError(f"packed log-probabilities have {width} bytes each instead of {_ITEM_BYTES}: they are damaged")
    return tuple(np.frombuffer(plain, dtype="<f4").tolist())


def _narrowed(values: NDArray[Any]) -> tuple[int, bytes]:
    """Width and bytes of int32 values: token ids of most vocabularies fit into two bytes, of all into three."""
    if values.nbytes < _WORTH_NARROWING_BYTES or values.min() < 0 or (highest := values.max()) >= 1 << 24:
        return _ITEM_BYTES, values.tobytes()
    if highest < 1 << 16:
        return 2, values.astype("<u2").tobytes()
    return 3, values.view(np.uint8).reshape(-1, _ITEM_BYTES)[:, :3].tobytes()


def _pack(width: int, plain: bytes, count: int) -> bytes:
    code = _NARROW.get(width, 0)
    if len(plain) >= _WORTH_TRYING_BYTES:
        small = zlib.compress(plain, 1)
        if len(small) <= _WORTH_KEEPING * len(plain):
            return _HEADER.pack(code | _DEFLATE, count) + small
    return _HEADER.pack(code | _PLAIN, count) + plain


def _unpack(data: bytes) -> tuple[int, bytes]:
    """Bytes of an element, and the elements."""
    if len(data) < _HEADER.size:
        raise StoreError(f"a packed array has {len(data)} bytes; at least {_HEADER.size} are expected: it is damaged")
    encoding, count = _HEADER.unpack_from(data)
    plain = data[_HEADER.size :]
    width = _WIDTHS.get(encoding & 0xF0)
    if width is None or encoding & 0x0F not in (_PLAIN, _DEFLATE):
        raise StoreError(f"a packed array has the encoding {encoding:#x}, which is not known: it is damaged")
    expected = count * width
    if encoding & 0x0F == _DEFLATE:
        inflater = zlib.decompressobj()
        try:
            plain = inflater.decompress(plain, expected + 1)  # one more shows what is too long
        except zlib.error as error:
            raise StoreError(f"a packed array of {count} elements is damaged: {error}") from error
        if not inflater.eof or inflater.unused_data:  # the checksum was not reached, or something follows it
            raise StoreError(f"a packed array of {count} elements is damaged: its compressed form has another length")
    if len(plain) != expected:
        raise StoreError(
            f"a packed array of {count} elements has {len(plain)} bytes instead of {expected}: it is damaged"
        )
    return width, plain
