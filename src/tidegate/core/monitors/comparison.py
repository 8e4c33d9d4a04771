"""A release beside the anchor, over answers that compare: as many of both, to the same prompts or kinds of tasks.

Live traffic asks each release its own prompts, and every measure of variety depends on how many answers it is taken
over. So answers are *paired* first: of the same kind, to the same prompt where both answered it, else to prompts that
only one of them was asked, each prompt once. Variety is then taken over blocks of eight pairs, as the gate takes it
over eight samples of a task.

``narrower`` needs what an alarm of the gate needs: an estimate beyond the limit, and evidence that there is any
narrowing at all, a one-sided p at or below 5 % divided by the number of measures. Under "no change" swapping the two
arms of a pair, block, or prompt changes nothing, so the p are exact as far as answers are independent; those of one
user hardly are, and nobody fixed beforehand how often is looked. A flag is a reason to look, the gate decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidegate.core.gate.collapse import MEASURES, swap_p
from tidegate.core.gate.policy import CollapseRules
from tidegate.core.gate.samples import variety
from tidegate.core.monitors.answers import RecordedAnswer
from tidegate.core.monitors.measures import MAX_K, by_kind, ranked_answers
from tidegate.core.statistics import pass_at_k, sign_test

LEVEL = 0.05 / MEASURES
BLOCK = 8
"""Pairs of a block."""
MIN_PAIRS = 64
"""Pairs from which on something is compared; 8 blocks are the fewest of which all differing can reach ``LEVEL``."""
MIN_PROMPTS = 10
MIN_KIND_VERDICTS = 10
"""Verdicts that a kind needs of both to count for coverage."""

SHIPPED_LIMITS = CollapseRules(
    tasks=200,
    samples=8,
    max_pass_at_k_drop=0.02,
    min_strategies=0.8,
    max_slices_lost=0.05,
    min_entropy=0.5,
    min_distinct=0.9,
)
"""``[collapse]`` of the policy that ships, for a policy that leaves the stage out."""

Pair: TypeAlias = tuple[RecordedAnswer, RecordedAnswer]
Values: TypeAlias = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measure of a release (``value``) and the anchor over ``count`` pairs, blocks, prompts or kinds (``unit``).

    ``value``, ``anchor`` and ``change`` (their ratio or difference, as ``change_is`` says; a ratio to an anchor at 0 is
    None) are None where ``count`` is below ``needed``. ``limit`` is the rule in words, None for measures that are shown
    and say nothing of narrowness; those have no ``p`` and no ``narrower``.
    """

    measure: str
    unit: str
    count: int
    needed: int
    value: float | None = None
    anchor: float | None = None
    change: float | None = None
    change_is: Literal["ratio", "difference"]
    limit: str | None = None
    p: float | None = None
    narrower: bool | None = None


def compare(
    release: Sequence[RecordedAnswer], anchor: Sequence[RecordedAnswer], limits: CollapseRules, *, seed: int
) -> tuple[Comparison, ...]:
    """Compare the answers of a release with the anchor's; their order makes no difference.

    Args:
        release: its answers.
        anchor: those of the anchor.
        limits: how narrow is too narrow.
        seed: of the random swaps.
    """

    def pairs(wanted: Callable[[RecordedAnswer], bool], key: Callable[[RecordedAnswer], Hashable]) -> list[Pair]:
        return paired([one for one in release if wanted(one)], [one for one in anchor if wanted(one)], key)

    def kind(answer: RecordedAnswer) -> str:
        return answer.kind

    passing = pairs(lambda answer: answer.passed is True, kind)
    every = pairs(lambda answer: True, kind)
    judged = pairs(lambda answer: answer.passed is not None, kind)
    sampled = pairs(lambda answer: answer.surprisal is not None, lambda answer: (answer.kind, answer.temperature))
    return (
        _pass_at_k(release, anchor, limits),
        _coverage(release, anchor, limits),
        *_varieties(passing, limits, seed),
        _ratio(
            "token entropy (nats)",
            _columns(sampled, _entropy),
            unit="pairs",
            needed=MIN_PAIRS,
            limit=limits.min_entropy,
            seed=(seed, 4),
        ),
        _shown("success", judged, lambda answer: float(answer.passed is True)),
        _shown("tokens", every, lambda answer: float(answer.tokens), ratio=True),
        _shown("no reply", every, lambda answer: float(answer.no_reply)),
        _shown("invalid tool call", every, lambda answer: float(answer.invalid_tool_call)),
        _shown("refused", every, lambda answer: float(answer.refused)),
    )


