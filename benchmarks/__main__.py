"""``scripts/bench``: choose a benchmark, run it, print its rows. Progress goes to stderr, rows to stdout."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Options, as_json, as_table


def available(directory: Path) -> dict[str, str]:
    """Benchmarks by name with the first line of their docstring; found by reading, not by importing."""
    found: dict[str, str] = {}
    for file in sorted(directory.glob("*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in module.body):
            found[file.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 ok, 2 usage."""
    names = available(Path(__file__).parent)
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Run one benchmark and print its rows.")
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(names) or 'none yet'}")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--json", action="store_true", help="print machine, versions and rows as JSON")
    parser.add_argument("--runs", type=int, default=3, help="repetitions; medians are reported (default 3)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the benchmark; may be repeated"
    )
    options = parser.parse_args(arguments)
    if options.list:
        for name, line in names.items():
            print(f"{name:<16}{line}")
        return 0
    if options.name not in names:
        parser.error(f"unknown benchmark {options.name!r}; choose one of {', '.join(names) or '(none yet)'}")
    if options.runs < 1:
        parser.error(f"--runs {options.runs} is too few; give 1 or more")
    pairs = [text.partition("=") for text in options.option]
    unusable = [key for key, equals, _ in pairs if not (key and equals)]
    if unusable:
        parser.error(f"--option {unusable[0]!r} is not KEY=VALUE")
    module = importlib.import_module(f"benchmarks.{options.name}")
    rows = module.run(Options(runs=options.runs, values={key: value for key, _, value in pairs}))
    print(as_json(rows) if options.json else as_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
