"""The queue before the slots: turns between callers, order within one, and rows that come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.engines.embedded.waiting import WaitingRows


def row(caller: str, number: int = 0) -> Any:
    request = SimpleNamespace(caller=caller)
    return SimpleNamespace(call=SimpleNamespace(request=request, cancelled=False), number=number)


def taken(waiting: WaitingRows) -> list[Any]:
    return [waiting.take() for _ in range(len(waiting))]


@given(st.lists(st.sampled_from("abcd"), max_size=30))
def test_nobody_waits_for_a_second_turn_of_another_and_own_rows_keep_their_order(callers: list[str]) -> None:
    rows = [row(caller, number) for number, caller in enumerate(callers)]
    left = taken(WaitingRows(rows))
    assert sorted(r.number for r in left) == list(range(len(rows)))
    for caller in "abcd":
        own = [r.number for r in left if r.call.request.caller == caller]
        assert own == sorted(own)
    turns: dict[str, int] = {}
    still = {caller: callers.count(caller) for caller in callers}
    for r in left:
        caller = r.call.request.caller
        turns[caller] = turns.get(caller, 0) + 1
        still[caller] -= 1
        assert all(turns.get(other, 0) >= turns[caller] - 1 for other, count in still.items() if count)


def test_what_comes_back_goes_first_in_its_order() -> None:
    waiting = WaitingRows([row("a", 0), row("b", 1), row("a", 2)])
    first, second = waiting.take(), waiting.take()
    waiting.put_back([first, second])
    assert waiting.next() is first
    assert [r.number for r in taken(waiting)] == [0, 1, 2]


def test_rows_that_were_given_up_leave_and_nobody_s_turn_changes() -> None:
    rows = [row("a", 0), row("b", 1), row("a", 2), row("c", 3)]
    waiting = WaitingRows(rows)
    waiting.put_back([row("z", 9)])
    waiting.next().call.cancelled = True
    rows[1].call.cancelled = True
    waiting.drop_cancelled()
    assert len(waiting) == len(list(waiting)) == 3
    assert [r.number for r in taken(waiting)] == [0, 3, 2]


def test_an_empty_queue_says_so() -> None:
    waiting = WaitingRows([row("a")])
    waiting.clear()
    assert not waiting
    with pytest.raises(IndexError, match="no row waits"):
        waiting.take()
