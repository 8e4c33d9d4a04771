"""What the answers of one release were like, each figure with the count that it rests on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.gate.samples import Strategy, trigram_similarity, words_of
from tidegate.core.monitors.answers import RecordedAnswer
from tidegate.core.selection.sifting import rank
from tidegate.core.statistics import distinct_n, effective_strategies, pass_at_k, vendi_score

MAX_K = 8
"""Largest k of pass@k."""
VENDI_ANSWERS = 200
"""Most answers of a Vendi score, whose time grows with their cube."""
_VENDI_CHARACTERS = 500  # of an answer; they bound the memory of the trigram counts
_WORDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitors:
    """Figures of one release, or of one kind of tasks under one release; None: nothing to compute it from.

    ``success`` = ``passed`` / ``judged``. ``coverage`` = ``kinds_solved`` (with a success) / ``kinds`` (with a
    verdict). ``pass_at_1`` and ``pass_at_k`` over the same ``prompts`` that have at least ``k`` verdicts, where ``k``
    in [2, 8] is the largest that any prompt allows. Among ``passed`` answers: ``strategies`` (effective number),
    ``distinct`` (distinct-2), and ``vendi`` over ``vendi_answers`` <= 200 of them. ``entropy`` in nats a token over
    ``entropy_tokens`` sampled at ``temperature``, the one that most of the usable tokens were sampled at. ``tokens``:
    mean of an episode. ``no_reply``, ``invalid_tool_call``, ``refused``: shares of ``episodes``.
    """

    episodes: int
    judged: int
    passed: int
    success: float | None
    kinds: int
    kinds_solved: int
    coverage: float | None
    prompts: int
    k: int | None
    pass_at_1: float | None
    pass_at_k: float | None
    strategies: float | None
    distinct: float | None
    vendi: float | None
    vendi_answers: int
    entropy: float | None
    entropy_tokens: int
    temperature: float | None
    tokens: float
    no_reply: float
    invalid_tool_call: float
    refused: float


def measure(answers: Sequence[RecordedAnswer]) -> Monitors:
    """Measure some answers of one release; their order makes no difference.

    Args:
        answers: at least one.

    Raises:
        ValueError: there is none.
    """
    if not answers:
        raise ValueError("answers = []; at least one recorded answer is accepted")
    ranked = ranked_answers(answers)
    judged = [answer for answer in ranked if answer.passed is not None]
    passing = [answer.strategy for answer in judged if answer.passed]
    kinds, solved = {answer.kind for answer in judged}, {answer.kind for answer in judged if answer.passed}
    counts = _prompt_counts(judged)
    k = min(MAX_K, max((asked for asked, _ in counts.values()), default=0))
    repeated = [count for count in counts.values() if count[0] >= k] if k >= 2 else []
    vendi = passing[:VENDI_ANSWERS]
    temperature, surprisal, tokens = _sampled(ranked)
    return Monitors(
        episodes=len(ranked),
        judged=len(judged),
        passed=len(passing),
        success=_share(len(passing), len(judged)),
        kinds=len(kinds),
        kinds_solved=len(solved),
        coverage=_share(len(solved), len(kinds)),
        prompts=len(repeated),
        k=k if repeated else None,
        pass_at_1=_mean([pass_at_k(asked, passed, 1) for asked, passed in repeated]),
        pass_at_k=_mean([pass_at_k(asked, passed, k) for asked, passed in repeated]),
        strategies=_strategies(passing),
        distinct=distinct_n([words_of(strategy) for strategy in passing], _WORDS) if passing else None,
        vendi=vendi_score(trigram_similarity([words_of(_shortened(one)) for one in vendi])) if vendi else None,
        vendi_answers=len(vendi),
        entropy=surprisal / tokens if tokens else None,
        entropy_tokens=tokens,
        temperature=temperature,
        tokens=sum(answer.tokens for answer in ranked) / len(ranked),
        no_reply=sum(answer.no_reply for answer in ranked) / len(ranked),
        invalid_tool_call=sum(answer.invalid_tool_call for answer in ranked) / len(ranked),
        refused=sum(answer.refused for answer in ranked) / len(ranked),
    )


def by_kind(answers: Sequence[RecordedAnswer]) -> dict[str, list[RecordedAnswer]]:
    """Answers of each kind of tasks, kinds in rising order."""
    kinds: dict[str, list[RecordedAnswer]] = {}
    for answer in sorted(answers, key=lambda answer: answer.kind):
        kinds.setdefault(answer.kind, []).append(answer)
    return kinds


def ranked_answers(answers: Sequence[RecordedAnswer]) -> list[RecordedAnswer]:
    """Answers in an order that depends on their ids alone and follows nothing in them."""
    return sorted(answers, key=lambda answer: rank(0, answer.id))


def _prompt_counts(judged: Sequence[RecordedAnswer]) -> dict[str, tuple[int, int]]:
    """Verdicts and passes of each prompt."""
    asked = Counter(answer.prompt for answer in judged)
    passed = Counter(answer.prompt for answer in judged if answer.passed)
    return {prompt: (count, passed[prompt]) for prompt, count in sorted(asked.items())}


def _sampled(answers: Sequence[RecordedAnswer]) -> tuple[float | None, float, int]:
    """Temperature, surprisal and tokens of the temperature that most tokens were sampled at."""
    tokens: Counter[float] = Counter()
    for answer in answers:
        if answer.temperature is not None:
            tokens[answer.temperature] += answer.tokens
    if not tokens:
        return None, 0.0, 0
    temperature = max(tokens, key=lambda one: (tokens[one], one))
    surprisals = [answer.surprisal or 0.0 for answer in answers if answer.temperature == temperature]
    return temperature, math.fsum(surprisals), tokens[temperature]


def _strategies(passing: Sequence[Strategy]) -> float | None:
    counts = Counter(passing).values()
    return effective_strategies([count / len(passing) for count in counts]) if passing else None


def _shortened(strategy: Strategy) -> Strategy:
    return strategy[0], strategy[1][:_VENDI_CHARACTERS]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
