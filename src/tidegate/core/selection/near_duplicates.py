"""Texts that say almost the same: whether a prompt was asked, or an answer given, before in nearly the same words.

Two prompts are near-duplicates when they hold the same numbers and the Jaccard similarity of their sets of word 3-grams
reaches a threshold. Much traffic is made from templates, whose prompts differ in one name or number and are different
tasks: every 3-gram carries a hash of all numbers of its text, so that texts with other numbers have none in common, and
the threshold is so high that another name in a sentence of 30 words makes another prompt.

A greeting that opens a prompt is left out where it is one of the few known here ("Hi.", "Hello there!", "Please");
another one makes another prompt of a short one, and changes little of a long one. To forgive any word that is added
would make one task of "add 2 and 3" and "never add 2 and 3". In writing without spaces (Chinese, Japanese, Thai, Lao,
Khmer, Burmese) every character is a word.

Source: Broder (1997), On the resemblance and containment of documents; the prefix filter is that of Bayardo, Ma and
Srikant (2007), Scaling up all pairs similarity search, which leaves the answer exact.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tidegate.core.chat import content_text
from tidegate.core.hashing import content_hash
from tidegate.core.types import Messages

THRESHOLD = 0.9

_SIZE = 3
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
_NUMERALS = "〇零一二两三四五六七八九十百千万亿"
_WORD = re.compile(rf"[{_NUMERALS}]+|(?!\d)[{_UNSPACED}]|(?:\d|(?![{_UNSPACED}])\w)+|[^\w\s]")
_NUMBER = re.compile(rf"\d+|[{_NUMERALS}]+")
_ONE = "一"  # alone it is more often a part of a word, as in "together", than a number
_GREETING = r"(?:hi|hello|hey|good (?:morning|afternoon|evening))(?: there)?\s*[,.!]+(?!\S)|[你您]好|こんにちは"
_OPENING = re.compile(rf"(?:(?:{_GREETING})[\s,.!\uff0c\u3002\uff01\u3001]*|please,?\s+)+")


def shingles(messages: Messages) -> frozenset[str]:
    """Word 3-grams of what the user says, case folded; the whole text where it is shorter.

    Instructions of the system are left out: an application repeats them with every prompt, and a long one would make
    everything alike.
    """
    said = [message for message in messages if message.get("role") == "user"]
    return _shingles([word for message in said for word in _words(content_text(message.get("content")).casefold())])


def text_shingles(text: str) -> frozenset[str]:
    """Shingles of one text, made as those of a prompt."""
    return _shingles(_words(text.casefold()))


def _shingles(words: Sequence[str]) -> frozenset[str]:
    if len(words) < _SIZE:
        return frozenset({" ".join(words)})
    numbers = [number for word in words for number in _NUMBER.findall(word) if number != _ONE]
    mark = content_hash(numbers)[:16]
    grams = (" ".join(words[start : start + _SIZE]) for start in range(len(words) - _SIZE + 1))
    return frozenset(f"{gram} {mark}" for gram in grams)


def _words(text: str) -> list[str]:
    """Words, numbers and marks in order, without what opens the text; a text that is nothing else stays whole."""
    text = text.strip()
    opening = _OPENING.match(text)
    return _WORD.findall(text, opening.end() if opening else 0) or _WORD.findall(text)


class ShingleIndex:
    """Finds the sets of shingles that are near-duplicates of a given one, exactly.

    Args:
        indexed: to compare with.
        threshold: Jaccard similarity in (0, 1] from which two sets count as near-duplicates.
        all_at_once: else only what :meth:`admit` was called with is found.

    Raises:
        ValueError: the threshold is outside its range.
    """

    def __init__(
        self, indexed: Sequence[frozenset[str]], *, threshold: float = THRESHOLD, all_at_once: bool = True
    ) -> None:
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"threshold = {threshold!r}; a number in (0, 1] is accepted")
        self._threshold = threshold
        self._indexed = indexed
        self._frequency = Counter(shingle for members in indexed for shingle in members)
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        if all_at_once:
            for place in range(len(indexed)):
                self.admit(place)

    def admit(self, place: int) -> None:
        """Let an indexed set be found from now on."""
        for shingle in self._prefix(self._indexed[place]):
            self._holders[shingle].append(place)

    def near(self, wanted: frozenset[str]) -> Iterator[int]:
        """Places of the indexed sets that are similar enough, in rising order."""
        candidates = {place for shingle in self._prefix(wanted) for place in self._holders.get(shingle, ())}
        return (place for place in sorted(candidates) if jaccard(wanted, self._indexed[place]) >= self._threshold)

    def _prefix(self, members: frozenset[str]) -> Sequence[str]:
        """The rarest shingles: two sets that are similar enough share one of each other's."""
        ordered = sorted(members, key=lambda shingle: (self._frequency[shingle], shingle))
        return ordered[: len(ordered) - math.ceil(self._threshold * len(ordered)) + 1]


class PromptIndex:
    """Answers whether a prompt is a near-duplicate of an indexed one, exactly.

    Args:
        prompts: to compare with.
        threshold: Jaccard similarity in (0, 1] from which two prompts count as near-duplicates.

    Raises:
        ValueError: the threshold is outside its range.
    """

    def __init__(self, prompts: Iterable[Messages], *, threshold: float = THRESHOLD) -> None:
        self._index = ShingleIndex(list({shingles(prompt) for prompt in prompts}), threshold=threshold)

    def has_near(self, prompt: Messages) -> bool:
        """Whether an indexed prompt says almost the same."""
        return any(True for _ in self._index.near(shingles(prompt)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Similarity of two sets that are not both empty, in [0, 1]."""
    return len(one & other) / len(one | other)
