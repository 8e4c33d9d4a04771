"""The figures of the four-arm bandit, computed independently, that the lab must reproduce to the last digit shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.lab.bandit import BanditOptions, run_bandit

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("bandit_vectors.json").read_text(encoding="utf-8"))
NAMES = {
    "mean_reward": "mean_reward",
    "best_arm_prob": "best_arm_probability",
    "clip_frac": "clip_fraction",
    "reward_ma10": "reward_average",
}


@pytest.mark.parametrize("run", VECTORS["runs"], ids=lambda run: f"seed-{run['seed']}")
def test_the_bandit_reproduces_every_figure(run: dict[str, Any]) -> None:
    steps = run_bandit(BanditOptions(seed=run["seed"]))
    assert len(steps) == 100
    assert len(run["at"]) == 4
    for number, expected in run["at"].items():
        step = steps[int(number) - 1]
        assert step.step == int(number)
        assert {name: getattr(step, ours) for name, ours in NAMES.items()} == expected
