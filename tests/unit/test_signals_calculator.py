"""The calculator: exact, bounded, and deaf to everything that is not arithmetic."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.signals.arithmetic import calculate
from tidegate.signals.environments import Calculator, builtin_environments


def run(expression: object) -> str:
    return Calculator().execute("calculator", json.dumps({"expression": expression}))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("98 + 93 - 77", "114"),
        ("-( 20 + 67 + -59 )", "-28"),
        ("3*8 + 2*10", "44"),
        ("7 / 2", "3.5"),
        ("2 / 3", "0.666667"),
        ("-20000 / 3", "-6666.666667"),
        ("1 / 3000000", "0.000000333333"),
        ("0.1 + 0.2", "0.3"),
        ("0.1 * 10", "1"),
        ("1.9999999999", "2"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("-2 ** 2", "-4"),
        ("10 ** 20 + 1", "100000000000000000001"),
    ],
)
def test_signals_calculator_is_exact(expression: str, result: str) -> None:
    assert run(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "1 / 0", "5 % 0", "0 ** -1", "2 ** 0.5", "2 ** 65", "9 ** 64 ** 2", "(9**64) ** 20", "1e5", "x + 1",
     "__import__('os')", "1 if 1 else 2", "3 (4)", "...", "()", "1, 2", "[1]", "05 + 3", "1 < 2", "1 << 2", "~1", "1_0",
     "(" * 150 + "1" + ")" * 150, "1 + " * 60 + "1", "1\n+ 2", "2 @ 3", None, 3],
)  # fmt: skip
def test_signals_calculator_answers_errors_as_text(expression: object) -> None:
    assert run(expression).startswith("error: ")


def test_signals_calculator_refuses_other_tools_and_arguments() -> None:
    assert Calculator().execute("search", "{}").startswith("error: unknown tool 'search'")
    for arguments in ("", "{", "[]", "{}", '{"expression": "1", "x": 1}', "[" * 100_000):
        assert Calculator().execute("calculator", arguments).startswith("error: ")


@given(st.text(alphabet="0123456789+-*/%(). ", max_size=40))
def test_signals_calculator_never_raises_and_never_grows(expression: str) -> None:
    result = run(expression)
    assert result.startswith("error: ") or len(result) < 700


@given(st.integers(-999, 999), st.integers(-999, 999), st.integers(-99, 99))
def test_signals_calculator_agrees_with_integers(a: int, b: int, c: int) -> None:
    assert calculate(f"{a} + {b} * {c} - ({a} - {c})") == a + b * c - (a - c)


def test_signals_the_registry_names_its_environments() -> None:
    assert {name: environment.name for name, environment in builtin_environments().items()} == {
        "calculator": "calculator"
    }
