"""``init``, ``serve`` and ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.context import EngineKind, Upstream, UpstreamModel, engine_options, settings_of
from tidegate.cli.output import boundary, emit, say
from tidegate.cli.running import run_until_interrupted

Host = Annotated[str | None, typer.Option("--host", help="Address of the public API.")]
Port = Annotated[int | None, typer.Option("--port", help="Port of the public API; 0 picks a free one.")]
AdminPort = Annotated[int | None, typer.Option("--admin-port", help="Port of the admin API on loopback.")]
Model = Annotated[str | None, typer.Option("--model", help="Directory or hub name of a causal LM.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(init)
    app.command()(serve)
    app.command()(demo)


def init(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(help="Where to write tidegate.toml and gate.toml.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a settings file and a copy of the strict gate policy; existing files are left alone."""
    from tidegate.app.initialise import write_initial_files

    del context
    with boundary():
        emit(write_initial_files(directory), as_json=as_json)


def serve(
    context: typer.Context,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    model: Model = None,
    engine: EngineKind = None,
    upstream: Upstream = None,
    upstream_model: UpstreamModel = None,
) -> None:
    """Serve the champion as an OpenAI-compatible API and record every interaction.

    With --upstream the answers are those of a server that you run, with --engine vllm alone those of a vLLM that
    Tidegate runs; --engine vllm or sglang with --upstream URL is a server of yours that learns. Given several times,
    the servers are replicas: each serves the same model, and any of them answers.
    """
    from tidegate.app.serving import serve as run_server

    with boundary():
        settings = settings_of(
            context,
            server={"host": host, "port": port, "admin_port": admin_port},
            model={"path": model},
            engine=engine_options(context, engine, upstream, upstream_model),
        )
        run_until_interrupted(run_server(settings, say=say))


def demo(
    runs: Annotated[Path, typer.Option("--runs", help="Where the run's folder is made.")] = Path("runs"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of tasks, sampling and training.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the episodes; too few to certify.")] = False,
    as_json: Json = False,
) -> None:
    """Run the whole loop on the small model: serve, record, verify, train, gate, swap, roll back."""
    from tidegate.demo.story import run_demo

    with boundary():
        report = run_until_interrupted(run_demo(runs=runs, seed=seed, quick=quick))
        if as_json:
            emit(report, as_json=True)
