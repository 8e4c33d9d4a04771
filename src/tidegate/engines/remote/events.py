"""Server-sent events as JSON objects, bounded, from bytes in any pieces. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tidegate.core.errors import EngineError
from tidegate.core.types import JsonObject

MAX_EVENT_BYTES = 8 << 20
"""Far above any chunk of an answer; below what would fill the memory."""
_DONE = b"[DONE]"
_SHOWN_BYTES = 80


class EventReader:
    """Takes a stream in pieces. ``done`` is True once ``[DONE]`` came; what follows it is not read."""

    def __init__(self) -> None:
        self.done = False
        self._rest = bytearray()
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
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                data, self._data, self._size = b"\n".join(self._data), [], 0
                if data == _DONE:
                    self.done = True
                else:
                    yield _json_object(data)
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise EngineError(f"the upstream sent an event of more than {MAX_EVENT_BYTES} bytes")

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            EngineError: it ended early.
        """
        if not self.done:
            raise EngineError("the upstream ended its stream without '[DONE]'; what came before is no whole answer")


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
