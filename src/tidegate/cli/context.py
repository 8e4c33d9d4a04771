"""Global options, shared by all commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from tidegate.config import Settings


@dataclass(slots=True)
class GlobalOptions:
    """What stands before the command's name."""

    config: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])


EngineKind = Annotated[
    str | None,
    typer.Option(
        "--engine", help="What answers: 'embedded', 'vllm', 'sglang' or 'openai'; 'vllm' without --upstream is started."
    ),
]
Upstream = Annotated[
    list[str] | None,
    typer.Option("--upstream", help="Address of a server with OpenAI's API that answers instead; one a replica."),
]
UpstreamModel = Annotated[
    str | None, typer.Option("--upstream-model", help="Name of the model there; default: the only one it lists.")
]


def engine_options(
    context: typer.Context, kind: str | None, upstream: list[str] | None, upstream_model: str | None
) -> dict[str, Any]:
    """The section ``engine`` as these options have it: an address alone means any server with OpenAI's API.

    Raises:
        ConfigError: a file or variable is not usable.
    """
    if kind is None and upstream and settings_of(context).engine.kind == "embedded":
        kind = "openai"
    return {"kind": kind, "urls": upstream or None, "model": upstream_model}


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
