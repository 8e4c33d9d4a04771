"""Folding a stream of generation events into complete answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from tidegate.core.errors import RequestError
from tidegate.core.types import (
    Choice,
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    JsonObject,
    PromptTokens,
    Sampling,
    TokenCounts,
    TokenDelta,
)


@dataclass(slots=True)
class _Parts:
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    tool_calls: list[JsonObject] = field(default_factory=list[JsonObject])
    end: ChoiceEnd | None = None
    token_exact: bool = True


class GenerationFold:
    """Accumulates events; ``choices()`` may be asked at any time.

    A choice that has not ended yet (the client went away, the engine failed) is ``cancelled``; where the engine
    confirms tokens only at the end, it has none.

    ``cut``: indices of choices of which the client does not get all that was sampled.
    """

    def __init__(self) -> None:
        self.prompt_token_ids: tuple[int, ...] = ()
        self.counts: TokenCounts | None = None
        self.replica: str | None = None
        self.cut: set[int] = set()
        self._distribution_known = True
        self._confirmed_at_end = False
        self._parts: dict[int, _Parts] = {}

    def add(self, event: GenerationEvent) -> None:
        """Take the next event."""
        match event:
            case PromptTokens():
                self.prompt_token_ids = event.token_ids
                self._distribution_known = event.distribution_known
                self._confirmed_at_end = event.confirmed_at_end
                self.replica = event.replica
            case TokenDelta():
                parts = self._parts.setdefault(event.choice, _Parts())
                parts.token_ids.extend(event.token_ids)
                parts.logprobs.extend(event.logprobs)
                parts.text.append(event.text)
                parts.tool_calls.extend(event.tool_calls)
                parts.token_exact = parts.token_exact and event.token_exact
            case TokenCounts():
                self.counts = event
            case ChoiceEnd():
                self._parts.setdefault(event.choice, _Parts()).end = event

    def choices(self) -> tuple[Choice, ...]:
        """All choices so far, by index."""
        return tuple(self._choice(index, parts) for index, parts in sorted(self._parts.items()))

    def all_choices(self, n: int) -> tuple[Choice, ...]:
        """All ``n`` choices of the call; those that have not begun yet are empty and cancelled."""
        return tuple(self._choice(index, self._parts.get(index, _Parts())) for index in range(n))

    def _choice(self, index: int, parts: _Parts) -> Choice:
        exact = parts.token_exact and (parts.end is not None or not self._confirmed_at_end)
        return Choice(
            index=index,
            token_ids=tuple(parts.token_ids) if exact else (),
            logprobs=tuple(parts.logprobs) if exact else (),
            text="".join(parts.text),
            tool_calls=tuple(parts.tool_calls),
            finish_reason=parts.end.finish_reason if parts.end else FinishReason.CANCELLED,
            invalid_tool_call=parts.end.invalid_tool_call if parts.end else False,
            token_exact=exact,
        )

    def as_sampled(self, sampling: Sampling) -> Sampling:
        """The settings of the call as its record keeps them: with what the engine said of their meaning."""
        return sampling if self._distribution_known else replace(sampling, distribution_known=False)


async def collect(events: AsyncIterator[GenerationEvent]) -> GenerationFold:
    """Drain a stream."""
    fold = GenerationFold()
    async for event in events:
        fold.add(event)
    return fold


def require_scorable(first: int, tokens: int) -> None:
    """Refuse to score a sequence of so many tokens from an index on that has no token before it, or none from it on.

    Raises:
        RequestError: ``first`` is not in [1, ``tokens``).
    """
    if not 1 <= first < tokens:
        accepted = f"1 to {tokens - 1} is accepted" if tokens > 1 else "two tokens or more are needed"
        raise RequestError(f"first is {first} of {tokens} tokens; {accepted}")
