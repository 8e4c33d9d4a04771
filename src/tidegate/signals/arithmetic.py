"""Exact arithmetic on untrusted text: ``+ - * / // % **`` and parentheses over decimal numbers.

The text is parsed, never executed, and everything is bounded: its length, the exponents, and the size of every
intermediate result.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_EXPONENT = 64
MAX_BITS = 1024

_DECIMALS = 6
_ALLOWED = re.compile(r"[0-9.+\-*/%() \t]*")

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        ValueError: it is too long, not arithmetic, divides by zero or grows too large; the message says which.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"expression longer than {MAX_CHARACTERS} characters")
    # The allowed characters spell no name and no call to one, and keep the parser from warning about literals.
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("only numbers, + - * / // % ** and parentheses are understood")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("not a complete expression") from error
    try:
        return _evaluate(tree.body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def render(value: Fraction) -> str:
    """An integer as such; anything else with six decimals at most (six significant digits below 1)."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = _DECIMALS + len(str(abs(value.numerator) // value.denominator)) if abs(value) >= 1 else _DECIMALS
    rounded = Context(prec=digits).divide(Decimal(value.numerator), Decimal(value.denominator))
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            value = Fraction(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _evaluate(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are understood")
    _check_size(value.numerator.bit_length(), value.denominator.bit_length())
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"exponents must be whole numbers from -{MAX_EXPONENT} to {MAX_EXPONENT}")
    times = abs(exponent.numerator)
    _check_size((base.numerator.bit_length() - 1) * times, (base.denominator.bit_length() - 1) * times)
    return Fraction(base**exponent.numerator)


def _check_size(numerator_bits: int, denominator_bits: int) -> None:
    if max(numerator_bits, denominator_bits) > MAX_BITS:
        raise ValueError("number too large")
