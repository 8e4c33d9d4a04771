"""The benchmark dispatcher: rows, ratios, and the machine and versions that figures belong to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.__main__ import available, main  # noqa: E402 - the folder is no installed package
from benchmarks.harness import REPOSITORY as HARNESS_REPOSITORY  # noqa: E402
from benchmarks.harness import Row, as_json, as_table, machine, measured, versions  # noqa: E402

KEYS = {"benchmark", "metric", "unit", "ours", "peer", "peer_name", "ratio", "target", "runs"}


@pytest.mark.parametrize(("better", "ratio"), [("higher", 2.0), ("lower", 0.5)])
def test_a_ratio_above_one_is_better_whatever_the_unit(better: str, ratio: float) -> None:
    row = measured(
        "b", "m", "s", [3.0, 4.0, 100.0], better=better, peer=[2.0], peer_name="p 1.0"  # type: ignore[arg-type]
    )  # fmt: skip
    assert (row.ours, row.peer, row.ratio, row.runs) == (4.0, 2.0, ratio, 3)


def test_without_a_peer_there_is_no_ratio() -> None:
    row = measured("b", "m", "s", [1.0], better="lower", target=2.0)
    assert (row.peer, row.ratio, row.target) == (None, None, 2.0)


def test_a_peer_of_nothing_gives_no_ratio() -> None:
    assert measured("b", "m", "1/s", [1.0], better="higher", peer=[0.0]).ratio is None


def test_no_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="no value for 'm'"):
        measured("b", "m", "s", [], better="lower")


def test_json_holds_machine_versions_and_rows() -> None:
    printed = json.loads(as_json([Row(benchmark="b", metric="m", unit="s", ours=1.0, runs=1)]))
    assert set(printed) == {"machine", "versions", "rows"}
    assert set(printed["rows"][0]) == KEYS


def test_the_table_has_a_line_a_row() -> None:
    lines = as_table([measured("b", "m", "s", [1.0], better="lower", peer=[3.0], peer_name="p")]).splitlines()
    assert lines[0].split()[:3] == ["benchmark", "metric", "ours"]
    assert lines[1].split() == ["b", "m", "1", "s", "3", "(p)", "3", "-", "1"]


def test_the_machine_is_described_without_names() -> None:
    described = machine()
    assert described["cores"] >= 1
    assert described["memory_bytes"] > 1 << 28
    assert set(described) == {"processor", "cores", "memory_bytes", "system", "load_1min"}
    assert {"python", "tidegate"} <= set(versions())


def test_benchmarks_are_found_by_their_run_function(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""Measures one thing.\n\nMore."""\ndef run(options): ...\n')
    (tmp_path / "helper.py").write_text("import nothing_of_this_name\n")
    assert available(tmp_path) == {"one": "Measures one thing."}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "unknown benchmark 'nothing'"),
        ([], "unknown benchmark None"),
        (["nothing", "--runs", "x"], "invalid int"),
    ],
)
def test_usage_faults_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_the_decision_benchmark_still_decides() -> None:
    command = [sys.executable, "-m", "benchmarks", "decision", "--json", "--runs", "1", "--option", "pairs=5000"]
    done = subprocess.run(command, cwd=HARNESS_REPOSITORY, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["rows"]
    assert {row["unit"] for row in rows} == {"s", "MB"}
    assert all(row["ours"] > 0 for row in rows)


def test_a_benchmark_runs_through_the_command_line(tmp_path: Path) -> None:
    package = tmp_path / "benchmarks"
    package.mkdir()
    for name in ("__init__.py", "__main__.py", "harness.py"):
        (package / name).write_text((HARNESS_REPOSITORY / "benchmarks" / name).read_text())
    (package / "echo.py").write_text(
        '"""Says what it was given."""\n'
        "from benchmarks.harness import measured\n"
        "def run(options):\n"
        "    values = [float(options.values['value'])] * options.runs\n"
        "    return [measured('echo', 'value', 'one', values, better='higher')]\n"
    )
    command = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.run([*command, "--list"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert listed.stdout.split(maxsplit=1) == ["echo", "Says what it was given.\n"]
    asked = [*command, "echo", "--json", "--runs", "2", "--option", "value=7"]
    done = subprocess.run(asked, cwd=tmp_path, check=True, capture_output=True, text=True)
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["ours"], row["runs"]) == (7.0, 2)
    broken = subprocess.run([*command, "echo", "--option", "value"], cwd=tmp_path, check=False, capture_output=True)
    assert broken.returncode == 2
