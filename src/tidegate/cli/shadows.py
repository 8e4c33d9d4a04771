"""``releases shadow``: a release that answers copies of calls, and nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tidegate.cli.context import settings_of
from tidegate.cli.output import boundary, emit, emit_table, say
from tidegate.cli.releases import releases
from tidegate.cli.running import run_until_interrupted

_RATES = ("failed", "invalid_tool_call", "no_reply", "passed")
_MEDIANS = ("seconds", "completion_tokens")
_SHARES = ("identical", "identical_greedy", "same_tool_calls")
_ARMS = ("of", "main", "shadow")


def register() -> None:
    """Add the command to ``releases``, which :mod:`tidegate.cli.releases` adds itself."""
    releases.command("shadow")(shadow)


def shadow(
    context: typer.Context,
    release: Annotated[
        str | None, typer.Argument(help="Release id to begin with; without one the report so far is printed.")
    ] = None,
    share: Annotated[
        float | None, typer.Option("--share", help="Share of the champion's calls, above 0 and up to 1.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the shadow that runs.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Of --stop; goes into the audit log.")] = (
        "asked for by an operator"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Let a release answer copies of calls beside the champion, without serving it to anybody, and compare the two."""
    from tidegate.app.shadows import shadow_report, start_shadow, stop_shadow
    from tidegate.core.errors import ConfigError

    with boundary():
        if stop and (release is not None or share is not None):
            raise ConfigError("--stop ends whatever is in the shadow; give it without a release and without --share")
        if (release is None) != (share is None):
            raise ConfigError(
                f"release {release!r} and --share {share!r}: both or neither are accepted, for example 'tidegate "
                "releases shadow RELEASE --share 0.1'"
            )
        settings = settings_of(context)
        if stop:
            result = run_until_interrupted(stop_shadow(settings, reason))
            say(f"{result['release']} is in the shadow no more")
            emit(result, as_json=as_json)
        elif release is not None and share is not None:
            result = run_until_interrupted(start_shadow(settings, release, share))
            say(f"{result['release']} answers copies of {share:g} of the champion's calls")
            emit(result, as_json=as_json)
        else:
            _show(shadow_report(settings), as_json=as_json)


def _show(report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit(report, as_json=True)
        return
    emit({name: value for name, value in report.items() if name != "comparisons"}, as_json=False)
    for one in report["comparisons"]:
        print(f"\n{one['pairs']} pairs with {one['main']}")
        emit_table(("measure", "of", "main", "shadow", "difference", "95 %"), rows(one), as_json=False)


def rows(comparison: Mapping[str, Any]) -> list[Sequence[Any]]:
    """A comparison as lines of a table: medians, then counts with the difference of their rates, then equal answers."""
    medians = [(f"median {name}", *(_short(comparison[name][key]) for key in _ARMS), "", "") for name in _MEDIANS]
    rates = [
        (
            name,
            *(comparison[name][key] for key in _ARMS),
            _short(comparison[name].get("difference")),
            " to ".join(_short(end) for end in comparison[name].get("interval", ())),
        )
        for name in _RATES
    ]
    shares = [(name, comparison[name]["of"], "", comparison[name]["count"], "", "") for name in _SHARES]
    return [*medians, *rates, *shares]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
