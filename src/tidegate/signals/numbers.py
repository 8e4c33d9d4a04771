"""Numbers as people and models write them, read exactly (as fractions), without evaluating anything.

Read are ``42``, ``-7.50``, ``1,234``, ``$1,000``, ``-$5``, ``$-5``, ``.5``, ``1e3``, ``50%`` (as 50, the sign is
a unit like any other) and ``3/4`` (one number, 0.75; ``3 / 4`` with spaces is a calculation, hence two numbers).
A minus right after a digit, letter, ``)`` or ``%`` is an operator, not a sign.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_DIGITS = 100  # far beyond any answer, and cheap to turn into a fraction

_NUMBER = re.compile(
    r"(?P<sign>(?<![^\W_])(?<![)%])[-+\u2212])?"
    r"[$\u20ac\u00a3]?(?P<inner_sign>(?<=[$\u20ac\u00a3])[-+\u2212])?"
    r"(?P<number>(?<![^\W_])(?<![0-9]\.)(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![^\W_])(?<!\.)\.[0-9]+)"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,2})(?![^\W_]))?"
    r"(?:/(?P<denominator>[0-9]+)(?![0-9/]))?"
)


def find_numbers(text: str) -> list[Fraction | None]:
    """All numbers in ``text``, in order; None stands for one that is too long or divides by zero."""
    return [_value(match) for match in _NUMBER.finditer(text)]


def parse_number(text: str) -> Fraction | None:
    """The number that ``text`` as a whole is (blanks and a final ``%`` aside), or None."""
    match = _NUMBER.fullmatch(text.strip().removesuffix("%"))
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Fraction | None:
    digits = match["number"].replace(",", "")
    denominator = match["denominator"] or "1"
    if len(digits) > _MAX_DIGITS or len(denominator) > _MAX_DIGITS or int(denominator) == 0:
        return None
    value = Fraction(digits) * Fraction(10) ** int(match["exponent"] or 0) / int(denominator)
    minus = sum(match[name] in ("-", "\u2212") for name in ("sign", "inner_sign"))
    return -value if minus % 2 else value
