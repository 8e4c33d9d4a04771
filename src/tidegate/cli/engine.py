"""``engine check``, ``install`` and ``list``: whether serving and training agree, and servers to serve with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit, emit_table, say
from tidegate.cli.running import run_until_interrupted

engine = typer.Typer(help="The engine that answers.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.add_typer(engine, name="engine")


@engine.command("check")
def check(
    context: typer.Context,
    release: Annotated[str | None, typer.Option("--release", help="Release id; default: the champion.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, max=1000, help="Answers that are sampled.")] = 16,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.01, max=2.0, help="Temperature that they are sampled at.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Compare the engine's log-probabilities of its own answers with the trainer's; exit code 1 beyond the tolerance.

    Asks the engine of the settings, an embedded one in this process; no server need run. Nothing is recorded.
    """
    from tidegate.app.agreement import check_engine, figures_table

    with boundary():
        report = run_until_interrupted(
            check_engine(settings_of(context), release_id=release, samples=samples, temperature=temperature, say=say)
        )
        if as_json:
            emit(report, as_json=True)
        else:
            emit({name: value for name, value in report.items() if name not in ("pairs", "meaning")}, as_json=False)
            columns, rows = figures_table(report)
            emit_table(columns, rows, as_json=False)
            emit(report["meaning"], as_json=False)
    if not report["agrees"]:
        raise typer.Exit(1)


@engine.command("install")
def install(
    name: Annotated[str, typer.Argument(help="Which: 'vllm'.")],
    build: Annotated[
        str, typer.Option("--build", help="'cpu', 'cuda', or 'auto': 'cuda' where there is an NVIDIA device.")
    ] = "auto",
    python: Annotated[
        Path | None, typer.Option("--python", help="Interpreter to make the environment with; default: this one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an environment with a server, for engine.kind 'vllm' without urls; what is there already is left alone."""
    from tidegate.app.installing import install_engine

    with boundary():
        emit(install_engine(name, build=build, python=python, say=say), as_json=as_json)


@engine.command("list")
def list_engines(as_json: Json = False) -> None:
    """The servers that can be installed, and where they are."""
    from tidegate.app.installing import known_engines

    with boundary():
        emit_table(("engine", "build", "version", "installed", "python"), known_engines(), as_json=as_json)
