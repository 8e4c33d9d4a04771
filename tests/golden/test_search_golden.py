"""The arithmetic beam example: +1, +3 or *2 from 0 towards 15."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidegate.core.search import beam_search

BEAM: dict[str, Any] = json.loads(Path(__file__).with_name("search_vectors.json").read_text(encoding="utf-8"))["beam"]
OPERATIONS = {"+1": lambda value: value + 1, "+3": lambda value: value + 3, "*2": lambda value: value * 2}


def test_the_arithmetic_example_finds_the_paths_of_the_vectors() -> None:
    beams = beam_search(
        BEAM["start"],
        lambda value: [(name, OPERATIONS[name](value)) for name in BEAM["ops"]],
        lambda value: -abs(value - BEAM["target"]),
        width=BEAM["width"],
        depth=BEAM["depth"],
    )
    assert [beam.state for beam in beams] == BEAM["values"]
    assert [list(beam.states[1:]) for beam in beams] == BEAM["paths"]
    assert [list(beam.actions) for beam in beams] == BEAM["ops_taken"]
    assert {beam.states[0] for beam in beams} == {BEAM["start"]}
