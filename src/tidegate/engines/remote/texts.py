"""Text of other people's servers: characters that came in halves are joined, halves that are alone replaced."""

from __future__ import annotations

from dataclasses import dataclass


def whole_text(text: str) -> str:
    """``text`` as it can be written: two surrogates make their character, one alone becomes U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
