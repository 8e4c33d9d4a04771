"""Keys and values of earlier prompts and answers, kept for prompts that begin the same way.

Sequences are cut into blocks of ``BLOCK`` tokens that form a tree: a block is found by its parent and its exact
tokens, so shared beginnings are stored once and nothing depends on a hash being unique. Roots belong to one
resident copy of an adapter; weights that changed mean a new root, so stale values cannot be found.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK = 16
_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBlock:
    """``keys`` and ``values`` (layers, heads, BLOCK, head_dim) of ``BLOCK`` tokens."""

    id: int
    root: int
    keys: torch.Tensor
    values: torch.Tensor


class PrefixStore:
    """A tree of blocks in least-recently-used order.

    Args:
        max_tokens: tokens to keep over all roots; 0 keeps nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK
        self._blocks: OrderedDict[_Key, PrefixBlock] = OrderedDict()
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        """Blocks that are stored."""
        return len(self._blocks)

    def new_root(self) -> int:
        """An id for the weights of one resident adapter."""
        return next(self._ids)

    def match(self, root: int, tokens: Sequence[int]) -> list[PrefixBlock]:
        """The stored blocks that ``tokens`` (T,) begin with; they never cover the last token."""
        found: list[_Key] = []
        parent = root
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(key)
            parent = block.id
        self._touch(found)
        return [self._blocks[key] for key in found]

    def insert(self, root: int, tokens: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the whole blocks of a computed sequence.

        Args:
            root: from :meth:`new_root`.
            tokens: (T,).
            keys: (layers, heads, >= T, key_dim); copied.
            values: (layers, heads, >= T, value_dim); copied.
        """
        path: list[_Key] = []
        parent = root
        for start in range(0, min(len(tokens) // BLOCK, self._max_blocks) * BLOCK, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                block = PrefixBlock(
                    id=next(self._ids),
                    root=root,
                    keys=keys[:, :, start : start + BLOCK].clone(),
                    values=values[:, :, start : start + BLOCK].clone(),
                )
                self._blocks[key] = block
            path.append(key)
            parent = block.id
        self._touch(path)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def forget(self, root: int) -> None:
        """Drop all blocks of one root."""
        for key in [key for key, block in self._blocks.items() if block.root == root]:
            del self._blocks[key]

    def _touch(self, path: Sequence[_Key]) -> None:
        """Leaves first, so that a parent is always younger than its children and they go before it."""
        for key in reversed(path):
            self._blocks.move_to_end(key)
