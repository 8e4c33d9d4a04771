"""The demonstration's figures: intervals, plots and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.demo.record import DemoRecord, Mark, Session, draw_png, draw_terminal, kinds_of, wilson_interval


def session(number: int, success: float, **kinds: tuple[int, int]) -> Session:
    return Session(
        number=number, title="users", episodes=40, success=success, by_kind=dict(kinds), failed_requests=0,
        releases={"r1": 40}, seconds=10.0,
    )  # fmt: skip


@pytest.fixture
def record() -> DemoRecord:
    record = DemoRecord(seed=7)
    record.sessions = [session(1, 0.4, sums=(16, 40)), session(2, 0.8, sums=(20, 20), legs=(12, 20))]
    record.marks = [Mark(after_session=1, what="r2 accepted", accepted=True, detail="37 wins")]
    return record


def test_wilson_interval_matches_a_published_example() -> None:
    # Newcombe 1998, table I: 81 of 263 gives .2553 to .3662.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_share(case: tuple[int, int]) -> None:
    low, high = wilson_interval(*case)
    assert 0.0 <= low <= case[0] / case[1] + 1e-12
    assert case[0] / case[1] - 1e-12 <= high <= 1.0


def test_kinds_come_in_order_of_appearance(record: DemoRecord) -> None:
    assert kinds_of(record.sessions) == ["sums", "legs"]


def test_report_holds_sessions_marks_and_facts(record: DemoRecord, tmp_path: Path) -> None:
    record.facts["failed_requests"] = 0
    record.write(tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [s["success"] for s in report["sessions"]] == [0.4, 0.8]
    assert report["marks"][0]["what"] == "r2 accepted"
    assert (report["seed"], report["failed_requests"]) == (7, 0)


def test_plots_are_drawn(record: DemoRecord, tmp_path: Path) -> None:
    draw_png(record, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    lines = draw_terminal(record, width=60, height=12).splitlines()
    assert len(lines) == 12
    assert max(map(len, lines)) <= 60
    assert "\x1b" not in "".join(lines)
