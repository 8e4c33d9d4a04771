"""Write the reference pages that are made from the code: settings, errors, metrics, commands.

``scripts/docs --reference`` runs it; a test fails while a page differs from what this would write.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from tidegate.cli.main import app
from tidegate.config.settings import Settings
from tidegate.core.errors import TidegateError
from tidegate.gateway.metrics import GatewayMetrics

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
NOTICE = "<!-- Made by scripts/docs --reference; change the code, not this page. -->"


def pages() -> dict[str, str]:
    """Every generated page: file name to text."""
    return {
        "settings.md": settings_page(),
        "errors.md": errors_page(),
        "metrics.md": metrics_page(),
        "cli.md": cli_page(),
    }


def settings_page() -> str:
    """All settings by section, with type, default and meaning."""
    lines = [
        NOTICE,
        "# Settings",
        "",
        "Settings come from, strongest first: command-line options, environment variables, the settings file",
        "(`tidegate.toml` in the working directory, or the one that `--config` names), and the defaults below.",
        "An unknown name is an error in all of them. `tidegate config show` prints the values in force.",
        "",
        "The variable of a setting is `TIDEGATE_`, the section, two underscores, and the name:",
        "`TIDEGATE_SERVER__PORT=8080`. Lists and whole sections are written as JSON. Two variables are no settings:",
        "`TIDEGATE_CACHE_DIR` names the folder in which downloaded models are kept (default: `tidegate` in",
        "`$XDG_CACHE_HOME` or `~/.cache`), and `TIDEGATE_API_KEY` is the key that `tidegate simulate` sends.",
        "",
        "The gate's thresholds are not settings: they stand in a policy file of their own, see",
        "[the gate](../explanation/gate.md).",
    ]
    top = {name: info for name, info in Settings.model_fields.items() if not _section(info)}
    lines += ["", "## Top level", "", *_settings_table("", top)]
    for name, info in Settings.model_fields.items():
        section = _section(info)
        if section is not None:
            summary = (section.__doc__ or "").strip()
            lines += ["", f"## `[{name}]`", "", summary, "", *_settings_table(f"{name}.", section.model_fields)]
    return "\n".join(lines) + "\n"


def _section(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _settings_table(prefix: str, fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| setting | accepted | default | meaning |"
    yield "|---|---|---|---|"
    for name, info in fields.items():
        shown = info.get_default(call_default_factory=True)
        default = "" if shown is None else f"`{_toml(shown)}`"
        yield f"| `{prefix}{name}` | {_accepted(info)} | {default} | {info.description or ''} |"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case _:
            return f'"{value}"'


def _accepted(info: FieldInfo) -> str:
    kind = _type_text(info.annotation)
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in info.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(item, name, None) is not None
    ]
    return ", ".join([kind, *bounds])


def _type_text(kind: Any) -> str:
    names = {int: "integer", float: "number", str: "text", SecretStr: "text", bool: "true or false", Path: "path"}
    if kind in names:
        return names[kind]
    if get_origin(kind) is Annotated:
        return _accepted(FieldInfo.from_annotation(kind))
    text = str(kind)
    if get_origin(kind) is tuple and kind.__args__[0] is not str:
        return f"list, each a {_type_text(kind.__args__[0])}"
    if text.startswith("typing.Literal"):
        return " or ".join(f'`"{option}"`' for option in kind.__args__)
    if text.startswith("tuple["):
        return f"list of {_type_text(kind.__args__[0])}s"
    options = [_type_text(option) for option in getattr(kind, "__args__", ()) if option is not type(None)]
    if options:
        return " or ".join(options)
    raise ValueError(f"type {kind!r} of a setting has no name for the reference page; add one to _type_text")


def errors_page() -> str:
    """All error codes, with HTTP status, exit code and meaning."""
    lines = [
        NOTICE,
        "# Errors",
        "",
        "Every failure that Tidegate reports on purpose has a stable code. Over HTTP it comes in OpenAI's shape,",
        '`{"error": {"message", "type", "param", "code"}}`, with the status below; on the command line it is a line',
        "`error [code]: message` on stderr and the exit code below. The message says what failed, the value, what is",
        "accepted, and what to do.",
        "",
        "Commands end with 0 (done), 1 (failure), 2 (usage or configuration), 3 (the gate refused) or 4 (the gate or a",
        "cycle abstained: too little evidence; or a cycle waits for its canary). 3 and 4 are outcomes, not errors.",
        "",
        "| code | HTTP | exit | kind of | meaning |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{error.code}` | {error.http_status} | {error.exit_code} | {_parent_code(error)} | {_sentence(error)} |"
        for error in error_tree()
    ]
    lines += [
        "",
        "Requests that reach no route get `not_found` (404) or `method_not_allowed` (405); `/readyz` answers",
        "`not_ready` (503) with the reasons while a request would fail. With 429 and 503 comes `Retry-After`.",
    ]
    return "\n".join(lines) + "\n"


def error_tree(root: type[TidegateError] = TidegateError) -> list[type[TidegateError]]:
    """The classes of the one error tree, parents first."""
    children = [child for child in root.__subclasses__() if child.__module__ == TidegateError.__module__]
    return [root, *(found for child in children for found in error_tree(child))]


def _parent_code(error: type[TidegateError]) -> str:
    parent = error.__base__
    return f"`{parent.code}`" if parent is not None and issubclass(parent, TidegateError) else ""


def _sentence(thing: object) -> str:
    """The docstring in one line, without reST's double backticks."""
    return re.sub(r"\s+", " ", (thing.__doc__ or "").strip()).replace("``", "`")


