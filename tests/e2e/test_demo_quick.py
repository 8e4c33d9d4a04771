"""``tidegate demo`` on the real small model with a quarter of the traffic: every stage runs, every claim is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demonstration_runs_and_tells_the_truth(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tidegate", "demo", "--quick", "--seed", "3", "--runs", str(tmp_path), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout.splitlines()[-1])["run"])
    report = json.loads((run / "report.json").read_text())
    assert (run / "curve.png").stat().st_size > 10_000
    assert report["failed_requests"] == 0
    assert [session["failed_requests"] for session in report["sessions"]] == [0] * len(report["sessions"])
    assert report["first_release"]["loss_last"] < 0.2 * report["first_release"]["loss_first"]

    cycles = report["cycles"]
    assert [cycle["outcome"] for cycle in cycles[:2]] == ["abstained", "abstained"]  # too little traffic to conclude
    missing = ("of 8 fresh", "of 8 dev", "of 50 pairs")
    assert all(any(words in cycle["reasons"][0] for words in missing) for cycle in cycles[:2])
    assert cycles[-1]["outcome"] in ("refused", "abstained")  # the degraded adapter, never published
    assert "publish" not in cycles[-1]["steps"]

    rolled_back, promoted = report["sessions"][-2:]
    assert len(rolled_back["releases"]) == len(promoted["releases"]) == 1
    assert set(rolled_back["releases"]) != set(promoted["releases"])
    assert report["audit"]["records"] > 0

    for shown in (rolled_back, promoted):
        release = next(iter(shown["releases"]))
        listed = subprocess.run(
            [sys.executable, "-m", "tidegate", "--config", str(run / "tidegate.toml"), "releases", "show", release],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert listed.returncode == 0, listed.stderr
