"""What a release in the shadow makes of calls beside the release that users got: figures of pairs. Pure.

Every interval holds at the level of :data:`LEVEL` for one reading, not for a reader who stops at the best one; and
nothing here promotes: the gate does not read it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tidegate.core.shadow import ShadowOutcome, ShadowPair
from tidegate.core.statistics import tango_interval
from tidegate.core.types import Choice, JsonObject

LEVEL = 0.95


def calls_by_outcome(counts: Mapping[tuple[ShadowOutcome, str], int]) -> JsonObject:
    """How many drawn calls came to which end: ``answered``, and ``failed`` and ``dropped`` by reason."""
    by_reason = {
        outcome.value: {reason: count for (found, reason), count in sorted(counts.items()) if found is outcome}
        for outcome in (ShadowOutcome.FAILED, ShadowOutcome.DROPPED)
    }
    return {"answered": counts.get((ShadowOutcome.ANSWERED, ""), 0), **by_reason}


def comparisons(pairs: Sequence[ShadowPair], passed: Mapping[str, tuple[bool, bool]]) -> list[JsonObject]:
    """One comparison for each release that answered the users meanwhile, in the order in which they came.

    Args:
        pairs: calls that the shadow answered or failed, in order of time; each main interaction has an answer.
        passed: by interaction, whether the user's answer and the shadow's pass the verifier of the declared task.
    """
    groups: dict[str, list[ShadowPair]] = {}
    for pair in pairs:
        groups.setdefault(pair.main.release_id, []).append(pair)
    return [{"main": release, **_comparison(group, passed)} for release, group in groups.items()]


def _comparison(pairs: Sequence[ShadowPair], passed: Mapping[str, tuple[bool, bool]]) -> JsonObject:
    answered = [pair for pair in pairs if pair.answer.outcome is ShadowOutcome.ANSWERED]
    judged = [passed[pair.main.id] for pair in answered if pair.main.id in passed]
    return {
        "pairs": len(answered),
        "failed": _failed(pairs),
        "seconds": _medians([(pair.main.latency_s, pair.answer.seconds) for pair in answered]),
        "completion_tokens": _medians(
            [
                (len(_first(pair).token_ids), pair.answer.completion_tokens)
                for pair in answered
                if _first(pair).token_exact and pair.answer.completion_tokens is not None
            ]
        ),
        "identical": _share([_same_answer(pair) for pair in answered]),
        "identical_greedy": _share([_same_answer(pair) for pair in answered if pair.main.sampling.temperature == 0.0]),
        "same_tool_calls": _share(
            [_same_calls(pair) for pair in answered if _first(pair).tool_calls or pair.answer.tool_calls]
        ),
        "invalid_tool_call": _rates(
            [(_first(pair).invalid_tool_call, pair.answer.invalid_tool_call) for pair in answered]
        ),
        "no_reply": _rates(
            [
                (
                    _says_nothing(_first(pair).text, _first(pair).tool_calls),
                    _says_nothing(pair.answer.text, pair.answer.tool_calls),
                )
                for pair in answered
            ]
        ),
        "passed": _rates(judged),
    }


def _first(pair: ShadowPair) -> Choice:
    return pair.main.choices[0]


def _failed(pairs: Sequence[ShadowPair]) -> JsonObject:
    """The shadow's failures. Only calls whose user got an answer are drawn, so the other rate is 0 by construction."""
    reasons = Counter(pair.answer.reason for pair in pairs if pair.answer.outcome is ShadowOutcome.FAILED)
    return {
        **_rates([(False, pair.answer.outcome is ShadowOutcome.FAILED) for pair in pairs]),
        "reasons": dict(reasons),
    }


def _rates(pairs: Sequence[tuple[bool, bool]]) -> JsonObject:
    """Counts of two flags, and the difference of their rates (shadow - main) with its interval."""
    count = len(pairs)
    only_shadow = sum(shadow and not main for main, shadow in pairs)
    only_main = sum(main and not shadow for main, shadow in pairs)
    result: dict[str, Any] = {
        "of": count,
        "main": sum(main for main, _ in pairs),
        "shadow": sum(shadow for _, shadow in pairs),
    }
    if count:
        result["difference"] = (only_shadow - only_main) / count
        result["interval"] = list(tango_interval(only_shadow, only_main, count, LEVEL))
    return result


def _share(flags: Sequence[bool]) -> JsonObject:
    return {"of": len(flags), "count": sum(flags)}


def _medians(pairs: Sequence[tuple[float, float | None]]) -> JsonObject:
    known = [(main, shadow) for main, shadow in pairs if shadow is not None]
    if not known:
        return {"of": 0, "main": None, "shadow": None}
    return {
        "of": len(known),
        "main": float(median(main for main, _ in known)),
        "shadow": float(median(shadow for _, shadow in known)),
    }


def _same_answer(pair: ShadowPair) -> bool:
    return _first(pair).text == pair.answer.text and _same_calls(pair)


def _same_calls(pair: ShadowPair) -> bool:
    mine, other = _first(pair).tool_calls, pair.answer.tool_calls
    return [_meaning(call) for call in mine] == [_meaning(call) for call in other]


def _meaning(call: JsonObject) -> tuple[Any, Any]:
    """Name and arguments; ids are drawn anew for each call, and spaces in the arguments mean nothing."""
    function = call["function"]
    try:
        return function["name"], json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["name"], function["arguments"]


def _says_nothing(text: str, tool_calls: Sequence[JsonObject]) -> bool:
    return not text.strip() and not tool_calls
