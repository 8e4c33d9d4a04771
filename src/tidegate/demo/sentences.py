"""How the demonstration words what happened."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console


def step_sentence(number: int, line: Mapping[str, Any]) -> str:
    """One finished step of a cycle."""
    detail = line["detail"]
    output: Mapping[str, Any] = detail["output"]
    told = ""
    if line["step"] == "curate":
        told = f": {output.get('examples', 0)} examples" + _kinds(output.get("by_kind", {}))
    elif line["step"] == "explore" and output.get("rollouts") == "none":
        told = ": off"
    elif line["step"] == "train":
        told = f": candidate {output.get('candidate')}"
    return f"cycle {number}: {line['step']} took {detail['seconds']:.1f} s{told}" + because(detail["reasons"])


def because(reasons: Sequence[str]) -> str:
    """Reasons in brackets, nothing without any."""
    text = "; ".join(reason for reason in reasons if reason)
    return f" ({text})" if text else ""


def command_here() -> str:
    """The tidegate command of this installation, as one would type it here."""
    command = Path(sys.executable).with_name("tidegate")
    return str(command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command)


def tell_early(line: str) -> None:
    """A line on stderr before there is a display."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _kinds(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{kind} {count}' for kind, count in counts.items())})" if counts else ""
