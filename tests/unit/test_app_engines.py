"""Names of models: whatever a person writes, release ids go out in HTTP headers."""

from __future__ import annotations

import re

import pytest

from tidegate.app.engines import model_name
from tidegate.config import Settings
from tidegate.config.settings import ModelSettings


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("", "/models/SmolLM2-135M_v1.5/", "SmolLM2-135M_v1.5"),
        ("my model", "p", "my-model"),
        ("modèle", "p", "mod-le"),
        ("٣-digits", "p", "digits"),
        ("日本語", "p", "model"),
        ("..", "p", "model"),
        ("", "/", "model"),
    ],
)
def test_a_model_name_is_ascii_and_never_empty(name: str, path: str, expected: str) -> None:
    found = model_name(Settings(model=ModelSettings(name=name, path=path)))
    assert found == expected
    assert re.fullmatch(r"[A-Za-z0-9._-]+", found)
