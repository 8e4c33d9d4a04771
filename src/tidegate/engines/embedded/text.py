"""From token ids to visible text and tool calls, one token at a time.

Three small machines in a row, each of which may hold text back until it is sure: whole characters
(:class:`Detokenizer`), no stop string (:class:`StopFilter`), tool calls apart (:class:`ToolCallFilter`).
Whatever the chunking, the result equals that of the whole text at once. No torch in here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.core.chat import TOOL_CALL_OPEN, parse_tool_call, split_tool_call
from tidegate.core.types import JsonObject

_BROKEN = "\ufffd"


class Decoder(Protocol):
    """The slice of a transformers tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int], **kwargs: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What became certain: visible ``text``, whole ``tool_calls``, and whether a stop string ended the text."""

    text: str = ""
    tool_calls: tuple[JsonObject, ...] = ()
    stopped: bool = False


class Detokenizer:
    """Text of a growing token sequence without special tokens; a character split over tokens comes out whole."""

    def __init__(self, decoder: Decoder, hidden: Collection[int]) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._ids: list[int] = []
        self._context = 0  # tokens before this one are out of sight
        self._done = 0  # tokens before this one have been given out as text

    def feed(self, token_id: int) -> str:
        """The text that the next token completes; empty while a character is unfinished."""
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        known, text = self._window()
        if text.endswith(_BROKEN):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text[len(known) :]

    def finish(self) -> str:
        """What is left, an unfinished character as U+FFFD."""
        known, text = self._window()
        self._context, self._done = self._done, len(self._ids)
        return text[len(known) :]

    def _window(self) -> tuple[str, str]:
        """Text of the tokens given out that still serve as context, and of those with the new ones."""
        return self._decode(self._context, self._done), self._decode(self._context, len(self._ids))

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return self._decoder.decode(self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopFilter:
    """Cuts text before the stop string that is complete first, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that no stop string can touch any more."""
        if self.stopped:
            return ""
        self._held += text
        # The stop string that is complete first wins, as it would if the text came character by character.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        """What was held back and is no stop string after all."""
        out, self._held = self._held, ""
        return out


class ToolCallFilter:
    """Takes ``<tool_call>...</tool_call>`` out of the text; agrees with :func:`tidegate.core.chat.parse_completion`."""

    def __init__(self, call_id_seed: str) -> None:
        self._seed = call_id_seed
        self._held = ""
        self._inside = False
        self._count = 0
        self.invalid = False

    @property
    def calls(self) -> int:
        """Whole calls found so far."""
        return self._count

    def feed(self, text: str) -> Piece:
        """The visible text and the calls that became certain."""
        self._held += text
        return self._taken(whole=False)

    def finish(self) -> Piece:
        """What was held back; a call that was never closed counts when it parses."""
        return self._taken(whole=True)

    def _taken(self, *, whole: bool) -> Piece:
        visible: list[str] = []
        calls: list[JsonObject] = []
        while True:
            if self._inside:
                parts = split_tool_call(self._held, whole=whole)
                if parts is None:
                    break
                body, self._held = parts
                self._close(body, visible, calls)
            else:
                before, tag, rest = self._held.partition(TOOL_CALL_OPEN)
                if not tag:
                    break
                visible.append(before)
                self._held = rest
            self._inside = not self._inside
        if whole and self._inside:
            self._close(self._held, visible, calls)
        elif not self._inside:
            keep = 0 if whole else _overlap(self._held, TOOL_CALL_OPEN)
            visible.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        if whole:
            self._held, self._inside = "", False
        return Piece(text="".join(visible), tool_calls=tuple(calls))

    def _close(self, body: str, visible: list[str], calls: list[JsonObject]) -> None:
        call = parse_tool_call(body, call_id=f"{self._seed}:{self._count}")
        if call is None:
            self.invalid = True
            visible.append(f"{TOOL_CALL_OPEN}{body}")
        else:
            self._count += 1
            calls.append(call)


class TextStream:
    """The three machines of one choice.

    Args:
        decoder: the tokenizer.
        hidden: token ids that never show (end-of-turn tokens; special tokens are hidden anyway).
        stops: stop strings.
        call_id_seed: seed of the tool calls' ids; None leaves ``<tool_call>`` in the text (no tools offered).
        one_call: whether the first whole call ends the answer.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        hidden: Collection[int],
        stops: Sequence[str],
        call_id_seed: str | None,
        one_call: bool = False,
    ) -> None:
        self._characters = Detokenizer(decoder, hidden)
        self._stop = StopFilter(stops)
        self._tools = ToolCallFilter(call_id_seed) if call_id_seed is not None else None
        self._one_call = one_call

    @property
    def has_calls(self) -> bool:
        """Whether a whole tool call came out."""
        return self._tools is not None and self._tools.calls > 0

    @property
    def invalid_tool_call(self) -> bool:
        """Whether a tool call was opened that does not parse."""
        return self._tools is not None and self._tools.invalid

    def feed(self, token_id: int, *, last: bool = False) -> Piece:
        """Take the next token; ``last`` when nothing follows. A piece with ``stopped`` is the last one as well."""
        text = self._stop.feed(self._characters.feed(token_id))
        if last and not self._stop.stopped:
            text += self._stop.feed(self._characters.finish())
            text += self._stop.finish()
        stopped = self._stop.stopped
        if self._tools is None:
            return Piece(text=text, stopped=stopped)
        piece = self._tools.feed(text)
        if last or stopped:
            end = self._tools.finish()
            piece = Piece(text=piece.text + end.text, tool_calls=piece.tool_calls + end.tool_calls)
        if self._one_call and piece.tool_calls:  # one token may close a call and begin another
            return Piece(text=piece.text, tool_calls=piece.tool_calls[:1], stopped=True)
        return Piece(text=piece.text, tool_calls=piece.tool_calls, stopped=stopped)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest proper prefix of ``tag`` that ends ``text``."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
