"""Success on unseen tasks after equal generated tokens: the seed model, STaR, GRPO, one answer a prompt, TRL's GRPO.

Calculator agent: 24 demonstrations make the seed model. It answers 9 tasks 7 times each (groups) and 63 tasks once
(singletons), about as many tokens. From the groups STaR trains on what was right and GRPO on all of it; from the
singletons GRPO has nothing to compare: rewards are held against earlier answers of the same kind instead, with the
clipped ratio in three passes and by REINFORCE, which has no clip, in one. TRL trains by
GRPO on the same groups with its defaults. Each result then answers 96 tasks that none of
them saw, at temperature 1.

Function calling (``bfcl=FOLDER`` with ``bfcl_v4_simple_python.questions.jsonl`` and ``.answers.jsonl``): 32 fixed
demonstrations, then 24 tasks answered 4 times (groups) and 96 once (singletons), 128 unseen tasks, at temperature 0.7.

``KL`` is the divergence of the answers from the seed model. Reported are means over seeds with a 95 % band (Student's
t); ``ratio`` is not used. Options: ``seeds=N`` (5), ``held_out=N`` (96), ``bfcl_seeds=N`` (3),
``peer=no`` without TRL, ``peer=both`` with our rate too.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.harness import REPOSITORY, Options, Row, measured, peer_environment
from benchmarks.small_agent import LIVE, SmallAgent, demonstration, small_agent
from benchmarks.train import TRL, same_versions
from tidegate.core.errors import TrainingError
from tidegate.core.types import AdapterRef, Sampling, Task
from tidegate.engines.model_cache import resolve_model
from tidegate.signals.tasks.convert import bfcl_demonstrations, bfcl_tasks

PROMPTS, ANSWERS, SINGLES = 9, 7, 63
GRPO = {"objective": "grpo", "epochs": 3, "batch_size": 16}
SLICE = {"objective": "grpo", "baseline": "slice", "epochs": 3, "batch_size": 16}
REINFORCE = {"objective": "reinforce", "baseline": "slice", "epochs": 1, "batch_size": 16}
RATE = "5e-4"
SHOWN, CALL_PROMPTS, CALL_ANSWERS, CALL_SINGLES, CALL_UNSEEN = 32, 24, 4, 96, 128
CALLS = Sampling(temperature=0.7, max_tokens=96)
_SPLIT_SEED = 0
_SHARE = "share"

Peer = Callable[[SmallAgent, Sequence[Any], AdapterRef, str], AdapterRef]


class _Figures:
    """Values of each seed by metric and unit, in the order in which they first came."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, metric: str, unit: str, value: float) -> None:
        """One seed's value; of success more is better, of tokens and divergence less."""
        self._values[metric, unit].append(value)
        _say(f"{self._agent}: {metric}: {value:.3f} {unit}")

    def rows(self) -> list[Row]:
        return [row for (metric, unit), values in self._values.items() for row in self._rows(metric, unit, values)]

    def _rows(self, metric: str, unit: str, values: Sequence[float]) -> list[Row]:
        """Mean, and half the width of its 95 % band."""
        name = f"{self._agent}: {metric}"
        better = "higher" if unit == _SHARE else "lower"
        rows = [measured("learn", f"{name}, mean", unit, [statistics.fmean(values)], better=better)]
        if len(values) > 1:
            half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
            rows.append(measured("learn", f"{name}, 95 % band +-", unit, [half], better="lower"))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One seed of one agent."""

    model: Path
    seed: int
    peer: Peer | None
    both_rates: bool
    figures: _Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Tasks that are answered ``answers`` times each, tasks that are answered once, and those that judge the result."""

    grouped: Sequence[Task]
    answers: int
    single: Sequence[Task]
    unseen: Sequence[Task]


def run(options: Options) -> list[Row]:
    """All seeds, one after another."""
    model = resolve_model("smollm2-135m", progress=_say)
    wanted = options.values.get("peer", "")
    peer, both = None if wanted == "no" else _trl(), wanted == "both"
    calculator, calls = _Figures("calculator"), _Figures("function calls")
    for seed in range(int(options.values.get("seeds", "5"))):
        with tempfile.TemporaryDirectory() as folder:
            held_out = int(options.values.get("held_out", "96"))
            trial = _Trial(model=model, seed=seed, peer=peer, both_rates=both, figures=calculator)
            asyncio.run(_calculator(trial, Path(folder), held_out))
    data = options.values.get("bfcl")
    if data is not None:
        stem = Path(data) / "bfcl_v4_simple_python"
        tasks = list(bfcl_tasks(Path(f"{stem}.questions.jsonl"), Path(f"{stem}.answers.jsonl")))
        random.Random(_SPLIT_SEED).shuffle(tasks)  # noqa: S311 - a split, no secret
        for seed in range(int(options.values.get("bfcl_seeds", "3"))):
            with tempfile.TemporaryDirectory() as folder:
                trial = _Trial(model=model, seed=seed, peer=peer, both_rates=both, figures=calls)
                asyncio.run(_calls(trial, Path(folder), tasks))
    return calculator.rows() + calls.rows()