def paired(
    release: Sequence[RecordedAnswer], anchor: Sequence[RecordedAnswer], key: Callable[[RecordedAnswer], Hashable]
) -> list[Pair]:
    """Pairs of equal ``key``, as many of each key and shared prompt as both have; what is left over stays out."""
    result: list[Pair] = []
    ours, theirs = _grouped(release, key), _grouped(anchor, key)
    for name in sorted(ours.keys() & theirs.keys(), key=repr):
        mine, other = (_grouped(one, _prompt) for one in (ours[name], theirs[name]))
        for prompt in sorted(mine.keys() & other.keys()):
            result.extend(zip(mine[prompt], other[prompt], strict=False))
        alone = [
            ranked_answers([found[0] for prompt, found in arm.items() if prompt not in against])
            for arm, against in ((mine, other), (other, mine))
        ]
        result.extend(zip(*alone, strict=False))
    return result


def _grouped(
    answers: Sequence[RecordedAnswer], key: Callable[[RecordedAnswer], Key]
) -> dict[Key, list[RecordedAnswer]]:
    """Answers of equal ``key``, those of each in the order that their ids stand for."""
    groups: dict[Key, list[RecordedAnswer]] = {}
    for answer in ranked_answers(answers):
        groups.setdefault(key(answer), []).append(answer)
    return groups


def _prompt(answer: RecordedAnswer) -> str:
    return answer.prompt


def _columns(pairs: Sequence[Pair], value: Callable[[RecordedAnswer], float]) -> tuple[Values, Values]:
    mine, other = (np.array([value(pair[arm]) for pair in pairs], dtype=np.float64) for arm in (0, 1))
    return mine, other


def _entropy(answer: RecordedAnswer) -> float:
    return (answer.surprisal or 0.0) / answer.tokens


def _varieties(passing: Sequence[Pair], limits: CollapseRules, seed: int) -> list[Comparison]:
    """Strategies, distinct-2 and Vendi score over blocks of passing answers; a last block that is not full is left."""
    blocks = [passing[start : start + BLOCK] for start in range(0, len(passing) - BLOCK + 1, BLOCK)]
    values = np.array([[variety([pair[arm].strategy for pair in block]) for block in blocks] for arm in (0, 1)])
    mine, other = values.reshape(2, len(blocks), 3)
    measures = (
        ("effective strategies", limits.min_strategies),
        ("distinct-2", limits.min_distinct),
        ("Vendi score", limits.min_distinct),
    )
    return [
        _ratio(
            name,
            (mine[:, number], other[:, number]),
            unit=f"blocks of {BLOCK} passing pairs",
            needed=MIN_PAIRS // BLOCK,
            limit=limit,
            seed=(seed, number + 1),
        )
        for number, (name, limit) in enumerate(measures)
    ]


def _ratio(
    name: str, columns: tuple[Values, Values], *, unit: str, needed: int, limit: float, seed: tuple[int, int]
) -> Comparison:
    """The ratio of two means, with p from random swaps within each pair or block."""
    mine, other = columns
    rule = f"at least {limit:g} of the anchor's"
    if len(mine) < needed:
        return Comparison(measure=name, unit=unit, count=len(mine), needed=needed, change_is="ratio", limit=rule)
    value, anchor = float(mine.mean()), float(other.mean())
    p = swap_p(other - mine, np.random.default_rng(seed))
    return Comparison(
        measure=name,
        unit=unit,
        count=len(mine),
        needed=needed,
        value=value,
        anchor=anchor,
        change=value / anchor if anchor else None,
        change_is="ratio",
        limit=rule,
        p=p,
        narrower=value < limit * anchor and p <= LEVEL,
    )


