"""SGLang's streams as the chunks that :class:`AnswerReader` takes: one choice each, with token ids. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidegate.core.types import JsonObject


class Part(Protocol):
    """One choice of a call, from the server's chunks to ours."""

    def take(self, chunk: JsonObject) -> Iterator[JsonObject]:
        """What a chunk says."""
        ...

    def finish(self) -> Iterator[JsonObject]:
        """What is known only at the end."""
        ...


@dataclass(slots=True, kw_only=True)
class CompletionPart:
    """From ``/v1/completions``: each chunk has its text, ids and log-probabilities.

    The server repeats the prompt that it sampled from; another one than was given makes the answer inexact.
    """

    index: int
    prompt: Sequence[int]
    _same_prompt: bool = True

    def take(self, chunk: JsonObject) -> Iterator[JsonObject]:
        """See :class:`Part`."""
        parts = chunk.get("choices")
        if not isinstance(parts, list) or not parts:
            yield chunk  # counts, errors, and what the reader refuses
            return
        for part in parts:
            yield {"choices": [self._part(part) if isinstance(part, dict) else part]}

    def finish(self) -> Iterator[JsonObject]:
        """Nothing: all was said as it came."""
        return iter(())

    def _part(self, part: JsonObject) -> JsonObject:
        prompt = part.get("prompt_token_ids")
        self._same_prompt = self._same_prompt and (prompt is None or prompt == self.prompt)
        ids = {"token_ids": part.get("token_ids")} if self._same_prompt else {}
        return {
            "index": self.index,
            "delta": {"content": part.get("text")},
            "logprobs": {"content": _entries(part.get("logprobs"))},
            "finish_reason": part.get("finish_reason"),
            **ids,
        }


@dataclass(slots=True, kw_only=True)
class ChatPart:
    """From ``/v1/chat/completions``: text and tool calls as they come, the ids of all tokens at the end.

    The log-probabilities wait for the ids. Where the ids do not come they are told without.
    """

    index: int
    prompt: Sequence[int]
    _held: list[Any] = field(default_factory=list[Any])
    _ids: Any = None

    def take(self, chunk: JsonObject) -> Iterator[JsonObject]:
        """See :class:`Part`."""
        self._ids = self._output_ids(chunk.get("sglext")) or self._ids
        parts = chunk.get("choices")
        if not isinstance(parts, list) or not parts:
            if parts is None or chunk.get("usage"):
                yield chunk
            return
        for part in parts:
            yield {"choices": [self._part(part) if isinstance(part, dict) else part]}

    def finish(self) -> Iterator[JsonObject]:
        """The tokens."""
        if self._held or self._ids:
            part: dict[str, Any] = {"index": self.index, "delta": {}, "logprobs": {"content": self._held}}
            yield {"choices": [part if self._ids is None else {**part, "token_ids": self._ids}]}

    def _part(self, part: JsonObject) -> JsonObject:
        logprobs = part.get("logprobs")
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        if isinstance(entries, list):
            # sglang #39260: the later tokens of a chunk have the first one's alternatives
            self._held += entries[:1] + [_without_alternatives(entry) for entry in entries[1:]]
        return {
            "index": self.index,
            "delta": part.get("delta"),
            "token_ids": [],  # none yet, which is no lack of them
            "finish_reason": part.get("finish_reason"),
        }

    def _output_ids(self, extension: Any) -> Any:
        """The ids of the answer, when the server sampled from the prompt that it had tokenised for us."""
        if not isinstance(extension, dict) or extension.get("input_ids") != self.prompt:
            return None
        outputs = extension.get("output_ids")
        return outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else None


@dataclass(slots=True, kw_only=True)
class Usage:
    """The counts of several answers to one prompt as one: told when all are known."""

    prompt: int
    choices: int
    _prompts: list[Any] = field(default_factory=list[Any])
    _completions: list[Any] = field(default_factory=list[Any])

    def take(self, chunk: JsonObject) -> Iterator[JsonObject]:
        """A chunk without its counts; the counts of all after the last of them."""
        usage = chunk.get("usage")
        if not isinstance(usage, Mapping):
            yield chunk
            return
        if chunk.get("choices"):
            yield {**chunk, "usage": None}
        self._prompts.append(usage.get("prompt_tokens"))
        self._completions.append(usage.get("completion_tokens"))
        counts = [*self._prompts, *self._completions]
        if len(self._prompts) == self.choices and all(type(count) is int for count in counts):
            # one that differs stands for all: the server shortened a prompt, and the reader must see it
            prompt = next((count for count in self._prompts if count != self.prompt), self.prompt)
            yield {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": sum(self._completions)}}


def _entries(logprobs: Any) -> list[JsonObject]:
    """The log-probabilities of a completion as those of a chat: one entry a token."""
    if not isinstance(logprobs, dict):
        return []
    values, texts, tops = (_list(logprobs.get(name)) for name in ("token_logprobs", "tokens", "top_logprobs"))
    return [
        {
            "token": texts[at] if at < len(texts) else "",
            "logprob": value,
            "top_logprobs": _alternatives(tops[at] if at < len(tops) else None),
        }
        for at, value in enumerate(values)
    ]


def _alternatives(top: Any) -> list[JsonObject]:
    named = list(top.items()) if isinstance(top, dict) else []
    known = [(text, value) for text, value in named if isinstance(value, int | float)]
    return [{"token": text, "logprob": -value} for value, text in sorted((-value, text) for text, value in known)]


def _without_alternatives(entry: Any) -> Any:
    return {**entry, "top_logprobs": []} if isinstance(entry, dict) else entry


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
