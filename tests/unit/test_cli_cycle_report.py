"""``cycle report`` over a real database, as JSON and as tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from monitor_world import drawn
from tidegate.app.cycle_reports import report_of
from tidegate.app.layout import DataDirectory
from tidegate.app.stores import open_stores
from tidegate.cli.cycle_report import curve
from tidegate.cli.main import app
from tidegate.core.monitors import SHIPPED_LIMITS, by_kind, compare, measure

ANCHOR = drawn("tiny-r0-base", 1)
NARROW = drawn("tiny-r1-abcd", 2, ways=1)


def monitors() -> dict[str, Any]:
    return {
        "champion": "tiny-r1-abcd",
        "anchor": "tiny-r0-base",
        "episodes": 600,
        "excluded": {"no_consent": 3},
        "limits": "policy",
        "releases": {
            arm[0].release: {
                "all": asdict(measure(arm)),
                "kinds": {kind: asdict(measure(found)) for kind, found in by_kind(arm).items()},
            }
            for arm in (ANCHOR, NARROW)
        },
        "against_anchor": {"tiny-r1-abcd": [asdict(row) for row in compare(NARROW, ANCHOR, SHIPPED_LIMITS, seed=0)]},
        "failed": [],
    }


def record(output: dict[str, Any], *, ends: str | None = None, reasons: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"seconds": 1.5, "output": output, "ends": ends, "reasons": list(reasons)}


TRAINED = {
    "steps": 3, "examples": 5, "sequences": 5, "tokens": 90, "trainable_parameters": 8, "seconds": 2.0,
    "losses": [3.0, 2.0, 1.0], "grad_norms": [0.5, None, 0.25],
    "series": {"kl": [0.0, 0.1, 0.2], "clip_fraction": [None, None, None], "short": [1.0]},
    "dropped": {"too_long": 1},
    "configured": {"rank": 4, "learning_rate": 0.02, "objective": "sft", "epochs": 2},
    "effective": {"rank": 4, "learning_rate": 0.020000000001, "epochs": 1.5, "clipped_steps": 1},
    "guards": {"finite_steps": 3, "base_unchanged": True},
    "adapter_sha256": "a" * 64, "trained_sha256": "b" * 64, "losses_unit": "nats",
    "averaging": {"share": 0.5, "dev_tasks": 9, "dev_counted": 8, "dev_solved": {"0.5": 7, "1": 6}, "faults": {"1": 1}},
}  # fmt: skip
CURATED = {
    "manifest_hash": "m",
    "fresh": 5,
    "examples": 5,
    "by_kind": {"sum": 5},
    "by_source": {"episode": 4, "replay": 1},
    "with_logprobs": 4,
    "earlier": {"read": 2},
    "counts": {"kept": 5, "duplicate": 2},
}


@pytest.fixture
def data(tmp_path: Path) -> DataDirectory:
    directory = DataDirectory(root=tmp_path / "data").create()
    with open_stores(directory) as stores:
        cycles = stores.cycles
        cycles.open_cycle("cycle-1", config={}, time=0.0)
        cycles.finish_step("cycle-1", "collect", record({"episodes": 9, "monitors": monitors()}), time=1.0)
        cycles.finish_step("cycle-1", "curate", record(CURATED), time=2.0)
        cycles.finish_step("cycle-1", "train", record(TRAINED), time=3.0)
        screened = record({"reasons": ["fewer"]}, ends="refused", reasons=("fewer dev tasks",))
        cycles.finish_step("cycle-1", "screen", screened, time=4.0)
        cycles.close_cycle("cycle-1", "refused", time=5.0)
        cycles.open_cycle("cycle-2", config={}, time=6.0)
        cycles.finish_step("cycle-2", "collect", record({"proposed": "a" * 64}), time=7.0)
    return directory


def tidegate(directory: DataDirectory, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--data-dir", str(directory.root), "cycle", "report", *arguments])


def test_the_report_as_json_holds_everything(data: DataDirectory) -> None:
    shown = tidegate(data, "cycle-1", "--json")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert (report["cycle"], report["outcome"], report["reasons"]) == ("cycle-1", "refused", ["fewer dev tasks"])
    assert [(step["step"], step["seconds"]) for step in report["steps"]] == [
        ("collect", 1.5), ("curate", 1.5), ("train", 1.5), ("screen", 1.5),
    ]  # fmt: skip
    assert report["curation"] == CURATED
    proposed = ("adapter_sha256", "trained_sha256", "averaging")
    assert {name: report["training"][name] for name in proposed} == {name: TRAINED[name] for name in proposed}
    assert report["training"]["series"] == {
        "losses": [3.0, 2.0, 1.0], "grad_norms": [0.5, None, 0.25], "kl": [0.0, 0.1, 0.2],
        "clip_fraction": [None, None, None],
    }  # fmt: skip
    differs = {one["name"]: one["differs"] for one in report["training"]["hyperparameters"]}
    assert differs == {
        "rank": False, "learning_rate": False, "objective": None, "epochs": True, "clipped_steps": None,
    }  # fmt: skip
    assert report["training"]["guards"] == {"finite_steps": 3, "base_unchanged": True}
    flags = {one["measure"]: one["narrower"] for one in report["monitors"]["against_anchor"]["tiny-r1-abcd"]}
    assert flags["effective strategies"] is flags["Vendi score"] is True


def lines(shown: Result) -> list[list[str]]:
    return [line.split() for line in shown.stdout.splitlines()]


def test_the_report_for_people_marks_what_differs_and_what_is_narrower(data: DataDirectory) -> None:
    shown = tidegate(data, "cycle-1")
    assert shown.exit_code == 0, shown.output
    rows = lines(shown)
    assert ["epochs", "2", "1.5", "DIFFERS"] in rows
    assert ["rank", "4", "4", "as", "configured"] in rows
    assert ["duplicate", "2"] in rows
    assert ["measure", "step", "1", "step", "2", "step", "3", "curve", "lowest", "highest"] in rows
    assert ["losses", "3", "2", "1", "█▅▁", "1", "3"] in rows
    assert ["grad_norms", "0.5", "-", "0.25", "█", "▁", "0.25", "0.5"] in rows
    assert "without a value in any step: clip_fraction" in shown.stdout
    assert ["dropped", '{"too_long":', "1}"] in rows
    assert any(row[0] == "averaging" and '"share": 0.5' in " ".join(row) for row in rows if row)
    assert ["by_source", '{"episode":', "4,", '"replay":', "1}"] in rows
    assert ["earlier", '{"read":', "2}"] in rows
    assert ["reason", "fewer", "dev", "tasks"] in rows
    narrow = [line for line in shown.stdout.splitlines() if line.endswith("NARROWER")]
    assert any("effective strategies" in line and "at least 0.8 of the anchor's" in line for line in narrow)
    assert any(
        "pass@k" in line and line.endswith("too few") and "0 of 10 prompts" in line
        for line in shown.stdout.splitlines()
    )
    assert "tiny-r1-abcd (champion)" in shown.stdout
    assert 'left out: {"no_consent": 3}' in shown.stdout
    assert "tiny-r0-base: no pass@k, no prompt has two verdicts" in shown.stdout
    per_kind = [row[:3] for row in rows if row and row[0].startswith("kind-")]
    counts = {(kind, found[0].release): len(found) for arm in (ANCHOR, NARROW) for kind, found in by_kind(arm).items()}
    assert per_kind == [[*name, str(count)] for name, count in sorted(counts.items())]


def test_the_last_cycle_is_the_default_and_empty_parts_say_why(data: DataDirectory) -> None:
    shown = tidegate(data)
    assert shown.exit_code == 0, shown.output
    assert ["cycle", "cycle-2"] in lines(shown)
    assert ["outcome", "open"] in lines(shown)
    for sentence in ("nothing was curated", "nothing was trained", "nothing was measured: this cycle collected no"):
        assert sentence in shown.stdout


def test_an_unknown_cycle_and_a_directory_without_one_are_errors(data: DataDirectory, tmp_path: Path) -> None:
    unknown = tidegate(data, "cycle-9")
    assert (unknown.exit_code, "cycle-9" in unknown.stderr, "cycle-2" in unknown.stderr) == (2, True, True)
    other = DataDirectory(root=tmp_path / "other").create()
    with open_stores(other):
        pass
    none = tidegate(other)
    assert (none.exit_code, "no cycle was ever opened" in none.stderr) == (2, True)


def cycle(outcome: str | None) -> dict[str, Any]:
    return {"id": "c", "opened_at": 0.0, "closed_at": None, "outcome": outcome}


def test_why_a_cycle_failed() -> None:
    records = {"collect": record({"episodes": 0}), "train_error": {"error": "train: nan", "code": "x"}}
    report = report_of(cycle("failed"), records)
    assert report["reasons"] == ["train: nan"]
    assert report["steps"][-1] == {"step": "train", "seconds": None, "ends": "failed", "reasons": ["train: nan"]}
    assert report_of(cycle("failed"), {})["reasons"] == ["it was abandoned"]
    assert report_of(cycle(None), {})["reasons"] == []


def test_cycles_of_earlier_versions_are_reported_as_far_as_they_go() -> None:
    train = {"output": {"steps": 2, "tokens": 7, "loss_first": 1.0}, "ends": None, "reasons": []}
    report = report_of(cycle("done"), {"collect": {"output": {}, "ends": None, "reasons": []}, "train": train})
    assert report["training"] == {"steps": 2, "tokens": 7, "hyperparameters": [], "guards": {}, "series": {}}
    assert (report["monitors"], report["steps"][0]["seconds"]) == (None, None)


def test_monitors_that_failed_are_told(data: DataDirectory) -> None:
    with open_stores(data) as stores:
        stores.cycles.close_cycle("cycle-2", "failed", time=8.0)
        stores.cycles.open_cycle("cycle-3", config={}, time=9.0)
        failed = {"failed": ["monitors: PolicyError: gone"]}
        stores.cycles.finish_step("cycle-3", "collect", record({"monitors": failed}), time=9.0)
    assert "FAILED  monitors: PolicyError: gone" in tidegate(data).stdout


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0], "▁"),
        ([2.0, 2.0, 2.0], "▁▁▁"),
        ([0.0, None, 7.0], "▁ █"),
        ([None, None], "  "),
        ([float(n // 10) for n in range(80)], "".join(bar * 5 for bar in "▁▂▃▄▅▆▇█")),
    ],
)
def test_a_curve_has_at_most_forty_bars(values: list[float | None], expected: str) -> None:
    assert curve(values) == expected