async def _calculator(trial: _Trial, folder: Path, held_out: int) -> None:
    seed = trial.seed
    async with small_agent(folder, trial.model, LIVE) as agent:
        first = agent.train(agent.seed_examples(seed), None, seed, epochs=4)
        grouped = agent.tasks(1000 + seed, PROMPTS)
        single = agent.tasks(2000 + seed, SINGLES, without=grouped)
        unseen = agent.tasks(3000 + seed, held_out, without=[*grouped, *single])
        asked = _Asked(grouped=grouped, answers=ANSWERS, single=single, unseen=unseen)
        await _compare(trial, agent, first, asked)


async def _calls(trial: _Trial, folder: Path, tasks: Sequence[Task]) -> None:
    shown = bfcl_demonstrations(tasks[:SHOWN])
    pool = list(tasks[SHOWN:-CALL_UNSEEN])
    random.Random(trial.seed).shuffle(pool)  # noqa: S311 - an order, no secret
    asked = _Asked(
        grouped=pool[:CALL_PROMPTS],
        answers=CALL_ANSWERS,
        single=pool[CALL_PROMPTS : CALL_PROMPTS + CALL_SINGLES],
        unseen=tasks[-CALL_UNSEEN:],
    )
    async with small_agent(folder, trial.model, CALLS) as agent:
        examples = [demonstration(f"d-{number}", task, answer) for number, (task, answer) in enumerate(shown)]
        first = agent.train(examples, None, trial.seed, epochs=5)
        await _compare(trial, agent, first, asked)


async def _compare(trial: _Trial, agent: SmallAgent, first: AdapterRef, asked: _Asked) -> None:
    """Answer, train in each way, and ask what none of them saw."""
    seed, peer, figures = trial.seed, trial.peer, trial.figures
    groups = await agent.ask(first, asked.grouped, samples=asked.answers, seed=seed)
    singles = await agent.ask(first, asked.single, samples=1, seed=seed)
    figures.add("generated for groups", "tokens", groups.tokens)
    figures.add("generated for singletons", "tokens", singles.tokens)
    right = agent.curated(groups, seed, keep_failures=False)
    right_single = agent.curated(singles, seed, keep_failures=False)
    scored = agent.curated(groups, seed, keep_failures=True)
    scored_single = agent.curated(singles, seed, keep_failures=True)
    _say(f"seed {seed}: {len(right)} of {len(scored)} right in groups, {len(right_single)} of {len(scored_single)}")
    ways: dict[str, Callable[[], AdapterRef]] = {
        "seed model": lambda: first,
        "STaR, groups": lambda: agent.train(right, first, seed, epochs=3) if right else first,
        "GRPO, groups": lambda: agent.train(scored, first, seed, **GRPO),
        "STaR, singletons": lambda: agent.train(right_single, first, seed, epochs=3) if right_single else first,
        "clipped ratio with slice baseline, singletons": lambda: agent.train(scored_single, first, seed, **SLICE),
        "REINFORCE with slice baseline, singletons": lambda: agent.train(scored_single, first, seed, **REINFORCE),
    }
    if peer is not None:
        ways[f"{_PEER}, groups, its defaults"] = lambda: peer(agent, scored, first, "default")
        if trial.both_rates:
            ways[f"{_PEER}, groups, rate {RATE}"] = lambda: peer(agent, scored, first, RATE)
    for name, train in ways.items():
        adapter = train()
        reference = None if adapter is first else first
        found = await agent.ask(adapter, asked.unseen, samples=1, seed=9000 + seed, reference=reference)
        figures.add(f"{name}: held-out success", _SHARE, found.success)
        if found.kl is not None:
            figures.add(f"{name}: KL", "nats/token", found.kl)
    try:
        agent.train(scored_single, first, seed, **GRPO)
    except TrainingError as error:
        _say(f"GRPO on singletons: {error}")
    else:
        raise RuntimeError("GRPO learnt from singleton groups, which have no advantage")


_PEER = TRL.replace("==", " ") + " GRPO"


def _trl() -> Peer:
    python = peer_environment("trl", [TRL, *same_versions("torch", "transformers", "peft", "accelerate")])
    script = REPOSITORY / "benchmarks" / "peers" / "trl_grpo.py"

    def train(agent: SmallAgent, scored: Sequence[Any], first: AdapterRef, rate: str) -> AdapterRef:
        return agent.train_elsewhere([str(python), str(script), rate], scored, first)

    return train


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
