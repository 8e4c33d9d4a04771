"""Drawing examples without replacement, by hashes of the seed and their ids instead of a random generator."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from tidegate.core.selection.limits import dropped_example
from tidegate.core.selection.sequences import Fresh
from tidegate.core.selection.sifting import Sifted, rank

_DIGITS = 13  # 52 bits: every value and its half step are exact in float64


def weighted_sample(fresh: Sequence[Fresh], *, budget: int, seed: int) -> Sifted[Fresh]:
    """Keep all up to ``budget`` examples, above it a sample that favours heavy ones.

    Exponential keys -ln(u) / w, of which the smallest stay, draw without replacement and in proportion to the weights.
    What stays is reweighted by 1 / P(stays | the first key that does not), which is 1 - exp(-w * that key): without
    that an example would be favoured twice, by the draw and by its weight. So the expected weight of every example is
    the one that it came with, and a budget that nearly suffices changes nearly nothing.

    Hashes here are of other texts than those that the caps rank by; what a cap left over would else be drawn rarely.

    Args:
        fresh: with weights > 0.
        budget: most that stay, >= 1.
        seed: decides which stay.

    Source: Efraimidis and Spirakis (2006), Weighted random sampling with a reservoir; the reweighting is that of
        Cohen and Kaplan (2007), Summarizing data using bottom-k sketches.
    """
    if len(fresh) <= budget:
        return Sifted(kept=tuple(fresh), dropped=())
    keys = [-math.log(_uniform(seed, item.example.id)) / item.example.weight for item in fresh]
    order = sorted(range(len(fresh)), key=lambda place: (keys[place], fresh[place].example.id))
    first_out = keys[order[budget]]
    chosen = set(order[:budget])

    def reweighted(item: Fresh) -> Fresh:
        weight = item.example.weight
        return replace(item, example=replace(item.example, weight=weight / -math.expm1(-weight * first_out)))

    return Sifted(
        kept=tuple(reweighted(item) for place, item in enumerate(fresh) if place in chosen),
        dropped=tuple(dropped_example(item, "over_budget") for place, item in enumerate(fresh) if place not in chosen),
    )


def balanced_draw(things: Sequence[Fresh], *, size: int, seed: int) -> Sifted[Fresh]:
    """Draw ``size`` (>= 0) examples, of every kind equally many while it has more; the rest is ``not_drawn``."""
    queues: defaultdict[str, list[int]] = defaultdict(list)
    for place in sorted(range(len(things)), key=lambda place: rank(seed, f"draw\n{things[place].example.id}")):
        queues[things[place].example.kind].append(place)
    kinds = sorted(queues, key=lambda kind: rank(seed, f"draw kind\n{kind}"))
    rounds = max(map(len, queues.values()), default=0)
    turns = [queues[kind][turn] for turn in range(rounds) for kind in kinds if turn < len(queues[kind])]
    chosen = set(turns[:size])
    return Sifted(
        kept=tuple(thing for place, thing in enumerate(things) if place in chosen),
        dropped=tuple(dropped_example(thing, "not_drawn") for place, thing in enumerate(things) if place not in chosen),
    )


def _uniform(seed: int, identifier: str) -> float:
    """A number in (0, 1) that the seed and the id stand for."""
    return (int(rank(seed, f"sample\n{identifier}")[:_DIGITS], 16) + 0.5) / 16**_DIGITS
