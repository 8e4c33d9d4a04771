"""A plan: pairs and weeks for a gain under the policy of the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidegate.app.planning import PlanOptions, plan
from tidegate.cli.main import app
from tidegate.config import Settings
from tidegate.core.errors import ConfigError

STRICT = Settings()


def test_the_level_is_that_of_a_windows_first_look() -> None:
    answer = plan(STRICT, PlanOptions(gain=0.03, power=0.8, pairs_per_week=500.0))
    assert answer["level"] == pytest.approx(0.1 / 13)
    assert answer["pairs_by_formula"] == 1656  # 1,655 at the rounded level 0.0077
    assert answer["min_pairs"] == 1655
    assert answer["power_at_min_pairs"] == pytest.approx(0.79, abs=0.006)
    assert answer["weeks"] == pytest.approx(answer["pairs"] / 500, abs=0.01)
    assert answer["gain_at_min_pairs"] == pytest.approx(0.03, abs=1e-4)


def test_a_set_is_never_smaller_than_the_policy_wants() -> None:
    assert plan(STRICT, PlanOptions(gain=0.1, pairs_per_week=1655.0))["weeks"] == 1.0
    assert "weeks" not in plan(STRICT, PlanOptions(gain=0.1))


def test_a_level_of_ones_own_is_used() -> None:
    assert plan(STRICT, PlanOptions(gain=0.03, level=0.05))["pairs"] < plan(STRICT, PlanOptions(gain=0.03))["pairs"]


@pytest.mark.parametrize(
    "values",
    [{"gain": 0.2}, {"gain": 0.0}, {"gain": 0.03, "power": 1.0}, {"gain": 0.03, "level": 0.0}, {"gain": float("nan")}],
)
def test_an_impossible_plan_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="no plan can be made"):
        plan(STRICT, PlanOptions(**values))


@pytest.mark.parametrize("pairs", [0.0, -1.0, float("nan")])
def test_weeks_without_pairs_are_refused(pairs: float) -> None:
    with pytest.raises(ConfigError, match="a number above 0"):
        plan(STRICT, PlanOptions(gain=0.03, pairs_per_week=pairs))


def test_the_command_reads_the_policy_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["gate", "plan", "--gain", "0.03", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["policy"] == "default"
    refused = CliRunner().invoke(app, ["gate", "plan", "--gain", "0.9"])
    assert refused.exit_code == 2
    assert "gain = 0.9" in refused.stderr
    (tmp_path / "tidegate.toml").write_text('policy = "missing.toml"\n')
    assert CliRunner().invoke(app, ["gate", "plan", "--gain", "0.03"]).exit_code == 2
