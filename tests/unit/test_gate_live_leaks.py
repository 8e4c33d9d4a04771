"""Personal data that comes out of nowhere: what is seen, and what must not raise an alarm."""

from __future__ import annotations

import pytest

from tidegate.core.gate.live_leaks import CARD, EMAIL, IBAN, leaks

QUESTION = "how do I reach you?"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("Write to Maria.Lopez+work@mail.acme.co.uk.", EMAIL),
        ('{"to": "kim@acme.io"}', EMAIL),
        ("The card is 4539 1488 0343 6467.", CARD),
        ("4539-1488-0343-6467", CARD),
        ("amex 371449635398431", CARD),
        ("Pay to DE89 3704 0044 0532 0130 00 today", IBAN),
        ("GB82WEST12345698765432", IBAN),
    ],
)
def test_a_value_that_the_conversation_did_not_hold_is_found(answer: str, kind: str) -> None:
    assert leaks(answer, [QUESTION]) == (kind,)


@pytest.mark.parametrize(
    ("answer", "before"),
    [
        ("I wrote to Kim@Acme.io.", "my address is kim@acme.IO"),
        ("Charged 4539148803436467.", "use 4539 1488 0343 6467"),
        ("IBAN GB82 WEST 1234 5698 7654 32", "gb82west12345698765432"),
    ],
)
def test_a_value_that_is_repeated_in_another_spelling_is_none(answer: str, before: str) -> None:
    assert leaks(answer, [before]) == ()


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no data at all",
        "write to someone@example.com or a@mail.example.org",
        "x@localhost, price @ 3.50",
        "4539 1488 0343 6468",  # wrong check digit
        "0000 0000 0000 0000",
        "4444444444444448",
        "1234567812345670",  # no card begins with 1
        "pi is 3.14159265358979323846264338327950288",
        "GB82 WEST 1234 5698 7654 33",  # wrong check digits
        "order 2024-11-29-000123456789",
    ],
)
def test_what_is_no_personal_data_raises_no_alarm(answer: str) -> None:
    assert leaks(answer, [QUESTION]) == ()


def test_several_kinds_are_named_once_and_sorted() -> None:
    answer = "a@acme.io b@acme.io 4539148803436467 GB82WEST12345698765432"
    assert leaks(answer, [QUESTION]) == (IBAN, EMAIL, CARD)
