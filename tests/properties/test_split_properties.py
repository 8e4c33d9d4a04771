"""The split of users: stable, keyed, and as large as asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import ConfigError
from tidegate.core.split import split_of, user_key
from tidegate.core.types import Split

KEY = b"k" * 32
SHARES = (0.85, 0.05, 0.10)
keys = st.binary(min_size=16, max_size=64)
shares = (
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
    .filter(any)
    .map(lambda parts: tuple(part / sum(parts) for part in parts))
)


@given(key=keys, unit=st.text(), shares=shares)
def test_a_user_never_moves(key: bytes, unit: str, shares: tuple[float, float, float]):
    first = split_of(key, unit, shares)
    assert all(split_of(key, unit, shares) is first for _ in range(3))
    assert user_key(key, unit) == user_key(key, unit)


@given(unit=st.text(), shares=shares)
def test_a_split_without_a_share_gets_nobody(unit: str, shares: tuple[float, float, float]):
    chosen = split_of(KEY, unit, shares)
    assert dict(zip(Split, shares, strict=True))[chosen] > 0.0


@given(unit=st.text(), grown=st.integers(0, 85))
def test_a_larger_train_share_only_ever_adds_users_to_it(unit: str, grown: int):
    less, more = (0.15, 0.45, 0.40), (0.15 + grown / 100, 0.85 - grown / 100, 0.0)
    if split_of(KEY, unit, less) is Split.TRAIN:
        assert split_of(KEY, unit, more) is Split.TRAIN


@pytest.mark.parametrize("key", [KEY, b"another key of 32 bytes.........", bytes(16)])
def test_the_shares_are_met(key: bytes):
    count = 20_000
    found = [split_of(key, f"user-{n}", SHARES) for n in range(count)]
    for split, share in zip(Split, SHARES, strict=True):
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs(found.count(split) / count - share) < 5 * deviation


def test_another_key_gives_another_split_and_another_name():
    users = [f"user-{n}" for n in range(2000)]
    moved = sum(split_of(KEY, u, (0.5, 0.25, 0.25)) is not split_of(b"x" * 32, u, (0.5, 0.25, 0.25)) for u in users)
    assert 0.5 < moved / len(users) < 0.75  # independent splits differ for 1 - (1/4 + 1/16 + 1/16) of the users
    assert len({user_key(KEY, u) for u in users}) == len(users)
    assert user_key(KEY, "ann") != user_key(b"x" * 32, "ann")


def test_golden_values_that_must_never_change():
    """A change here would move users between splits, and sealed users into training."""
    assert [n for n in range(40) if split_of(KEY, f"user-{n}", SHARES) is Split.SEALED] == [2, 3, 17, 23, 27, 28, 37]
    assert [n for n in range(40) if split_of(KEY, f"user-{n}", SHARES) is Split.DEV] == [0, 6, 29]
    assert user_key(KEY, "ann") == "baf5a8f8029ce9a86dfd7828d8acfd6c"


@given(unit=st.text(min_size=1))
def test_the_id_itself_is_not_in_the_key(unit: str):
    key = user_key(KEY, unit)
    assert len(key) == 32
    assert len(unit) < 4 or unit not in key


def test_any_text_is_a_user_id():
    assert user_key(KEY, "\ud800") != user_key(KEY, "\ud801")
    assert split_of(KEY, "", SHARES) in Split


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (1.1, -0.1, 0.0), (0.0, 0.0, 0.0), (math.nan, 0.5, 0.5)])
def test_unusable_shares_are_refused(shares: tuple[float, float, float]):
    with pytest.raises(ConfigError, match="sum to 1"):
        split_of(KEY, "u", shares)


def test_a_short_key_is_refused():
    for call in (lambda: split_of(b"short", "u", SHARES), lambda: user_key(b"", "u")):
        with pytest.raises(ConfigError, match="at least 16"):
            call()
