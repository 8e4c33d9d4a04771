"""Whether two computations of the same log-probabilities agree: trainer and server, decoding and scoring.

A policy that is trained and served by different code has two distributions under one name. Importance ratios then
compare code with code, and an adapter that was loaded wrongly answers like something nobody judged. The trainer takes
down what it computes for a few fixed texts of ours; before a swap the serving engine is asked for the same. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tidegate.core.errors import AdapterError, RequestError
from tidegate.core.types import JsonObject, Messages

SCHEMA: Final = "tidegate.agreement/1"
MANIFEST_KEY: Final = "agreement"
"""Field of an adapter's manifest that holds the record; its content is part of the adapter's hash."""

MAX_SCORED: Final = 64
"""Tokens of a text that are scored."""

AGREEMENT_TEXTS: Final[tuple[tuple[Messages, str], ...]] = (
    (
        ({"role": "user", "content": "What is 2 + 2?"},),
        "2 + 2 is 4. Adding two to two gives four, which is an even number.",
    ),
    (
        ({"role": "user", "content": "Name a colour."},),
        "Blue. It is the colour of a clear sky by day and of deep water seen from above.",
    ),
    (
        (
            {"role": "system", "content": "You may call tools."},
            {"role": "user", "content": "How much is 12 times 7? Use the calculator."},
        ),
        '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>',
    ),
    (
        (
            {"role": "user", "content": "Write the days of the week in order."},
            {"role": "assistant", "content": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."},
            {"role": "user", "content": "And now the first four months?"},
        ),
        "January, February, March, April.\nThe year goes on with May and June, and ends in December.",
    ),
)
"""Conversations and answers to them. They are ours: a record of log-probabilities must hold nothing that a user said.
No model wrote them, so that trainer and server need not generate to score the same tokens."""

_DECIMALS = 6
"""Of a log-probability in nats: below the rounding of float32 for all but the likeliest tokens."""

_MOST_SEQUENCES = 8
_MOST_TOKENS = 512  # beside a running server's decoding every sequence costs a pass of this length
_SHIFTED = 1 / 3
"""Share of the gap that is left when answers are compared one token off, below which that is called the cause."""
_NEARER = 1 / 2
"""Share of the gap to the trained weights below which the gap to the base says that the base answers.

Noise that is much larger than what training changed makes both gaps alike; a ratio of two does not come of noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest accepted gaps in nats: of one token, and in the mean of all tokens."""

    max_nats: float
    mean_nats: float


DEFAULT_TOLERANCE: Final = Tolerance(max_nats=2.5, mean_nats=0.2)
"""Twice what merging into bfloat16 did to a right adapter (1.28 and 0.10 nats, SmolLM2-135M); the base in an adapter's
place gave itself away by a mean of 1.17, its own parent by 0.29."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far two statements of the same tokens' log-probabilities lie apart, in nats.

    ``p99`` is the 99th percentile by the nearest rank, ``above`` the share of tokens beyond the tolerance for one.
    ``ratio_low`` and ``ratio_high`` are the smallest and largest exp(second - first): what an importance weight of
    unchanged weights would be, where it should be 1.
    """

    tokens: int
    max: float
    mean: float
    p99: float
    above: float
    ratio_low: float
    ratio_high: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether neither bound is passed; gaps that are no numbers pass both."""
        return self.max <= tolerance.max_nats and self.mean <= tolerance.mean_nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """Tokens (T,) of a text and what the trainer computed for those from index ``first`` on, in nats at temperature 1.

    ``logprobs`` (T - first,) are those of the trained weights, ``base_logprobs`` of the base model without them.
    """

    token_ids: tuple[int, ...]
    first: int
    logprobs: tuple[float, ...]
    base_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementRecord:
    """What the trainer says of the weights that it wrote. ``dtype`` is that of its base weights."""

    dtype: str
    sequences: tuple[ScoredSequence, ...]

    def to_json(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {
            "schema": SCHEMA,
            "dtype": self.dtype,
            "sequences": [
                {
                    "token_ids": list(sequence.token_ids),
                    "first": sequence.first,
                    "logprobs": list(sequence.logprobs),
                    "base_logprobs": list(sequence.base_logprobs),
                }
                for sequence in self.sequences
            ],
        }

    def with_logprobs(self, found: Sequence[Sequence[float]]) -> AgreementRecord:
        """The same texts and base under other weights, whose log-probabilities are given by sequence."""
        pairs = zip(self.sequences, found, strict=True)
        return replace(self, sequences=tuple(replace(one, logprobs=rounded(logprobs)) for one, logprobs in pairs))

    @property
    def trained(self) -> tuple[tuple[float, ...], ...]:
        """Log-probabilities of the trained weights, by sequence."""
        return tuple(sequence.logprobs for sequence in self.sequences)

    @property
    def base(self) -> tuple[tuple[float, ...], ...]:
        """Log-probabilities of the base model, by sequence."""
        return tuple(sequence.base_logprobs for sequence in self.sequences)


def rounded(logprobs: Sequence[float]) -> tuple[float, ...]:
    """Log-probabilities as a record holds them."""
    return tuple(round(value, _DECIMALS) for value in logprobs)


def record_in(manifest: JsonObject, *, adapter: str) -> AgreementRecord | None:
    """The record that an adapter's manifest holds; None for one that was made without.

    Args:
        manifest: of the adapter.
        adapter: its name, for messages.

    Raises:
        AdapterError: what stands there is no record, or one too large to be checked beside traffic.
    """
    found = manifest.get(MANIFEST_KEY)
    if found is None:
        return None
    try:
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']!r}; {SCHEMA!r} is read here")
        sequences = tuple(_sequence(values) for values in found["sequences"])
        if not 1 <= len(sequences) <= _MOST_SEQUENCES:
            raise ValueError(f"it holds {len(sequences)} sequences; 1 to {_MOST_SEQUENCES} are accepted")
        return AgreementRecord(dtype=str(found["dtype"]), sequences=sequences)
    except (LookupError, TypeError, ValueError) as error:
        raise AdapterError(
            f"adapter {adapter!r}: {MANIFEST_KEY!r} in its manifest is no record of the trainer "
            f"({type(error).__name__}: {error}); train it anew"
        ) from error


def _sequence(values: Mapping[str, Any]) -> ScoredSequence:
    token_ids, first = tuple(values["token_ids"]), values["first"]
    if not all(type(token) is int and token >= 0 for token in token_ids) or len(token_ids) > _MOST_TOKENS:
        raise ValueError(f"token_ids are up to {_MOST_TOKENS} integers from 0")
    if type(first) is not int or not 1 <= first < len(token_ids):
        raise ValueError(f"first = {first!r} of {len(token_ids)} tokens; 1 to {len(token_ids) - 1} is accepted")
    scored = {name: tuple(float(value) for value in values[name]) for name in ("logprobs", "base_logprobs")}
    for name, logprobs in scored.items():
        if len(logprobs) != len(token_ids) - first or not all(map(math.isfinite, logprobs)):
            raise ValueError(f"{name} are {len(token_ids) - first} finite numbers, one a scored token")
    return ScoredSequence(token_ids=token_ids, first=first, **scored)


def gap_between(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, tolerance: Tolerance) -> Gap:
    """Compare two statements of the same tokens.

    Args:
        one: log-probabilities in nats by sequence.
        other: of the same shape.
        tolerance: whose bound for one token ``above`` counts by.

    Raises:
        ValueError: the shapes differ, or there is no token.
    """
    if [len(part) for part in one] != [len(part) for part in other]:
        raise ValueError(f"{[len(part) for part in one]} log-probabilities against {[len(part) for part in other]}")
    signed = [b - a for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True)]
    if not signed:
        raise ValueError("there is no token to compare")
    # What is no number on either side is no agreement, not even with itself.
    sizes = sorted(abs(value) if math.isfinite(value) else math.inf for value in signed)
    ratios = [math.exp(min(value, 700.0)) if not math.isnan(value) else math.inf for value in signed]
    return Gap(
        tokens=len(sizes),
        max=sizes[-1],
        mean=sum(sizes) / len(sizes),
        p99=sizes[math.ceil(0.99 * len(sizes)) - 1],
        above=sum(size > tolerance.max_nats for size in sizes) / len(sizes),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )


