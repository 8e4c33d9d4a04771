"""Server-sent events as JSON objects, bounded, from bytes in any pieces. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tidegate.core.errors import EngineError
from tidegate.core.types import JsonObject

MAX_EVENT_BYTES = 8 << 20
"""Far above any chunk of an answer; below what would fill the memory."""
_DONE = b"[DONE]"
_OF_ANSWERS = frozenset({b"", b"message", b"error"})
"""Names of events that must hold JSON; what else a server names (``ping``) counts only if it is part of an answer."""
_SHOWN_BYTES = 80


class EventReader:
    """Takes a stream in pieces. ``done`` is True once ``[DONE]`` came; what follows it is not read."""

    def __init__(self) -> None:
        self.done = False
        self._rest = bytearray()
        self._name = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[JsonObject]:
        """The events that became whole; lines end in LF or CR LF, as those of all known servers do.

        Raises:
            EngineError: an event is no JSON object, or is longer than :data:`MAX_EVENT_BYTES`.
        """
        start = len(self._rest)
        self._rest += piece
        while not self.done and (at := self._rest.find(b"\n", start)) >= 0:
            line = bytes(self._rest[:at]).removesuffix(b"\r")
            del self._rest[: at + 1]
            start = 0
            yield from self._line(line)
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise EngineError(f"the upstream sent an event of more than {MAX_EVENT_BYTES} bytes")

    def finish(self) -> None:
        """Say that the stream has ended, be it within the line of ``[DONE]``.

        Raises:
            EngineError: it ended early.
        """
        if not self.done and (self._data or not _is_done(bytes(self._rest))):
            raise EngineError("the upstream ended its stream without '[DONE]'; what came before is no whole answer")

    def _line(self, line: bytes) -> Iterator[JsonObject]:
        if _is_done(line):  # some servers end here, without the empty line that ends an event
            yield from self._event()
            self.done = True
        elif line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._size += len(line)
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()
        elif not line:
            yield from self._event()

    def _event(self) -> Iterator[JsonObject]:
        """The event that has ended, if it has data and means us."""
        name, data, given = self._name, b"\n".join(self._data), bool(self._data)
        self._name, self._data, self._size = b"", [], 0
        if given and (name in _OF_ANSWERS or _is_of_an_answer(data)):
            yield _json_object(data)


def _is_done(line: bytes) -> bool:
    return line.startswith(b"data:") and line[5:].strip() == _DONE


def _is_of_an_answer(data: bytes) -> bool:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and ("choices" in value or "error" in value)


def _json_object(data: bytes) -> JsonObject:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the upstream sent {_shown(data)} in its stream; JSON objects are expected") from error
    if not isinstance(value, dict):
        raise EngineError(f"the upstream sent {_shown(data)} in its stream; JSON objects are expected")
    return value


def _shown(data: bytes) -> str:
    text = data[:_SHOWN_BYTES].decode(errors="replace")
    return repr(text if len(data) <= _SHOWN_BYTES else f"{text}...")
