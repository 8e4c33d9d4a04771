"""What the tests of the documentation look at: tracked files, pages, fenced code, commands."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"^(?P<mark>`{3,})(?P<language>[\w{}-]*)[^\n]*\n(?P<code>.*?)^(?P=mark)\s*$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    code: str

    @property
    def place(self) -> str:
        """Where it stands, for messages and test ids."""
        return f"{self.page}:{self.line}"


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files under version control that are here."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def pages() -> list[Path]:
    """README, the other pages at the top, and everything in docs."""
    return sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)])


def snippets(*languages: str) -> list[Snippet]:
    """Fenced blocks in one of the languages."""
    return [snippet for page in pages() for snippet in snippets_of(page) if snippet.language in languages]


def snippets_of(page: Path) -> Iterator[Snippet]:
    """Fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Snippet(
            page=page.relative_to(ROOT).as_posix(),
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            code=found["code"],
        )


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def reference() -> ModuleType:
    """``scripts/reference.py`` as a module."""
    specification = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@cache
def command_line() -> Any:
    """The ``tidegate`` command."""
    from tidegate.cli.main import app

    return typer.main.get_command(app)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line taken apart: the words that name the command, the command, and what is left."""

    words: tuple[str, ...]
    command: Any
    rest: tuple[str, ...]

    @property
    def unknown_options(self) -> list[str]:
        """Options that the command does not have."""
        known = {name for item in self.command.params for name in (*item.opts, *item.secondary_opts)}
        known |= {"--help", "-h"}
        return [word for word in self.rest if word.startswith("-") and word.partition("=")[0] not in known]


def invocation(words: list[str]) -> Invocation:
    """Follow the words after ``tidegate``; options of ``tidegate`` itself may stand before the command.

    Raises:
        LookupError: a command does not exist.
    """
    command, taken = command_line(), []
    with_value = {name for item in command.params if not getattr(item, "is_flag", False) for name in item.opts}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in with_value and rest:
            rest.pop(0)
    while rest and hasattr(command, "commands"):
        name = rest.pop(0)
        if name not in command.commands:
            known = ", ".join(command.commands)
            raise LookupError(f"'tidegate {' '.join([*taken, name])}' does not exist; there are: {known}")
        command = command.commands[name]
        taken.append(name)
    return Invocation(words=tuple(taken), command=command, rest=tuple(rest))
