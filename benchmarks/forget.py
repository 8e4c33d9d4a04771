"""Forgetting: success on the first kinds after three rounds on a new kind, with and without the defences.

72 demonstrations of three kinds make the first adapter. Then three rounds train on 24 demonstrations each of a fourth
kind, each from the weights of the last: without any defence, with replay of earlier examples, with the divergence from
the start of the round, and with both. After the last round each answers 96 tasks of the first kinds at temperature 1,
and 48 of the new kind, on which its divergence from the start is measured.
Options: ``seeds=N`` (3), ``first=N`` (0) the first of them, ``rounds=N`` (3), ``defences=NAMES`` as
``none,replay and KL`` (all four; ``none`` always).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Options, Row, measured
from benchmarks.small_agent import SmallAgent, small_agent
from tidegate.core.selection.sampling import balanced_draw
from tidegate.core.selection.sequences import Fresh
from tidegate.core.types import AdapterRef, Example
from tidegate.engines.model_cache import resolve_model

NEW = "leg_counting"
SHOWN = 24
"""Demonstrations of each first kind: with 8 the form of an answer is still learnt from whatever comes next."""
REPLAYED, KL = 0.15, 0.05
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "replay": {"replay": REPLAYED},
    "KL": {"kl_coefficient": KL},
    "replay and KL": {"replay": REPLAYED, "kl_coefficient": KL},
}


def run(options: Options) -> list[Row]:
    """All seeds, one after another."""
    model = resolve_model("smollm2-135m", progress=_say)
    success: defaultdict[str, list[float]] = defaultdict(list)
    divergence: defaultdict[str, list[float]] = defaultdict(list)
    asked = options.values.get("defences")
    chosen = {name: DEFENCES[name] for name in DEFENCES if asked is None or name == "none" or name in asked.split(",")}
    first = int(options.values.get("first", "0"))
    for seed in range(first, first + int(options.values.get("seeds", "3"))):
        with tempfile.TemporaryDirectory() as folder:
            rounds = int(options.values.get("rounds", "3"))
            asyncio.run(
                _seed(Path(folder), model, chosen, seed=seed, rounds=rounds, success=success, divergence=divergence)
            )
    rows = [
        measured("forget", f"{name}: success", "share", values, better="higher") for name, values in success.items()
    ]
    before = statistics.fmean(success["before"])
    unmitigated = before - statistics.fmean(success["none, first kinds"])
    rows += [
        measured("forget", f"{name}: KL on the new kind", "nats/token", values, better="lower")
        for name, values in divergence.items()
    ]
    for name in chosen:
        lost = before - statistics.fmean(success[f"{name}, first kinds"])
        rows.append(measured("forget", f"{name}: lost on the first kinds", "share", [lost], better="lower"))
        if name != "none" and unmitigated > 0:
            share = lost / unmitigated
            rows.append(
                measured("forget", f"{name}: share of the loss", "ratio", [share], better="lower", target=1 / 3)
            )
    return rows


async def _seed(
    folder: Path,
    model: Path,
    defences: dict[str, dict[str, Any]],
    *,
    seed: int,
    rounds: int,
    success: defaultdict[str, list[float]],
    divergence: defaultdict[str, list[float]],
) -> None:
    async with small_agent(folder, model) as agent:
        shown = agent.seed_examples(seed, count=SHOWN)
        first = agent.train(shown, None, seed, epochs=4)
        old, new = agent.tasks(3000 + seed, 96), agent.tasks(4000 + seed, 48, (NEW,))
        success["before"].append((await agent.ask(first, old, samples=1, seed=seed)).success)
        for name, defence in defences.items():
            last = _rounds(agent, first, shown, dict(defence), seed=seed, rounds=rounds)
            success[f"{name}, first kinds"].append((await agent.ask(last, old, samples=1, seed=seed)).success)
            learnt = await agent.ask(last, new, samples=1, seed=seed, reference=first)
            success[f"{name}, new kind"].append(learnt.success)
            divergence[name].append(learnt.kl or 0.0)
            _say(f"seed {seed}, {name}: {success[f'{name}, first kinds'][-1]:.3f} (before {success['before'][-1]:.3f})")


def _rounds(
    agent: SmallAgent, first: AdapterRef, shown: list[Example], defence: dict[str, Any], *, seed: int, rounds: int
) -> AdapterRef:
    share = float(defence.pop("replay", 0.0))
    adapter = first
    for number in range(rounds):
        fresh = agent.seed_examples(100 * (seed + 1) + number, (NEW,), 24)
        fresh = [replace(example, id=f"{number}-{example.id}") for example in fresh]
        size = round(len(fresh) * share / (1.0 - share))
        earlier = [Fresh(example=example, user_key="") for example in shown]
        replayed = [drawn.example for drawn in balanced_draw(earlier, size=size, seed=seed + number).kept]
        adapter = agent.train([*fresh, *replayed], adapter, seed, epochs=3, **defence)
    return adapter


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
