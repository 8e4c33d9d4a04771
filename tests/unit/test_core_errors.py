"""The error tree: drawn as it is, with unique codes, statuses and exit codes."""

from __future__ import annotations

import http
import inspect
import re

import pytest

from tidegate.core import errors
from tidegate.core.errors import RequestError, TidegateError


def tree(root: type[TidegateError] = TidegateError) -> list[type[TidegateError]]:
    """All classes of the module, parents first."""
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(found for child in children for found in tree(child))]


def test_every_code_is_used_once() -> None:
    codes = [error.__dict__["code"] for error in tree()]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


@pytest.mark.parametrize("error", tree(), ids=lambda error: error.__name__)
def test_status_and_exit_code_are_ones_that_are_documented(error: type[TidegateError]) -> None:
    assert 400 <= http.HTTPStatus(error.http_status) < 600
    assert error.exit_code in (1, 2)  # 3 and 4 are outcomes of the gate, no errors
    assert error.__doc__
    assert str(error("what failed")) == "what failed"


def test_what_a_client_sent_is_never_a_server_error() -> None:
    assert all(400 <= error.http_status < 500 for error in tree(RequestError))


def test_a_request_error_names_its_field() -> None:
    assert RequestError("x", param="messages").param == "messages"
    assert RequestError("x").param is None


def test_the_docstring_draws_the_tree() -> None:
    drawn: dict[str, str | None] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        found = re.match(r"^(?P<indent>[\s│├└─]*)(?P<name>\w+Error)\b", line)
        if found:
            depth = len(found["indent"].removeprefix("    ")) // 4
            path = [*path[:depth], found["name"]]
            drawn[found["name"]] = path[depth - 1] if depth else None
    real = {error.__name__: error.__base__.__name__ for error in tree()[1:]}  # type: ignore[union-attr]
    assert drawn == {"TidegateError": None, **real}
