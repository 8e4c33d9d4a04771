"""A whole cycle with TRL as the backend of training: from recorded traffic to a release that answers rightly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from loop_world import LoopWorld
from tidegate.config import load_settings


@pytest.mark.slow
def test_a_cycle_with_trl_trains_and_publishes(tmp_path: Path) -> None:
    world = LoopWorld.with_traffic(tmp_path / "world")
    world.config.write_text(world.config.read_text().replace("[training]\n", '[training]\nbackend = "trl"\n'))
    world.settings = load_settings(world.config)
    asyncio.run(world.first_release())
    result = world.cycle()
    assert result["outcome"] == "done", result
    sha256 = result["steps"]["train"]["adapter_sha256"]
    manifest = json.loads((world.data.adapters / sha256 / "tidegate.json").read_text())
    assert (manifest["hyperparameters"]["backend"], manifest["effective"]["backend"]) == ("trl", "trl")
    assert manifest["versions"]["trl"].startswith("1.16.")
    assert world.tidegate("audit", "verify").returncode == 0
