"""What differs between the databases that the stores run on. Everything else is one code path.

Whatever the backend: a write transaction has the whole database to itself, so that to look first and to write then is
safe; a read transaction is one snapshot and waits for no writer; what was committed survives a power cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import sqlalchemy as sa


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a lower-level error means. ``is_value``: the value at hand is to blame, and not the database."""

    is_value: bool
    detail: str


class Backend(Protocol):
    """One place that a database lies at, and how its server or library is spoken to."""

    errors: tuple[type[BaseException], ...]
    """What may be raised beside SQLAlchemy's errors."""

    @property
    def name(self) -> str:
        """How messages call the place; holds no password."""
        ...

    def prepare(self, *, create: bool) -> None:
        """Reject what cannot hold a database of ours, without touching it; make room for a new one with ``create``."""
        ...

    def engine(self) -> sa.Engine:
        """Connections that begin no transaction by themselves."""
        ...

    def begin(self, connection: sa.Connection, *, writes: bool) -> None:
        """Begin a transaction of one of the two kinds."""
        ...

    def set_up(self) -> None:
        """What is to be done once, before there are tables."""
        ...

    def check_in_place(self) -> None:
        """Refuse to commit what nobody would find again."""
        ...

    def damage(self, connection: sa.Connection) -> str | None:
        """Look through all data; the first damage found, if any."""
        ...

    def fault(self, error: BaseException) -> Fault:
        """What an error of the driver means and what to do about it."""
        ...
