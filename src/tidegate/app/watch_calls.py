"""How many calls of each release the engine failed, since the start of this process and not counted yet."""

from __future__ import annotations

from collections import Counter

from tidegate.core.gate.live_state import Calls


class CallTally:
    """Counts on the serving loop; a user's failures count once until :meth:`forget`."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._failed: set[tuple[str, str]] = set()

    def add(self, release_id: str, user_key: str, failed: bool) -> None:
        """One call that came to its end."""
        self._calls[release_id] += 1
        if failed and (release_id, user_key) not in self._failed:
            self._failed.add((release_id, user_key))
            self._errors[release_id] += 1

    def new(self, *, subject: str, control: str) -> Calls:
        """What two releases did since the last :meth:`take` or :meth:`forget`."""
        return Calls(
            subject=self._calls[subject],
            control=self._calls[control],
            subject_errors=self._errors[subject],
            control_errors=self._errors[control],
        )

    def take(self, calls: Calls, *, subject: str, control: str) -> None:
        """These were recorded; what came in the meantime stays."""
        self._calls.subtract({subject: calls.subject, control: calls.control})
        self._errors.subtract({subject: calls.subject_errors, control: calls.control_errors})

    def forget(self) -> None:
        """Count from here on: another trial begins."""
        self._calls.clear()
        self._errors.clear()
        self._failed.clear()
