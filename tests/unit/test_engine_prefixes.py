"""The prefix store: what is found, what is copied, and what goes first."""

from __future__ import annotations

import torch

from tidegate.engines.embedded.prefixes import BLOCK, PrefixStore


def tensors(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that name their token, values their negative: (2 layers, 1 head, T, 1)."""
    keys = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(2, 1, -1, 1).clone()
    return keys, -keys


def insert(store: PrefixStore, root: int, tokens: list[int]) -> None:
    store.insert(root, tokens, *tensors(tokens))


def found(store: PrefixStore, root: int, tokens: list[int]) -> list[float]:
    blocks = store.match(root, tokens)
    return torch.cat([block.keys[0, 0, :, 0] for block in blocks]).tolist() if blocks else []


def test_the_longest_common_beginning_in_whole_blocks_is_found() -> None:
    store = PrefixStore(1000)
    root = store.new_root()
    tokens = list(range(3 * BLOCK + 5))
    insert(store, root, tokens)
    assert len(store) == 3
    assert found(store, root, tokens) == tokens[: 3 * BLOCK]
    assert found(store, root, [*tokens[: 2 * BLOCK], 99, *tokens[2 * BLOCK :]]) == tokens[: 2 * BLOCK]
    assert found(store, root, [99, *tokens]) == []


def test_the_last_token_is_never_covered() -> None:
    store = PrefixStore(1000)
    root = store.new_root()
    tokens = list(range(2 * BLOCK))
    insert(store, root, tokens)
    assert len(found(store, root, tokens)) == BLOCK
    assert len(found(store, root, [*tokens, 1])) == 2 * BLOCK


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    store = PrefixStore(1000)
    root = store.new_root()
    one, two, same = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    insert(store, root, one + same)
    insert(store, root, two)
    assert len(found(store, root, two + same + [0])) == BLOCK


def test_shared_beginnings_are_stored_once() -> None:
    store = PrefixStore(1000)
    root = store.new_root()
    shared = list(range(2 * BLOCK))
    for tail in range(5):
        insert(store, root, shared + [100 + tail] * BLOCK)
    assert len(store) == 2 + 5


def test_roots_do_not_see_each_other_and_can_be_forgotten() -> None:
    store = PrefixStore(1000)
    one, two = store.new_root(), store.new_root()
    tokens = list(range(BLOCK + 1))
    insert(store, one, tokens)
    assert found(store, two, tokens) == []
    insert(store, two, tokens)
    store.forget(one)
    assert found(store, one, tokens) == []
    assert len(found(store, two, tokens)) == BLOCK


def test_the_least_recently_used_leaf_goes_first() -> None:
    store = PrefixStore(4 * BLOCK)
    root = store.new_root()
    old, new = [1] * (2 * BLOCK), [2] * (2 * BLOCK)
    insert(store, root, old)
    insert(store, root, new)
    assert len(found(store, root, [*old, 0])) == 2 * BLOCK  # now the younger one
    insert(store, root, [3] * BLOCK)
    assert len(store) == 4
    assert len(found(store, root, [*new, 0])) == BLOCK  # its second block went, not its first
    assert len(found(store, root, [*old, 0])) == 2 * BLOCK


def test_a_sequence_longer_than_the_store_keeps_its_beginning() -> None:
    store = PrefixStore(2 * BLOCK)
    root = store.new_root()
    tokens = list(range(5 * BLOCK))
    insert(store, root, tokens)
    assert len(found(store, root, tokens)) == 2 * BLOCK


def test_a_store_of_size_zero_keeps_nothing() -> None:
    store = PrefixStore(0)
    insert(store, store.new_root(), list(range(BLOCK)))
    assert len(store) == 0


def test_stored_values_are_copies() -> None:
    store = PrefixStore(1000)
    root = store.new_root()
    tokens = list(range(BLOCK))
    keys, values = tensors(tokens)
    store.insert(root, tokens, keys, values)
    keys.zero_()
    assert found(store, root, [*tokens, 0]) == tokens
