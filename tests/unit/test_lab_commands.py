"""``tidegate lab``: tables, JSON and curves; and the benchmark of the same name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidegate.cli.main import app

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.collapse import run as run_benchmark
from benchmarks.harness import Options


def test_the_bandit_prints_a_table_and_a_curve() -> None:
    done = CliRunner().invoke(app, ["lab", "bandit"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split("  ")[0] == "step"
    assert [line.split()[0] for line in lines[1:12]] == ["1", *map(str, range(10, 101, 10))]
    assert lines[11].split() == ["100", "0.928", "0.902", "0.0", "0.899"]
    assert "probability of the best arm" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_bandit_as_json_holds_options_and_every_step() -> None:
    asked = "lab bandit --seed 3 --steps 12 --lr 1 --eps .1 --group-size 5 --baseline none --scale none --exact --json"
    told = json.loads(CliRunner().invoke(app, asked.split()).stdout)
    assert told["options"] == {
        "seed": 3, "steps": 12, "group_size": 5, "lr": 1.0, "eps": 0.1, "baseline": "none", "scale": "none",
        "rounded": False,
    }  # fmt: skip
    assert [step["step"] for step in told["steps"]] == list(range(1, 13))
    assert set(told["steps"][0]) == {
        "step", "mean_reward", "best_arm_probability", "clip_fraction", "reward_average",
    }  # fmt: skip


def test_the_curve_is_written_as_a_png(tmp_path: Path) -> None:
    file = tmp_path / "curve.out"
    done = CliRunner().invoke(app, ["lab", "bandit", "--steps", "5", "--png", str(file)])
    assert done.exit_code == 0, done.output
    assert file.read_bytes()[:4] == b"\x89PNG"
    lost = CliRunner().invoke(app, ["lab", "bandit", "--steps", "5", "--png", str(tmp_path / "no" / "curve.png")])
    assert lost.exit_code == 2
    assert "the curve cannot be written to" in lost.stderr


def test_without_the_drawing_packages_the_figures_are_still_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    done = CliRunner().invoke(app, ["lab", "bandit"])
    assert done.exit_code == 0
    assert "0.902" in done.stdout
    assert "no curve: drawing needs the package 'plotext'" in done.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = CliRunner().invoke(app, ["lab", "bandit", "--png", str(tmp_path / "curve.png")])
    assert refused.exit_code == 2
    assert "drawing needs the package 'matplotlib'" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bandit", "--lr", "0"], "lr = 0.0; a number in (0, 100] is accepted"),
        (["bandit", "--group-size", "1"], "group_size = 1"),
        (["bandit", "--scale", "group", "--baseline", "none"], "divides what a baseline leaves"),
        (["bandit", "--scale", "batch"], "'batch' is not one of"),
        (["collapse", "--seeds", "0"], "--seeds"),
        (["collapse", "--rounds", "0"], "--rounds"),
    ],
)
def test_options_out_of_range_are_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["lab", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


def test_collapse_prints_a_line_a_run_and_one_a_curation() -> None:
    done = CliRunner().invoke(app, ["lab", "collapse", "--seeds", "2", "--rounds", "4"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:7]] == [
        [seed, curation] for seed in "01" for curation in ("aggressive", "successes", "full")
    ]
    assert lines[1].split(None, 11)[-1].startswith("pass@8")
    assert lines[3].endswith("  none")
    assert lines[9].split()[:4] == ["aggressive", "2", "of", "2"]
    assert lines[11].split()[:4] == ["full", "0", "of", "2"]


def test_collapse_as_json_holds_every_round_and_every_alarm() -> None:
    told = json.loads(CliRunner().invoke(app, ["lab", "collapse", "--seeds", "1", "--rounds", "3", "--json"]).stdout)
    assert told["rounds"] == 3
    assert [(run["seed"], run["curation"]) for run in told["runs"]] == [
        (0, "aggressive"), (0, "successes"), (0, "full"),
    ]  # fmt: skip
    for run in told["runs"]:
        assert len(run["standings"]) == 4
        assert set(run["standings"][0]) == {"traffic", "held_out", "strategies"}
        assert len(run["alarms"]) == 6
    assert [any(alarm["fires"] for alarm in run["alarms"]) for run in told["runs"]][::2] == [True, False]


def test_the_benchmark_counts_alarms_and_compares_held_out_success() -> None:
    rows = {row.metric: row for row in run_benchmark(Options(runs=2, values={"seeds": "2", "rounds": "10"}))}
    assert (rows["aggressive: runs with an alarm"].ours, rows["aggressive: runs with an alarm"].target) == (2, 2)
    assert (rows["full: runs with an alarm"].ours, rows["full: runs with an alarm"].target) == (0, 0)
    full = rows["full: held-out success"]
    assert full.peer == rows["aggressive: held-out success"].ours
    assert full.ratio is not None
    assert full.ratio > 1.0
    assert rows["full above aggressive"].ours == 2
    assert {"weights only: runs with an alarm", "mix only: held-out success", "all runs"} <= set(rows)
