"""What every step of a selection returns: what stays, and what went with the reason why.

Where a step keeps only some of equals, it ranks them by a hash of the seed and their id: the choice depends on
neither the order of the input nor the machine, and stands when the step is repeated. Things that are preferred come
before the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Group = TypeVar("Group", bound=Hashable)

EPISODE = "episode"
INTERACTION = "interaction"
FEEDBACK = "feedback"
DEMONSTRATION = "demonstration"
RATIONALIZED = "rationalized"
TASK = "task"
REPLAY = "replay"
KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Something that does not train.

    ``source``: episode, interaction, feedback, demonstration, rationalized, task or replay. ``reward`` and ``cluster``
    as those of an example, where they were known when it went.
    """

    id: str
    reason: str
    kind: str
    source: str
    reward: float | None = None
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted(Generic[Thing]):
    """``kept`` in the order of the input; together with ``dropped`` it is the whole input."""

    kept: tuple[Thing, ...]
    dropped: tuple[Dropped, ...]


def sift(
    things: Iterable[Thing], reason_against: Callable[[Thing], str | None], drop: Callable[[Thing, str], Dropped]
) -> Sifted[Thing]:
    """Keep the things that nothing speaks against."""
    kept: list[Thing] = []
    dropped: list[Dropped] = []
    for thing in things:
        reason = reason_against(thing)
        if reason is None:
            kept.append(thing)
        else:
            dropped.append(drop(thing, reason))
    return Sifted(kept=tuple(kept), dropped=tuple(dropped))


def rank(seed: int, identifier: str) -> str:
    """Place of an item in the order that the seed stands for: 64 hex digits."""
    return hashlib.sha256(f"{seed}:{identifier}".encode()).hexdigest()


def no_preference(thing: object) -> bool:
    """That of a limit which holds all things equal."""
    del thing
    return True


def limit(
    things: Sequence[Thing],
    *,
    identify: Callable[[Thing], str],
    group: Callable[[Thing], Group],
    quota: int,
    seed: int,
    drop: Callable[[Thing], Dropped],
    used: Mapping[Group, int] | None = None,
    prefer: Callable[[Thing], bool] = no_preference,
) -> Sifted[Thing]:
    """Keep at most ``quota`` (>= 0) things of each group.

    Args:
        things: what to choose from.
        identify: the id that a thing is ranked by.
        group: what the quota holds for.
        quota: most of one group.
        seed: decides which stay.
        drop: the record of a thing that goes.
        used: how much of its quota each group has used up already.
        prefer: the things that no other thing of their group takes the place of.
    """
    taken: dict[Group, int] = dict(used or {})
    chosen: set[int] = set()
    for position in sorted(
        range(len(things)), key=lambda index: (not prefer(things[index]), rank(seed, identify(things[index])))
    ):
        key = group(things[position])
        if taken.get(key, 0) < quota:
            taken[key] = taken.get(key, 0) + 1
            chosen.add(position)
    return Sifted(
        kept=tuple(thing for position, thing in enumerate(things) if position in chosen),
        dropped=tuple(drop(thing) for position, thing in enumerate(things) if position not in chosen),
    )
