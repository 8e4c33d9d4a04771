"""Weights of a batch: kinds and strategies in balance, no user above a share, mean 1."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tidegate.core.selection.sequences import Fresh
from tidegate.core.selection.weights import exploration_weights

_DECIMALS = 9  # coarser than the rounding of sums, so that weights that are equal are written alike


def balanced(fresh: Sequence[Fresh], *, by_cluster: bool) -> tuple[Fresh, ...]:
    """Multiply weights by those of kinds and of the strategy clusters within each kind.

    Both are :func:`exploration_weights`. A kind of n examples weighs as much as sqrt(n) in all, and within it a cluster
    does; clusters count within their kind, so that a kind that is solved in one way only is not punished twice.

    Args:
        fresh: of any weights.
        by_cluster: False leaves the clusters out.
    """
    factors = list(exploration_weights([item.example.kind for item in fresh]))
    if by_cluster:
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, item in enumerate(fresh):
            places[item.example.kind].append(place)
        for members in places.values():
            within = exploration_weights([fresh[place].example.cluster for place in members])
            for place, factor in zip(members, within, strict=True):
                factors[place] *= factor
    return tuple(_weighted(item, item.example.weight * factor) for item, factor in zip(fresh, factors, strict=True))


def within_user_share(fresh: Sequence[Fresh], *, share: float) -> tuple[Fresh, ...]:
    """Scale weights down until no user has more than a share of the total, or one example's worth if that is more.

    A user's examples are scaled by one factor. Afterwards a user weighs at most the larger of ``share`` of the total
    as it then is, and what the heaviest of the user's examples weighed before. A user with one example is therefore
    never scaled, and a batch of few users is not forced to an equality that would undo its balance.

    Args:
        fresh: whose users are known; those of user ``""``, whom the operator stands for, stay as they are.
        share: in (0, 1].
    """
    weights: defaultdict[str, list[float]] = defaultdict(list)
    for item in fresh:
        weights[item.user_key].append(item.example.weight)
    users = sorted(user for user in weights if user)
    totals = np.array([math.fsum(weights[user]) for user in users])
    heaviest = np.array([max(weights[user]) for user in users])
    beside = math.fsum(weights.get("", ()))
    allowed = np.maximum(share * _capped_total(totals, heaviest, beside=beside, share=share), heaviest)
    factors = dict(zip(users, np.minimum(1.0, allowed / totals).tolist(), strict=True))
    return tuple(_weighted(item, item.example.weight * factors.get(item.user_key, 1.0)) for item in fresh)


def _capped_total(totals: NDArray[np.float64], heaviest: NDArray[np.float64], *, beside: float, share: float) -> float:
    """The largest W with W = beside + sum(min(totals, max(share * W, heaviest))).

    The right side is piecewise linear in W and starts at or below W for the uncapped sum, so that the root lies in the
    first piece from above at whose lower end it is at or above W.

    Args:
        totals: (U,) weight of each user before the cap.
        heaviest: (U,) weight of the user's heaviest example.
        beside: weight that is not capped.
        share: in (0, 1].
    """

    def excess(whole: float) -> float:
        return beside + float(np.minimum(totals, np.maximum(share * whole, heaviest)).sum()) - whole

    upper = beside + float(totals.sum())
    scaled = totals > heaviest
    ends = np.unique(np.concatenate([totals[scaled], heaviest[scaled], [0.0]]) / share)
    for lower in ends[ends < upper][::-1].tolist():
        below, above = excess(lower), excess(upper)
        if below >= 0.0:
            return lower + (upper - lower) * below / (below - above) if above < 0.0 else upper
        upper = lower
    return upper


def normalised_weights(fresh: Sequence[Fresh]) -> tuple[Fresh, ...]:
    """Divide weights by their mean; rounded to 9 decimals, at least 1e-9."""
    if not fresh:
        return ()
    mean = math.fsum(item.example.weight for item in fresh) / len(fresh)
    least = 10.0**-_DECIMALS
    return tuple(_weighted(item, max(round(item.example.weight / mean, _DECIMALS), least)) for item in fresh)


def _weighted(item: Fresh, weight: float) -> Fresh:
    return replace(item, example=replace(item.example, weight=weight))
