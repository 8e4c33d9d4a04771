"""The whole loop on the small model: seconds by stage, tokens and verified successes per cycle, the learning curve.

Runs ``tidegate demo`` once per run with seeds 0, 1, ... and reads its reports. Options: ``quick=1`` for a quarter of
the episodes, ``keep=FOLDER`` to keep the reports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Options, Row, measured


def run(options: Options) -> list[Row]:
    """Run the demonstration and turn its reports into rows."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.values.get("keep", temporary))
        reports = [_report(folder, seed, quick=options.values.get("quick") == "1") for seed in range(options.runs)]
    rows = [_row("whole run", "s", [float(report["seconds"]) for report in reports])]
    for stage in sorted({name for report in reports for name in report["stage_seconds"]}):
        seconds = [float(report["stage_seconds"].get(stage, 0.0)) for report in reports]
        rows.append(_row(f"seconds: {stage}", "s", seconds))
    for number in range(max(len(report["cycles"]) for report in reports)):
        cycles = [report["cycles"][number]["steps"] for report in reports if number < len(report["cycles"])]
        rows.extend(_cycle_rows(number + 1, cycles))
    for number in range(min(len(report["sessions"]) for report in reports)):
        sessions = [report["sessions"][number] for report in reports]
        rate = [float(session["success"]) for session in sessions]
        speed = [session["episodes"] / session["seconds"] for session in sessions]
        title = f"session {number + 1} ({sessions[0]['title']})"
        rows.append(_row(f"{title}: success", "share", rate, better="higher"))
        rows.append(_row(f"{title}: speed", "episodes/s", speed, better="higher"))
    rows.append(_row("failed requests", "requests", [float(report["failed_requests"]) for report in reports]))
    return rows


def _cycle_rows(number: int, cycles: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    curated = [steps["curate"] for steps in cycles if "fresh" in steps.get("curate", {})]
    trained = [steps["train"] for steps in cycles if "tokens" in steps.get("train", {})]
    if curated:
        fresh = [float(output["fresh"]) for output in curated]
        rows.append(_row(f"cycle {number}: verified successes trained on", "episodes", fresh, better="higher"))
    for name in ("tokens", "tokens_computed", "tokens_trained"):
        values = [float(output[name]) for output in trained]
        if values:
            rows.append(_row(f"cycle {number}: {name.replace('_', ' ')}", "tokens", values, better="higher"))
    speeds = [output["tokens"] / output["seconds"] for output in trained if output["seconds"] > 0]
    if speeds:
        rows.append(_row(f"cycle {number}: training speed", "tokens/s", speeds, better="higher"))
    return rows


def _row(metric: str, unit: str, values: Sequence[float], *, better: Any = "lower") -> Row:
    return measured("loop", metric, unit, values, better=better)


def _report(folder: Path, seed: int, *, quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "tidegate", "demo", "--runs", str(folder), "--seed", str(seed), "--json"]
    done = subprocess.run([*command, *(["--quick"] if quick else [])], check=True, stdout=subprocess.PIPE, text=True)
    run_folder = Path(json.loads(done.stdout.splitlines()[-1])["run"])
    return json.loads((run_folder / "report.json").read_text(encoding="utf-8"))
