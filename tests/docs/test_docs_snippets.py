"""Code in README and docs parses and names commands and options that exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, Snippet, command_line, invocation, pages, prose, snippets

_SHELL = ("sh", "bash", "shell", "console")
_TIDEGATE = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?tidegate(?P<words> .*)?$")


def parse_json(text: str) -> None:
    """One value, or one a line."""
    try:
        json.loads(text)
    except ValueError:
        for line in text.splitlines():
            json.loads(line)


_PARSERS: dict[str, Callable[[str], Any]] = {"python": ast.parse, "toml": tomllib.loads, "json": parse_json}


def place(snippet: Snippet) -> str:
    return snippet.place


def shell_text(snippet: Snippet) -> str:
    """The commands; a console block marks them with ``$`` and shows output between them."""
    if snippet.language != "console":
        return snippet.code
    return "\n".join(line[2:] for line in snippet.code.splitlines() if line.startswith("$ "))


@pytest.mark.parametrize("snippet", snippets(*_SHELL), ids=place)
def test_shell_parses(snippet: Snippet) -> None:
    done = subprocess.run(
        ["bash", "-n"],  # noqa: S607 - whichever bash the reader has
        input=shell_text(snippet), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("snippet", snippets(*_SHELL), ids=place)
def test_shell_names_commands_and_options_that_exist(snippet: Snippet) -> None:
    joined = shell_text(snippet).replace("\\\n", " ")
    for line in joined.splitlines():
        for part in re.split(r"\s(?:&&|\|\||[|;&])\s?", line.strip()):
            found = _TIDEGATE.match(part)
            if not found:
                continue
            words = shlex.split(found["words"] or "", comments=True)
            assert not (called := invocation(words)).unknown_options, f"'{part}' has options that {called.words} lacks"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_names_commands_that_exist(page: Path) -> None:
    for found in re.finditer(r"`tidegate (?P<words>[^`]+)`", prose(page)):
        words = found["words"].replace("\n", " ").split()
        called = invocation([word for word in words if word != "..."])
        assert not called.unknown_options, f"'tidegate {' '.join(words)}' has options that do not exist"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_make_targets_and_scripts_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"'make {target}' does not exist"
    for script in re.findall(r"(?:`|^)scripts/([a-z]+)", text, re.MULTILINE):
        assert (ROOT / "scripts" / script).is_file(), f"'scripts/{script}' does not exist"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tests_that_are_named_exist(page: Path) -> None:
    text = prose(page)
    for file in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / file).is_file(), f"{page.name} names {file}, which does not exist"
    defined = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in defined, f"{page.name} names {name}, which does not exist"


@pytest.mark.parametrize("snippet", snippets(*_PARSERS), ids=place)
def test_code_parses(snippet: Snippet) -> None:
    _PARSERS[snippet.language](snippet.code)


def test_a_command_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(LookupError, match="tidegate releases explode"):
        invocation(["--data-dir", "x", "releases", "explode"])
    assert invocation(["--data-dir", "x", "releases", "list", "--jsno"]).unknown_options == ["--jsno"]
    assert invocation(["-h"]).command is command_line()
