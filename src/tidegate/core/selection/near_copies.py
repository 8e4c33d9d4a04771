"""Near-copies: examples that call the same tools, in which prompt and answer both say almost the same as another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tidegate.core.errors import RequestError
from tidegate.core.selection.limits import dropped_example
from tidegate.core.selection.near_duplicates import THRESHOLD, ShingleIndex, jaccard, shingles, text_shingles
from tidegate.core.selection.sequences import Fresh
from tidegate.core.selection.sifting import Sifted, no_preference, rank
from tidegate.core.strategy import tools_of


def near_distinct(
    fresh: Sequence[Fresh],
    *,
    most: int,
    seed: int,
    threshold: float = THRESHOLD,
    prefer: Callable[[Fresh], bool] = no_preference,
) -> Sifted[Fresh]:
    """Keep at most ``most`` (>= 1) examples that are near-copies of one another.

    Two examples are near-copies when they call the same tools in the same order, and the shingles of their prompts, and
    those of their answers, are similar enough. (The form of the text that a cluster also names is not compared: one
    other word makes another.) Shingles carry the numbers of their text: tasks of one template with other numbers are
    no copies. Examples are taken in the order that the seed stands for; one that ``most`` kept ones resemble goes.
    One whose prompt is unknown or holds something that is no text is compared with none.

    Args:
        fresh: with their texts.
        most: of mutual near-copies.
        seed: decides which stay.
        threshold: Jaccard similarity in (0, 1].
        prefer: those that are taken first.

    Raises:
        ValueError: the threshold is outside its range.
    """
    texts = [_texts(item) for item in fresh]
    index = ShingleIndex([text.joint for text in texts], threshold=threshold, all_at_once=False)
    kept: set[int] = set()
    for place in sorted(
        range(len(fresh)), key=lambda place: (not prefer(fresh[place]), rank(seed, fresh[place].example.id))
    ):
        here, tools = texts[place], tools_of(fresh[place].example.cluster)
        copies = (
            other
            for other in index.near(here.joint)
            if tools_of(fresh[other].example.cluster) == tools and here.resembles(texts[other], threshold)
        )
        if sum(1 for _ in islice(copies, most)) < most:
            kept.add(place)
            index.admit(place)
    return Sifted(
        kept=tuple(item for place, item in enumerate(fresh) if place in kept),
        dropped=tuple(dropped_example(item, "near_duplicate") for place, item in enumerate(fresh) if place not in kept),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """Shingles of prompt and answer. Of two that are similar in both parts the joint sets are as similar."""

    prompt: frozenset[str]
    answer: frozenset[str]
    joint: frozenset[str]

    def resembles(self, other: _Texts, threshold: float) -> bool:
        return jaccard(self.prompt, other.prompt) >= threshold and jaccard(self.answer, other.answer) >= threshold


def _texts(item: Fresh) -> _Texts:
    alone = frozenset({f"unreadable {item.example.id}"})
    try:
        prompt = shingles(item.prompt) if item.prompt else alone
    except RequestError:
        prompt = alone
    answer = text_shingles(item.answer)
    joint = frozenset({*(f"p {shingle}" for shingle in prompt), *(f"a {shingle}" for shingle in answer)})
    return _Texts(prompt=prompt, answer=answer, joint=joint)
