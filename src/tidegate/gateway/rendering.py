"""From generation events to OpenAI's JSON: whole bodies and stream chunks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate.core.generation import GenerationFold
from tidegate.core.types import Choice, ChoiceEnd, FinishReason, Interaction, PromptTokens, TokenDelta

Usage: TypeAlias = dict[str, int]
"""OpenAI's object of token counts."""

LOWEST_LOGPROB = -9999.0
"""OpenAI's stand-in for a log-probability that JSON has no number for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What one response looks like. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    release_id: str
    logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that bodies and chunks share."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.release_id,
        }


def body(shape: AnswerShape, fold: GenerationFold, logprobs: LogprobFold, used: Usage | None) -> dict[str, Any]:
    """A finished ``chat.completion`` of the choices in ``fold``; ``used`` counts the tokens of the whole call."""
    result = shape.head("chat.completion")
    result["choices"] = [_choice(choice, shape, logprobs) for choice in fold.choices()]
    result["usage"] = used
    if shape.token_ids:
        result["prompt_token_ids"] = list(fold.prompt_token_ids)
    return result


def _choice(choice: Choice, shape: AnswerShape, logprobs: LogprobFold) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = list(choice.tool_calls)
    result: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs.of(choice.index) if shape.logprobs else None,
        "finish_reason": choice.finish_reason.value,
    }
    if shape.token_ids:
        result["token_ids"] = list(choice.token_ids)
    return result


def usage(fold: GenerationFold) -> Usage | None:
    """Counts of the tokens that the engine computed on and sampled.

    Where it gave no token ids they are its own counts, None without any; nothing is estimated from text.
    """
    choices = fold.choices()
    if fold.prompt_token_ids and all(choice.token_exact for choice in choices):
        prompt, completion = len(fold.prompt_token_ids), sum(len(choice.token_ids) for choice in choices)
    elif fold.counts is not None:
        prompt, completion = fold.counts.prompt, fold.counts.completion
    else:
        return None
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class LogprobFold:
    """Collects the log-probabilities of each choice for a body."""

    def __init__(self) -> None:
        self._entries: dict[int, list[dict[str, Any]]] = {}

    def add(self, delta: TokenDelta) -> None:
        """Take the next tokens of a choice."""
        self._entries.setdefault(delta.choice, []).extend(logprob_entries(delta))

    def of(self, choice: int) -> dict[str, Any] | None:
        """OpenAI's ``logprobs`` object, or None when the tokens' texts are not known."""
        entries = self._entries.get(choice)
        return {"content": entries, "refusal": None} if entries else None


def logprob_entries(delta: TokenDelta) -> list[dict[str, Any]]:
    """One entry a token; none for a delta that does not carry its tokens' texts (a recorded answer)."""
    alternatives = delta.top_logprobs or ((),) * len(delta.token_texts)
    return [
        {**_entry(text, logprob), "top_logprobs": [_entry(*other) for other in others]}
        for text, logprob, others in zip(delta.token_texts, delta.logprobs, alternatives, strict=False)
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    shown = logprob if math.isfinite(logprob) else LOWEST_LOGPROB
    return {"token": text, "logprob": shown, "bytes": list(text.encode(errors="replace"))}


class ChunkMaker:
    """Turns the events of one call into ``chat.completion.chunk`` objects, in order."""

    def __init__(self, shape: AnswerShape, *, n: int) -> None:
        self._shape = shape
        self._n = n
        self._calls: Counter[int] = Counter()

    def opening(self, event: PromptTokens) -> Iterator[dict[str, Any]]:
        """The role of each choice, as soon as the engine has taken the prompt."""
        for index in range(self._n):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if self._shape.token_ids and index == 0:
                chunk["prompt_token_ids"] = list(event.token_ids)
            yield chunk

    def delta(self, event: TokenDelta) -> Iterator[dict[str, Any]]:
        """New text, tool calls, log-probabilities and ids; nothing for tokens that are held back unseen."""
        delta: dict[str, Any] = {"content": event.text} if event.text else {}
        if event.tool_calls:
            first = self._calls[event.choice]
            self._calls[event.choice] += len(event.tool_calls)
            delta["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(event.tool_calls)]
        entries = logprob_entries(event) if self._shape.logprobs else []
        if delta or entries or self._shape.token_ids:
            logprobs = {"content": entries, "refusal": None} if entries else None
            chunk = self._chunk(event.choice, delta, logprobs=logprobs)
            if self._shape.token_ids:
                chunk["choices"][0]["token_ids"] = list(event.token_ids)
            yield chunk

    def closing(self, fold: GenerationFold, used: Usage | None) -> Iterator[dict[str, Any]]:
        """The finish reason of each choice and, when asked for, the usage of the whole call."""
        for choice in fold.choices():
            yield self._chunk(choice.index, {}, finish_reason=choice.finish_reason.value)
        if self._shape.include_usage:
            chunk = self._shape.head("chat.completion.chunk")
            yield {**chunk, "choices": [], "usage": used}

    def _chunk(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        chunk = self._shape.head("chat.completion.chunk")
        chunk["choices"] = [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]
        if self._shape.include_usage:
            chunk["usage"] = None
        return chunk


def recorded_events(interaction: Interaction) -> Iterator[PromptTokens | TokenDelta | ChoiceEnd]:
    """A recorded answer as the events that it came from (token texts are not recorded): the choices that were
    delivered, numbered as they were."""
    yield PromptTokens(token_ids=interaction.prompt_token_ids)
    delivered = [choice for choice in interaction.choices if choice.delivered]
    for index, choice in enumerate(delivered):
        yield from _said(index, choice)


def recorded_usage(interaction: Interaction) -> Usage | None:
    """What a recorded call used, choices that nobody got included."""
    fold = GenerationFold()
    fold.add(PromptTokens(token_ids=interaction.prompt_token_ids))
    for choice in interaction.choices:
        for event in _said(choice.index, choice):
            fold.add(event)
    return usage(fold)


def _said(index: int, choice: Choice) -> Iterator[TokenDelta | ChoiceEnd]:
    yield TokenDelta(
        choice=index,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        text=choice.text,
        tool_calls=choice.tool_calls,
        token_exact=choice.token_exact,
    )
    yield ChoiceEnd(
        choice=index,
        finish_reason=choice.finish_reason,
        invalid_tool_call=choice.invalid_tool_call,
    )


def is_finished(interaction: Interaction) -> bool:
    """Whether a record holds a whole answer that can be given again."""
    ended = all(choice.finish_reason is not FinishReason.CANCELLED for choice in interaction.choices)
    return interaction.consent and bool(interaction.choices) and ended
