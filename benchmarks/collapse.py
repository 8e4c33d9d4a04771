"""A policy trained on its own successes: alarms of the gate's collapse tests, and held-out success, by curation.

Runs what ``tidegate lab collapse`` runs, five seeds a run: 0 to 4, then 5 to 9, ... Beside the three curations of the
command it measures the two halves of full curation alone. The peer is aggressive filtering. Options:
``seeds=N`` a run (default 5), ``rounds=N`` (default 20).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.harness import Options, Row, measured
from tidegate.app.laboratory import collapse
from tidegate.config import Settings
from tidegate.lab.batches import CURATIONS, Curation
from tidegate.lab.collapse import CollapseRun

PEER = "aggressive"
HALVES = (
    Curation(name="weights only", balanced=True),
    Curation(name="mix only", replay_share=0.15, demonstration_share=0.10),
)


def run(options: Options) -> list[Row]:
    """Train under every curation and turn the runs into rows."""
    seeds, rounds = (int(options.values.get(name, default)) for name, default in (("seeds", "5"), ("rounds", "20")))
    curations = (*CURATIONS, *HALVES)
    seconds: list[float] = []
    blocks: list[Mapping[str, Sequence[CollapseRun]]] = []
    for number in range(options.runs):
        begin = time.process_time()
        block = range(number * seeds, (number + 1) * seeds)
        runs = collapse(Settings(), seeds=block, rounds=rounds, curations=curations)
        seconds.append(time.process_time() - begin)
        blocks.append({c.name: [run for run in runs if run.curation == c.name] for c in curations})
    return [
        measured("collapse", "all runs", "CPU s", seconds, better="lower"),
        *(row for curation in curations for row in _rows(curation.name, blocks, seeds)),
        measured("collapse", "full above aggressive", f"of {seeds}", _above(blocks), better="higher", target=seeds),
    ]


def _rows(name: str, blocks: Sequence[Mapping[str, Sequence[CollapseRun]]], seeds: int) -> Iterator[Row]:
    """Alarms and held-out success of one curation, a value for each block of seeds."""
    alarms = [sum(bool(run.firing) for run in block[name]) for block in blocks]
    target = {"aggressive": seeds, "full": 0}.get(name)
    yield measured("collapse", f"{name}: runs with an alarm", f"of {seeds}", alarms, better="lower", target=target)
    held_out = {curation: [_held_out(block[curation]) for block in blocks] for curation in (name, PEER)}
    yield measured(
        "collapse",
        f"{name}: held-out success",
        "share",
        held_out[name],
        better="higher",
        peer=held_out[PEER] if name != PEER else (),
        peer_name=PEER if name != PEER else None,
    )


def _above(blocks: Sequence[Mapping[str, Sequence[CollapseRun]]]) -> list[int]:
    """Seeds of each block on which full curation ends above aggressive filtering."""
    return [
        sum(_held_out([ours]) > _held_out([theirs]) for ours, theirs in zip(block["full"], block[PEER], strict=True))
        for block in blocks
    ]


def _held_out(runs: Sequence[CollapseRun]) -> float:
    """Mean over some runs."""
    return statistics.mean(run.standings[-1].held_out for run in runs)
