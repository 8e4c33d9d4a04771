"""Data to stdout, everything else to stderr; errors become exit codes in one place."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from tidegate.core.errors import TidegateError

EXIT_REFUSED = 3
EXIT_ABSTAINED = 4


def emit(value: Any, *, as_json: bool) -> None:
    """Print a result: JSON on one line, or ``key  value`` lines for people."""
    if as_json:
        print(json.dumps(value, ensure_ascii=False, default=str))
    elif isinstance(value, dict):
        width = max((len(str(key)) for key in value), default=0)
        for key, item in value.items():
            shown = item if isinstance(item, str | int | float) else json.dumps(item, ensure_ascii=False, default=str)
            print(f"{key:<{width}}  {shown}")
    else:
        print(value)


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool) -> None:
    """Print rows: a JSON list of objects, or an aligned table."""
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], ensure_ascii=False, default=str))
        return
    cells = [list(columns), *[["" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def say(text: str) -> None:
    """A line of progress for people."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def boundary() -> Generator[None]:
    """Turn a :class:`TidegateError` into a message on stderr and its exit code."""
    try:
        yield
    except TidegateError as error:
        say(f"error [{error.code}]: {error}")
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        say("interrupted")
        raise typer.Exit(130) from error
