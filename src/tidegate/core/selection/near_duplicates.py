"""Prompts that say almost the same: whether one was asked before in nearly the same words.

Two prompts are near-duplicates when the Jaccard similarity of their sets of word 3-grams reaches a threshold. Numbers
are words, so that two sums are different tasks while a greeting put before one changes little of a long prompt.

Source: Broder (1997), On the resemblance and containment of documents; the prefix filter is that of Bayardo, Ma and
Srikant (2007), Scaling up all pairs similarity search, which leaves the answer exact.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tidegate.core.chat import content_text
from tidegate.core.types import Messages

THRESHOLD = 0.8

_WORD = re.compile(r"\w+|[^\w\s]")
_SIZE = 3


def shingles(messages: Messages) -> frozenset[str]:
    """Word 3-grams of what the user says, case folded; the whole text where it is shorter.

    Instructions of the system are left out: an application repeats them with every prompt, and a long one would make
    everything alike.
    """
    said = [message for message in messages if message.get("role") == "user"]
    words = [word for message in said for word in _WORD.findall(content_text(message.get("content")).casefold())]
    if len(words) < _SIZE:
        return frozenset({" ".join(words)})
    return frozenset(" ".join(words[start : start + _SIZE]) for start in range(len(words) - _SIZE + 1))


class PromptIndex:
    """Answers whether a prompt is a near-duplicate of an indexed one, exactly.

    Args:
        prompts: to compare with.
        threshold: Jaccard similarity in (0, 1] from which two prompts count as near-duplicates.

    Raises:
        ValueError: the threshold is outside its range.
    """

    def __init__(self, prompts: Iterable[Messages], *, threshold: float = THRESHOLD) -> None:
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"threshold = {threshold!r}; a number in (0, 1] is accepted")
        self._threshold = threshold
        self._indexed = list({shingles(prompt) for prompt in prompts})
        self._frequency = Counter(shingle for indexed in self._indexed for shingle in indexed)
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        for number, indexed in enumerate(self._indexed):
            for shingle in self._prefix(indexed):
                self._holders[shingle].append(number)

    def has_near(self, prompt: Messages) -> bool:
        """Whether an indexed prompt says almost the same."""
        wanted = shingles(prompt)
        candidates = {number for shingle in self._prefix(wanted) for number in self._holders.get(shingle, ())}
        return any(_jaccard(wanted, self._indexed[number]) >= self._threshold for number in candidates)

    def _prefix(self, members: frozenset[str]) -> Sequence[str]:
        """The rarest shingles: two sets that are similar enough share one of each other's."""
        ordered = sorted(members, key=lambda shingle: (self._frequency[shingle], shingle))
        return ordered[: len(ordered) - math.ceil(self._threshold * len(ordered)) + 1]


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)