def metrics_page() -> str:
    """All Prometheus metrics of the gateway."""
    lines = [
        NOTICE,
        "# Metrics",
        "",
        "`GET /metrics` on the public port answers in Prometheus' text format and needs no key. Labels hold routes,",
        "statuses, outcomes and the addresses of replicas; never prompts, users or adapters.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    metrics = vars(GatewayMetrics()).values()
    for metric in metrics:
        for family in getattr(metric, "describe", tuple)():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)  # noqa: SLF001 - nothing public tells
            lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """All commands with their arguments and options."""
    root: Any = typer.main.get_command(app)
    lines = [
        NOTICE,
        "# Commands",
        "",
        "Data goes to stdout, progress and errors to stderr. Exit codes: 0 done, 1 failure, 2 usage or configuration,",
        "3 the gate refused, 4 the gate or a cycle abstained or waits, 130 interrupted; see [errors](errors.md).",
        "Options of `tidegate` itself stand before the command: `tidegate --data-dir DIR releases list`.",
        "",
        "## `tidegate`",
        "",
        root.help or "",
        "",
        *_parameters(root),
    ]
    for path, command in commands(root):
        arguments = " ".join(_argument_text(item) for item in command.params if item.param_type_name == "argument")
        heading = f"tidegate {path} {arguments}".strip()
        lines += ["", f"## `{heading}`", "", _paragraphs(command.help), "", *_parameters(command)]
    return "\n".join(lines).rstrip() + "\n"


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command below ``group`` that does something, with its words after ``tidegate``."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield f"{prefix}{name}", command


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(_sentence_of(part) for part in (text or "").split("\n\n"))


def _sentence_of(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip()).replace("``", "`")


def _argument_text(item: Any) -> str:
    text = item.name.upper() + ("..." if item.nargs == -1 else "")
    return text if item.required else f"[{text}]"


def _parameters(command: Any) -> Iterator[str]:
    shown = [item for item in command.params if not getattr(item, "hidden", False)]
    if not shown:
        return
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for item in shown:
        is_argument = item.param_type_name == "argument"
        names = f"`{_argument_text(item)}`" if is_argument else ", ".join(f"`{name}`" for name in item.opts)
        variable = f" Variable: `{item.envvar}`." if item.envvar else ""
        yield f"| {names} | {_default_text(item)} | {_sentence_of(item.help or '')}{variable} |"


def _default_text(item: Any) -> str:
    if item.required:
        return "required"
    if item.default is None or getattr(item, "is_flag", False):
        return ""
    default = item.default.value if isinstance(item.default, enum.Enum) else item.default
    return f"`{default}`"


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs: wrote docs/reference/{name}", file=sys.stderr)


if __name__ == "__main__":
    main()
