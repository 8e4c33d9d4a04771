"""How much an example counts in training, so that what is common does not drown what is rare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def exploration_weights(clusters: Sequence[str]) -> tuple[float, ...]:
    """Weights that let rare ways of solving survive: proportional to 1 / sqrt(frequency of the strategy cluster).

    A policy that is trained on its own successes over and over samples a strategy of probability p that succeeds with
    q in proportion to p q, and ends at the largest q alone. With these weights it is proportional to sqrt(p q), and
    the loop comes to rest at p proportional to q: better strategies are used more, and none that works dies out.

    Args:
        clusters: the strategy cluster of each example.

    Returns:
        One weight > 0 an example, with mean 1; equal for equal clusters, and all 1 where there is one cluster only.
    """
    counts = Counter(clusters)
    unit = len(clusters) / math.fsum(math.sqrt(count) for count in counts.values()) if counts else 0.0
    return tuple(unit / math.sqrt(counts[cluster]) for cluster in clusters)
