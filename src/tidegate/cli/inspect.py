"""``doctor``, ``config show`` and ``feedback``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tidegate.cli.context import EngineKind, Upstream, UpstreamModel, engine_options, settings_of
from tidegate.cli.output import boundary, emit, emit_table
from tidegate.cli.running import run_until_interrupted
from tidegate.core.errors import RequestError

config = typer.Typer(help="Settings.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(doctor)
    app.command()(feedback)
    app.add_typer(config, name="config")


def doctor(
    context: typer.Context,
    engine: EngineKind = None,
    upstream: Upstream = None,
    upstream_model: UpstreamModel = None,
    as_json: Json = False,
) -> None:
    """Check the machine, the engine, the data directory, the keys and the gate; exit code 1 when something is wrong.

    The options are those that 'tidegate serve' is started with.
    """
    from tidegate.app.doctor import examine

    with boundary():
        findings = examine(settings_of(context, engine=engine_options(context, engine, upstream, upstream_model)))
        emit_table(("check", "state", "detail"), [(f.check, f.state, f.detail) for f in findings], as_json=as_json)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


@config.command("show")
def show(context: typer.Context, as_json: Json = False) -> None:
    """All settings with their values, wherever they come from."""
    with boundary():
        settings = settings_of(context)
        values = settings.model_dump(mode="json")
        if values["server"]["api_keys"]:
            values["server"]["api_keys"] = ["(hidden)"] * len(values["server"]["api_keys"])
        values["database"] |= settings.database.shown()
        emit(values if as_json else _flat(values), as_json=as_json)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def feedback(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Interaction id (chatcmpl-...) or episode id.")],
    metric: Annotated[str, typer.Argument(help="Name, e.g. 'helpful', 'comment' or 'demonstration'.")],
    value: Annotated[str, typer.Argument(help="JSON value (true, 0.7, a list of messages) or plain text.")],
    as_json: Json = False,
) -> None:
    """Send feedback to the running server."""
    from tidegate.app.operations import send_feedback

    with boundary():
        try:
            parsed: Any = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        if parsed is None:
            raise RequestError("feedback value null says nothing; send true, false, a number, a text or messages")
        emit(run_until_interrupted(send_feedback(settings_of(context), target, metric, parsed)), as_json=as_json)
