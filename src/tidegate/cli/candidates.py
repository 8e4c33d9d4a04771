"""``train`` and ``candidates list|sign``: weights before they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit, emit_table, say
from tidegate.cli.running import run_until_interrupted

candidates = typer.Typer(help="Trained weights that ask to be served.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(train)
    app.add_typer(candidates, name="candidates")


def train(
    context: typer.Context,
    demonstrations: Annotated[
        Path, typer.Option("--demonstrations", help="JSONL of {messages, tools?, kind?}; assistant turns are trained.")
    ],
    epochs: Annotated[int | None, typer.Option("--epochs", help="Overrides training.epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Overrides training.batch_size.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Overrides training.seed.")] = None,
    as_json: Json = False,
) -> None:
    """Train an adapter on demonstrations; the result is a candidate that waits for a signature or the gate."""
    from tidegate.app.learning import train_demonstrations

    with boundary():
        settings = settings_of(context, training={"epochs": epochs, "batch_size": batch_size, "seed": seed})
        emit(train_demonstrations(settings, demonstrations, say=say), as_json=as_json)


@candidates.command("list")
def list_candidates(context: typer.Context, as_json: Json = False) -> None:
    """All candidates and their states."""
    from tidegate.app.operations import list_candidates as rows_of

    with boundary():
        rows = rows_of(settings_of(context))
        emit_table(("id", "state", "origin", "adapter", "manifest", "created_at"), rows, as_json=as_json)


@candidates.command("sign")
def sign(
    context: typer.Context,
    candidate: Annotated[str, typer.Argument(help="Candidate id, as 'candidates list' shows it.")],
    as_json: Json = False,
) -> None:
    """Sign the first release by hand with the operator's key; it becomes the champion and the anchor.

    Only while the bare base model is served: afterwards the gate is the only way.
    """
    from tidegate.app.operations import sign_candidate

    with boundary():
        result = run_until_interrupted(sign_candidate(settings_of(context), candidate))
        say(f"serving {result['id']}, signed by a person")
        emit(result, as_json=as_json)
