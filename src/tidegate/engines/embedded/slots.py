"""Keys and values of the running rows: one slot a row, column = position, written in place.

Row i owns columns [0, length_i) of its slot. Rows join and leave without moving the others' columns, padding is
masked and overwritten before it can be seen, and sliding windows are exact because a column is a position.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_COLUMN_STEP = 64


class SlotLayer(CacheLayerMixin):
    """One layer's view of the slots; the window says which rows and columns the current forward writes."""

    is_sliding = False

    def __init__(self, slots: SlotCache, index: int) -> None:
        super().__init__()
        self._slots = slots
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (rows, heads, S, head_dim) at the window's positions; give all columns that may be seen."""
        slots = self._slots
        first, end, width = slots.first, slots.end, slots.width
        keys = slots.keys[self._index, first:end]
        values = slots.values[self._index, first:end]
        rows, positions = slots.rows, slots.positions
        keys[rows, :, positions] = key_states.transpose(1, 2)
        values[rows, :, positions] = value_states.transpose(1, 2)
        return keys[:, :, :width], values[:, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns."""
        del query_length
        return self._slots.width, 0

    def get_seq_length(self) -> int:
        """Columns in use before this forward, as far as masks care: positions are always passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """No maximum: slots grow."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the slots exist before the first forward."""


class SlotCache(Cache):
    """Slots for up to ``max_rows`` rows, grown as rows and columns need.

    Attributes:
        keys: (layers, rows, heads, columns, key_dim).
        values: (layers, rows, heads, columns, value_dim).
        first, end, width, rows, positions: window of the current forward, set by :meth:`aim`.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        max_rows: int,
        max_columns: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(layers=[SlotLayer(self, index) for index in range(layers)])
        self._max_rows = max_rows
        self._max_columns = max_columns
        self._empty_keys = torch.zeros(layers, 0, heads, 0, key_dim, dtype=dtype)
        self._empty_values = torch.zeros(layers, 0, heads, 0, value_dim, dtype=dtype)
        self.keys = self._empty_keys
        self.values = self._empty_values
        self.first = self.end = self.width = 0
        self.rows = self.positions = torch.zeros(0, 0, dtype=torch.long)

    @property
    def size_bytes(self) -> int:
        """Memory that the slots take."""
        return (self.keys.numel() + self.values.numel()) * self.keys.element_size()

    @property
    def token_bytes(self) -> int:
        """Memory of one column of one row."""
        layers, _, heads, _, key_dim = self.keys.shape
        return layers * heads * (key_dim + self.values.shape[4]) * self.keys.element_size()

    def release(self) -> None:
        """Give all memory back; every row is lost."""
        self.keys, self.values = self._empty_keys, self._empty_values

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for ``rows`` rows of ``columns`` columns, doubling what grows."""
        have_rows, have_columns = self.keys.shape[1], self.keys.shape[3]
        if rows <= have_rows and columns <= have_columns:
            return
        new_rows = have_rows if rows <= have_rows else min(self._max_rows, max(rows, 2 * have_rows))
        new_columns = have_columns
        if columns > have_columns:
            rounded = -(-columns // _COLUMN_STEP) * _COLUMN_STEP
            new_columns = max(columns, min(self._max_columns, max(rounded, have_columns * 3 // 2)))
        self.keys = _grown(self.keys, new_rows, new_columns)
        self.values = _grown(self.values, new_rows, new_columns)

    def aim(self, first: int, positions: torch.Tensor, width: int) -> None:
        """Next forward: rows [first, first + R) are written at ``positions`` (R, S) and see ``width`` columns."""
        self.first, self.end, self.width = first, first + positions.shape[0], width
        self.positions = positions
        self.rows = torch.arange(positions.shape[0])[:, None]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` columns of one row to another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first ``length`` columns of two rows."""
        if one == other:
            return
        for tensor in (self.keys, self.values):
            kept = tensor[:, one, :, :length].clone()
            tensor[:, one, :, :length] = tensor[:, other, :, :length]
            tensor[:, other, :, :length] = kept

    def put(self, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write (layers, heads, S, head_dim) at columns [start, start + S) of a row."""
        end = start + keys.shape[2]
        self.keys[:, row, :, start:end] = keys
        self.values[:, row, :, start:end] = values


def _grown(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    layers, old_rows, heads, old_columns, width = tensor.shape
    grown = torch.zeros(layers, rows, heads, columns, width, dtype=tensor.dtype)
    grown[:, :old_rows, :, :old_columns] = tensor
    return grown


def visible_columns(positions: torch.Tensor, width: int, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
    """Additive mask (R, 1, S, width): 0 where a query at ``positions`` (R, S) may look, the lowest number elsewhere.

    Args:
        positions: position of each query.
        width: columns.
        dtype: of the model.
        window: a query sees only that many latest positions, its own included; None sees all.
    """
    columns = torch.arange(width)
    visible = columns <= positions[:, :, None]
    if window is not None:
        visible &= columns > positions[:, :, None] - window
    mask = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype)
    return mask.masked_fill_(visible, 0)[:, None]
