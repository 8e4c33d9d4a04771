"""Text of other people's servers: characters that came in halves are joined, and what may be repeated of the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass

_SHOWN_CHARACTERS = 80
_TOLD_CHARACTERS = 3
"""So many characters of a key, such as ``sk-``, tell nothing."""


def whole_text(text: str) -> str:
    """``text`` as it can be written: two surrogates make their character, one alone becomes U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shown(value: object) -> str:
    """What an error shows of a value that should be another: short, with "..." where it is cut."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def without_secret(text: str, secret: str) -> str:
    """``text`` with "(key)" for the secret: as it is, as Python and JSON quote it, and where "..." cuts it short."""
    for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]):
        text = text.replace(form, "(key)")
        for length in range(len(form) - 1, _TOLD_CHARACTERS, -1):
            text = text.replace(f"{form[:length]}...", "(key)...")
    return text


@dataclass(slots=True)
class HalfCharacter:
    """The first half of a character at the end of a piece, until the next piece comes."""

    kept: str = ""

    def take(self, piece: str, *, last: bool) -> str:
        """The text that is whole now; after the last piece nothing is kept back."""
        text = self.kept + piece
        waits = not last and "\ud800" <= text[-1:] <= "\udbff"
        self.kept = text[-1] if waits else ""
        return whole_text(text[:-1] if waits else text)