def _pass_at_k(
    release: Sequence[RecordedAnswer], anchor: Sequence[RecordedAnswer], limits: CollapseRules
) -> Comparison:
    """pass@k over the prompts that both answered k times, with the largest k that enough prompts allow.

    Of each prompt as many verdicts of both count: the sign test needs pass@k to be spread alike in both arms, and it is
    spread less the more verdicts it is estimated from.
    """
    ours, theirs = (_grouped([one for one in arm if one.passed is not None], _prompt) for arm in (release, anchor))
    asked = {prompt: min(len(ours[prompt]), len(theirs[prompt])) for prompt in sorted(ours.keys() & theirs.keys())}
    depths = [k for k in range(2, MAX_K + 1) if sum(count >= k for count in asked.values()) >= MIN_PROMPTS]
    k = max(depths, default=2)
    shared = [prompt for prompt, count in asked.items() if count >= k]
    rule = f"at most {limits.max_pass_at_k_drop:g} below the anchor's"
    unit = f"prompts with {k} verdicts of both"
    if not depths:
        return Comparison(
            measure="pass@k", unit=unit, count=len(shared), needed=MIN_PROMPTS, change_is="difference", limit=rule
        )
    mine, other = (
        np.array([pass_at_k(*_verdicts(arm[prompt][: asked[prompt]]), k) for prompt in shared])
        for arm in (ours, theirs)
    )
    p = sign_test(int(np.sum(other > mine)), int(np.sum(mine > other)))
    drop = float(other.mean() - mine.mean())
    return Comparison(
        measure=f"pass@{k}",
        unit=unit,
        count=len(shared),
        needed=MIN_PROMPTS,
        value=float(mine.mean()),
        anchor=float(other.mean()),
        change=-drop,
        change_is="difference",
        limit=rule,
        p=p,
        narrower=drop > limits.max_pass_at_k_drop and p <= LEVEL,
    )


def _coverage(release: Sequence[RecordedAnswer], anchor: Sequence[RecordedAnswer], limits: CollapseRules) -> Comparison:
    """Kinds of which there is a success: one is lost when the anchor has one and the release, beyond chance, none."""
    ours, theirs = ({kind: _verdicts(found) for kind, found in by_kind(arm).items()} for arm in (release, anchor))
    kinds = [
        kind for kind in sorted(ours.keys() & theirs.keys()) if min(ours[kind][0], theirs[kind][0]) >= MIN_KIND_VERDICTS
    ]
    rule = f"at most {limits.max_slices_lost:g} of the anchor's lost"
    unit = f"kinds with {MIN_KIND_VERDICTS} verdicts of both"
    if not kinds:
        return Comparison(measure="kinds solved", unit=unit, count=0, needed=1, change_is="difference", limit=rule)
    solved = sum(theirs[kind][1] > 0 for kind in kinds)
    chances = [
        _none_by_chance(ours[kind][0], *theirs[kind]) for kind in kinds if theirs[kind][1] > 0 and ours[kind][1] == 0
    ]
    lost = sum(chance <= LEVEL / len(kinds) for chance in chances)
    return Comparison(
        measure="kinds solved",
        unit=unit,
        count=len(kinds),
        needed=1,
        value=float(solved - lost),
        anchor=float(solved),
        change=float(-lost),
        change_is="difference",
        limit=rule,
        p=min(1.0, len(kinds) * min(chances, default=1.0)),
        narrower=lost > limits.max_slices_lost * solved,
    )


def _verdicts(answers: Sequence[RecordedAnswer]) -> tuple[int, int]:
    """Verdicts and passes."""
    return sum(one.passed is not None for one in answers), sum(one.passed is True for one in answers)


def _none_by_chance(asked: int, anchor_asked: int, anchor_passed: int) -> float:
    """Fisher's exact one-sided p of a release that never passes: that all passes fall on the anchor's answers."""
    return math.comb(anchor_asked, anchor_passed) / math.comb(asked + anchor_asked, anchor_passed)


def _shown(
    name: str, pairs: Sequence[Pair], value: Callable[[RecordedAnswer], float], *, ratio: bool = False
) -> Comparison:
    """Means over pairs without a limit: these are other guards' business."""
    change_is: Literal["ratio", "difference"] = "ratio" if ratio else "difference"
    if len(pairs) < MIN_PAIRS:
        return Comparison(measure=name, unit="pairs", count=len(pairs), needed=MIN_PAIRS, change_is=change_is)
    mine, other = (float(column.mean()) for column in _columns(pairs, value))
    return Comparison(
        measure=name,
        unit="pairs",
        count=len(pairs),
        needed=MIN_PAIRS,
        value=mine,
        anchor=other,
        change=(mine / other if other else None) if ratio else mine - other,
        change_is=change_is,
    )
