"""The ``tidegate`` command. Heavy libraries are imported by the commands that need them, not here.

Exit codes: 0 ok, 1 failure, 2 usage or configuration, 3 the gate refused, 4 the gate or a cycle
abstained, or a cycle waits for its canary.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli import (
    audit,
    canary,
    candidates,
    controls,
    cycles,
    engine,
    inspect,
    lab,
    releases,
    run,
    shadows,
    tasks,
)
from tidegate.cli.context import GlobalOptions

app = typer.Typer(
    name="tidegate",
    help="Continual learning for self-hosted LLM agents, behind a statistical gate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Settings file (default: tidegate.toml if it exists).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Overrides data_dir.")] = None,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options that every command shares."""
    if show_version:
        print(version("tidegate"))
        raise typer.Exit
    context.obj = GlobalOptions(config=config, overrides={"data_dir": data_dir} if data_dir else {})


run.register(app)
tasks.register(app)
cycles.register(app)
candidates.register(app)
canary.register(app)
releases.register(app)
shadows.register()
controls.register(app)
audit.register(app)
engine.register(app)
inspect.register(app)
lab.register(app)