async def compare(
    record: AgreementRecord, ask: Callable[[ScoredSequence], Awaitable[Sequence[float]]], *, tolerance: Tolerance
) -> tuple[Gap | None, str | None]:
    """Hold what an engine states for the texts of a record to it.

    Args:
        record: of the trainer.
        ask: what the engine states for the scored tokens of a text. A text that it refuses with a RequestError, because
            its context is shorter, is left out.
        tolerance: what is accepted.

    Returns:
        The gap, None where no text was taken or the answers have another shape; and as :func:`objection_to`.
    """
    scored: list[ScoredSequence] = []
    found: list[Sequence[float]] = []
    for sequence in record.sequences:
        try:
            stated = await ask(sequence)
        except RequestError:
            continue
        scored.append(sequence)
        found.append(stated)
    if not scored:
        return None, None
    try:
        return objection_to(replace(record, sequences=tuple(scored)), found, tolerance=tolerance)
    except ValueError as error:
        return None, f"the engine states {error}"


def objection_to(
    record: AgreementRecord, found: Sequence[Sequence[float]], *, tolerance: Tolerance
) -> tuple[Gap, str | None]:
    """Why an engine that states ``found`` does not compute with the recorded weights; None where it does.

    It is refused beyond the tolerance, and also within it where what it states lies at least twice as near to the base
    model as to the trained weights: an adapter of small effect must not be taken for served because it is small.

    Args:
        record: of the trainer.
        found: log-probabilities by sequence, of the tokens that the record scores.
        tolerance: what is accepted.

    Raises:
        ValueError: ``found`` has another shape.
    """
    gap = gap_between(record.trained, found, tolerance=tolerance)
    to_base = gap_between(record.base, found, tolerance=tolerance)
    is_base = to_base.mean < _NEARER * gap.mean
    if gap.within(tolerance) and not is_base:
        return gap, None
    cause = ""
    if _shifted_gap(record.trained, found) < _SHIFTED * gap.mean:
        cause = "; they fit one token earlier or later: it states them for the wrong tokens"
    elif is_base:
        cause = (
            f"; from the base model without the adapter they differ by {to_base.mean:.3g} in the mean: it answers with "
            "the base weights"
        )
    return gap, (
        f"its log-probabilities differ from the trainer's by up to {gap.max:.3g} nats, {gap.mean:.3g} in the mean of "
        f"{gap.tokens} tokens; up to {tolerance.max_nats:g} and {tolerance.mean_nats:g} are accepted{cause}"
    )


def _shifted_gap(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Mean gap in nats of the better of the two shifts by one token."""
    means = [math.inf]
    for ahead, behind in ((one, other), (other, one)):
        sizes = [
            abs(a - b)
            for lead, late in zip(ahead, behind, strict=True)
            for a, b in zip(lead[1:], late[:-1], strict=True)
        ]
        if sizes and all(map(math.isfinite, sizes)):
            means.append(sum(sizes) / len(sizes))
    return min(means)
