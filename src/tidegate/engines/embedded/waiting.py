"""Rows that wait for a slot: callers take turns, whatever any of them has queued."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from tidegate.engines.embedded.rows import Row


class WaitingRows:
    """A queue for each caller, from which one row after another leaves in turn; a caller's own rows keep their order.

    Rows that were out already and are put back go before all others.

    Args:
        rows: that wait from the start.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._first: deque[Row] = deque()
        self._by_caller: OrderedDict[str, deque[Row]] = OrderedDict()
        self.extend(rows)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._first) + sum(len(rows) for rows in self._by_caller.values())

    def __iter__(self) -> Iterator[Row]:
        """All of them, caller by caller: not the order in which they leave."""
        yield from self._first
        for rows in self._by_caller.values():
            yield from rows

    def extend(self, rows: Iterable[Row]) -> None:
        """Queue new rows; a caller who waits for nothing takes the last turn."""
        for row in rows:
            self._by_caller.setdefault(row.call.request.caller, deque()).append(row)

    def put_back(self, rows: Iterable[Row]) -> None:
        """Rows that were taken and got no slot, in the order in which they leave next."""
        self._first.extendleft(reversed(list(rows)))

    def next(self) -> Row:
        """The row that :meth:`take` gives, which stays.

        Raises:
            IndexError: none waits.
        """
        if self._first:
            return self._first[0]
        for rows in self._by_caller.values():
            return rows[0]
        raise IndexError("no row waits")

    def take(self) -> Row:
        """Remove and return the next row; its caller's next turn comes after everybody else's.

        Raises:
            IndexError: none waits.
        """
        row = self.next()
        if self._first:
            return self._first.popleft()
        caller = row.call.request.caller
        rows = self._by_caller.pop(caller)
        rows.popleft()
        if rows:
            self._by_caller[caller] = rows
        return row

    def drop_cancelled(self) -> None:
        """Forget rows whose call was given up; nobody's turn changes."""
        self._first = deque(row for row in self._first if not row.call.cancelled)
        kept = ((caller, _alive(rows)) for caller, rows in self._by_caller.items())
        self._by_caller = OrderedDict((caller, rows) for caller, rows in kept if rows)

    def clear(self) -> None:
        """Forget all of them."""
        self._first.clear()
        self._by_caller.clear()


def _alive(rows: deque[Row]) -> deque[Row]:
    return deque(row for row in rows if not row.call.cancelled)
