"""``tidegate engine``: the environments of servers that Tidegate can start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidegate.core.errors import ConfigError
from tidegate.core.types import JsonObject
from tidegate.engines.supervised import RECIPES, install, installed, recipe_for, visible_gpus


def install_engine(name: str, *, build: str, python: Path | None, say: Callable[[str], None]) -> JsonObject:
    """Install a server unless it is there.

    Raises:
        ConfigError: there is no such server or build, or the place cannot be written.
        EngineError: it could not be installed.
    """
    if build == "auto":
        build = "cuda" if visible_gpus(os.environ) else "cpu"
    if build not in ("cpu", "cuda"):
        raise ConfigError(f"unknown build {build!r}; choose 'cpu', 'cuda' or 'auto'")
    found, made = install(recipe_for(name, build), say=say, python=python)
    return {
        "engine": found.recipe.engine,
        "build": found.recipe.build,
        "version": found.recipe.version,
        "python": str(found.python),
        "state": "installed" if made else "kept",
    }


def known_engines() -> list[Sequence[Any]]:
    """Rows of engine, build, version, whether it is installed, and its interpreter."""
    rows: list[Sequence[Any]] = []
    for recipe in RECIPES:
        found = installed(recipe)
        row = (recipe.engine, recipe.build, recipe.version, found is not None, str(found.python) if found else None)
        rows.append(row)
    return rows
