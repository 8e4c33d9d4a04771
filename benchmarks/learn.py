"""Success on unseen tasks after equal generated tokens: the seed model, STaR, GRPO, and one answer a prompt.

The calculator agent: 24 demonstrations make the seed model. It answers 9 tasks 7 times each (groups) and 63 tasks
once (singletons), about as many tokens. From the groups STaR trains on what was right and GRPO on all of it; from the
singletons GRPO has nothing to compare, while REINFORCE learns against earlier answers of the same kind. Each result
then answers 96 tasks that none of them saw, at temperature 1. Options: ``seeds=N`` (5), ``held_out=N`` (96).

Reported are means over seeds with a 95 % band (Student's t); ``ratio`` is not used.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scipy import stats

from benchmarks.harness import Options, Row, measured
from benchmarks.small_agent import small_agent
from tidegate.core.errors import TrainingError
from tidegate.engines.model_cache import resolve_model

PROMPTS, ANSWERS, SINGLES = 9, 7, 63


def run(options: Options) -> list[Row]:
    """All seeds, one after another."""
    model = resolve_model("smollm2-135m", progress=_say)
    seeds = int(options.values.get("seeds", "5"))
    held_out = int(options.values.get("held_out", "96"))
    success: defaultdict[str, list[float]] = defaultdict(list)
    tokens: defaultdict[str, list[float]] = defaultdict(list)
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            found, cost = asyncio.run(_seed(Path(folder), model, seed, held_out))
        for name, value in found.items():
            success[name].append(value)
        for name, value in cost.items():
            tokens[name].append(value)
    rows = [row for name, values in success.items() for row in _band(f"{name}: held-out success", values)]
    return rows + [_row(f"{name}: generated tokens", "tokens", values) for name, values in tokens.items()]


async def _seed(folder: Path, model: Path, seed: int, held_out: int) -> tuple[dict[str, float], dict[str, float]]:
    """Success by arm, and generated tokens by source."""
    success: dict[str, float] = {}
    async with small_agent(folder, model) as agent:
        shown = agent.seed_examples(seed)
        first = agent.train(shown, None, seed, epochs=4)
        grouped = agent.tasks(1000 + seed, PROMPTS)
        single = agent.tasks(2000 + seed, SINGLES, without=grouped)
        unseen = agent.tasks(3000 + seed, held_out, without=[*grouped, *single])
        groups = await agent.ask(first, grouped, samples=ANSWERS, seed=seed)
        singles = await agent.ask(first, single, samples=1, seed=seed)
        right = agent.curated(groups, seed, keep_failures=False)
        right_single = agent.curated(singles, seed, keep_failures=False)
        scored = agent.curated(groups, seed, keep_failures=True)
        scored_single = agent.curated(singles, seed, keep_failures=True)
        _say(f"seed {seed}: {len(right)} of {len(scored)} right in groups, {len(right_single)} of {len(scored_single)}")
        results = {
            "seed model": first,
            "STaR, groups": agent.train(right, first, seed, epochs=3),
            "GRPO, groups": agent.train(scored, first, seed, **GRPO),
            "STaR, singletons": agent.train(right_single, first, seed, epochs=3),
            "REINFORCE with slice baseline, singletons": agent.train(scored_single, first, seed, **SLICE),
        }
        try:
            agent.train(scored_single, first, seed, **GRPO)
        except TrainingError as error:
            _say(f"GRPO on singletons: {error}")
        else:
            raise RuntimeError("GRPO learnt from singleton groups, which have no advantage")
        for name, adapter in results.items():
            found = await agent.ask(adapter, unseen, samples=1, seed=9000 + seed)
            success[name] = found.success
            _say(f"seed {seed}: {name}: {found.success:.3f} of {len(found.judged)}")
        return success, {"groups": float(groups.tokens), "singletons": float(singles.tokens)}


GRPO = {"objective": "grpo", "epochs": 3, "batch_size": 16}
SLICE = {"objective": "reinforce", "baseline": "slice", "epochs": 3, "batch_size": 16}


def _band(metric: str, values: Sequence[float]) -> list[Row]:
    """Mean, and half the width of its 95 % band."""
    rows = [measured("learn", f"{metric}, mean", "share", [statistics.fmean(values)], better="higher")]
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
        rows.append(measured("learn", f"{metric}, 95 % band +-", "share", [half], better="lower"))
    return rows


def _row(metric: str, unit: str, values: Sequence[float]) -> Row:
    return measured("learn", metric, unit, values, better="lower")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
