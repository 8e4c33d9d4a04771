"""Every setting, error, metric, command, route, table and column stands in the reference, as it is in the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from repository import ROOT, command_line, reference

from tidegate.config import Settings
from tidegate.core.errors import TidegateError
from tidegate.gateway import AdminDependencies, GatewayDependencies, create_admin, create_gateway
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.stores.schema import metadata

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("name", sorted(reference().pages()))
def test_generated_pages_are_current(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == reference().pages()[name], (
        f"docs/reference/{name} is stale; run scripts/docs --reference"
    )


def settings(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Every setting that is no section, with its description."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            assert kind.__doc__, f"section [{name}] has no docstring"
            yield from settings(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info.description


def test_every_setting_is_described() -> None:
    page = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    for name, description in settings():
        assert description, f"setting {name!r} has no description"
        assert f"`{name}`" in page


def test_every_error_code_is_documented() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    tree = reference().error_tree()
    assert TidegateError in tree
    assert len(tree) > 20
    for error in tree:
        assert f"| `{error.code}` | {error.http_status} | {error.exit_code} |" in page


def test_every_metric_is_documented() -> None:
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    families = [family for family in GatewayMetrics().registry.collect() if family.name != "python_info"]
    assert families
    for family in families:
        assert f"`{family.name}_total`" in page or f"`{family.name}`" in page
        assert family.documentation in page


def test_every_command_and_option_says_what_it_does() -> None:
    commands = dict(reference().commands(command_line()))
    assert "cycle run" in commands
    for path, command in commands.items():
        assert command.help, f"'tidegate {path}' has no help"
        for item in command.params:
            assert item.help, f"option {item.opts[-1]!r} of 'tidegate {path}' has no help"


def routes() -> set[str]:
    """Methods and paths of both apps. Their dependencies are only used when a request comes."""
    nothing: Any = None
    gateway = create_gateway(
        GatewayDependencies(
            engine=nothing,
            router=nothing,
            recorder=nothing,
            split_of=nothing,
            check_task=nothing,
            clock=nothing,
            new_id=nothing,
        ),
        Settings().server,
    )
    admin = create_admin(
        AdminDependencies(publisher=nothing, live=nothing, shadow=nothing, releases=nothing, new_id=nothing), "token"
    )
    found: set[str] = set()
    for route in (*gateway.routes, *admin.routes):
        methods = (getattr(route, "methods", None) or set()) - {"HEAD"}
        found |= {f"{method} {re.sub(':[a-z]+}', '}', getattr(route, 'path', ''))}" for method in methods}
    return found


def test_every_route_is_documented_and_no_other() -> None:
    page = (REFERENCE / "http.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^#+ `((?:GET|POST|PUT|PATCH|DELETE) /\S*)`", page, re.MULTILINE))
    assert documented == routes()


def test_every_table_and_column_is_documented_and_no_other() -> None:
    page = (REFERENCE / "records.md").read_text(encoding="utf-8")
    documented: dict[str, set[str]] = {}
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        name = re.match(r"`(\w+)`", part)
        if name:
            documented[name[1]] = set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))
    assert documented == {table.name: {column.name for column in table.columns} for table in metadata.sorted_tables}
