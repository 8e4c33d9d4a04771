"""The gate on simulated streams: false promotions, power, drift, canary and detector, beside testing each time.

Runs what ``tidegate gate simulate`` runs, with seeds 0, 1, ... The peer is the rule "p < .05 each time" on the same
looks. Option: ``windows=N`` (default 1000).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Options, Row, measured
from tidegate.app.planning import simulate
from tidegate.config import Settings
from tidegate.core.gate.simulation import Table
from tidegate.core.gate.simulation.rules import EACH_TIME, LEDGER


def run(options: Options) -> list[Row]:
    """Simulate once per run and turn the tables into rows."""
    windows = int(options.values.get("windows", "1000"))
    seconds: list[float] = []
    runs: list[Mapping[str, Table]] = []
    for seed in range(options.runs):
        begin = time.perf_counter()
        runs.append(dict(simulate(Settings(), windows=windows, seed=seed)))
        seconds.append(time.perf_counter() - begin)
    return [
        _row("all tables", "s", seconds, better="lower", target=60.0),
        *_stream_rows([tables["rules"] for tables in runs]),
        *_scenario_rows([tables["scenarios"] for tables in runs]),
        *_value_rows("canary", [tables["canary"] for tables in runs]),
        *_value_rows("detector", [tables["detector"] for tables in runs]),
        *_value_rows("conditions", [tables["conditions"] for tables in runs]),
        *_value_rows("dependence", [tables["dependence"] for tables in runs]),
    ]


def _stream_rows(tables: Sequence[Table]) -> list[Row]:
    """Ledger and peer on an ordinary stream and on a drifting one."""
    targets: dict[str, tuple[Any, float | None]] = {
        "FDR": ("lower", 0.10),
        "harmful per 100 looks": ("lower", None),
        "power": ("higher", 0.90),
        "power, first look": ("higher", 0.90),
    }
    rows: list[Row] = []
    for column, (better, target) in targets.items():
        ours, peer = ([_cell(table, name, column) for table in tables] for name in (LEDGER, EACH_TIME))
        rows.append(_row(f"mixed stream: {column}", "", ours, better=better, target=target, peer=peer))
    ours, peer = ([-_cell(table, name, "drift, pp") for table in tables] for name in (LEDGER, EACH_TIME))
    return [*rows, _row("loss in 100 looks at -0.5 pp", "pp", ours, better="lower", target=1.0, peer=peer)]


def _scenario_rows(tables: Sequence[Table]) -> list[Row]:
    rows: list[Row] = []
    for scenario, *_ in tables[0].rows:
        name = str(scenario)
        ours, peer = ([_cell(table, name, column) for table in tables] for column in (LEDGER, EACH_TIME))
        rows.append(_row(f"FDR: {name}", "share", ours, better="lower", target=0.10, peer=peer))
    return rows


def _value_rows(title: str, tables: Sequence[Table]) -> list[Row]:
    """Every number of a table that all runs have a value for."""
    rows: list[Row] = []
    for first, *_ in tables[0].rows:
        for column in tables[0].columns[1:]:
            values = [_cell(table, str(first), column) for table in tables]
            if column != "bound" and all(value is not None for value in values):
                rows.append(_row(f"{title}: {first}: {column}", "", values, better="lower"))
    return rows


def _cell(table: Table, row: str, column: str) -> Any:
    cells = next(cells for cells in table.rows if cells[0] == row)
    return cells[table.columns.index(column)]


def _row(
    metric: str,
    unit: str,
    ours: Sequence[float],
    *,
    better: Any,
    target: float | None = None,
    peer: Sequence[float] = (),
) -> Row:
    name = f"rule {EACH_TIME!r}" if peer else None
    return measured("gate", metric, unit, ours, better=better, target=target, peer=peer, peer_name=name)
