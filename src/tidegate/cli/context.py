"""Global options, shared by all commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

if TYPE_CHECKING:
    from tidegate.config import Settings


@dataclass(slots=True)
class GlobalOptions:
    """What stands before the command's name."""

    config: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])


def settings_of(context: typer.Context, **sections: Mapping[str, Any]) -> Settings:
    """Settings with the command's own options on top; options that are None were not given.

    Raises:
        ConfigError: a file, variable or option is not usable.
    """
    from tidegate.config import load_settings

    options = cast("GlobalOptions", context.find_root().obj)
    merged = dict(options.overrides)
    for section, values in sections.items():
        given = {name: value for name, value in values.items() if value is not None}
        if given:
            merged[section] = given
    return load_settings(options.config, merged)
