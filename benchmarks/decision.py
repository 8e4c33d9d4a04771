"""One decision of the gate over recorded pairs: from the columns, from the decoded record, and from its JSON.

Options: ``pairs=N`` for another number than 1,000,000. The outcomes are drawn: 14 % of the pairs are discordant, ten
kinds of tasks, one answer in a thousand was cut short. The collapse tests of the policy that ships are part of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Options, Row, measured
from tidegate.core.gate.certify import certify
from tidegate.core.gate.decisions import Promote
from tidegate.core.gate.evidence import Evidence, Outcomes, Pairs, decode_pairs, encode_pairs
from tidegate.core.gate.records import decide
from tidegate.core.gate.samples import SampleEvidence, Samples, decode_samples, encode_samples, sampled_tasks
from tidegate.core.gate.state import Epoch, GateState, commitment_of
from tidegate.core.hashing import canonical_json
from tidegate.core.statistics import Ledger
from tidegate.gate import load_policy

PAIRS = 1_000_000
TARGET_S = 1.0


def run(options: Options) -> list[Row]:
    """Time each way to the decision, and check that all of them end in the same one."""
    count = int(options.values.get("pairs", PAIRS))
    pairs = _pairs(count, np.random.default_rng(0))
    given, state = _record(pairs)
    text = canonical_json(given)
    policy, ledger = load_policy(), Ledger(alpha=0.1, looks=13)
    samples = decode_samples(given["samples"])
    passes, rewards = (
        Evidence(pairs=pairs, available=count, graded=graded, seed=1, samples=samples) for graded in (False, True)
    )
    ways: dict[str, tuple[Callable[[], Any], float | None]] = {
        "columns to decision": (lambda: certify(passes, policy, ledger), TARGET_S),
        "columns to decision, graded rewards": (lambda: certify(rewards, policy, ledger), TARGET_S),
        "decoded record to decision and its record": (lambda: decide(given, state)[0], TARGET_S),
        "JSON text to decoded record": (lambda: json.loads(text), None),
        "columns of the decoded record": (lambda: decode_pairs(given["outcomes"]), None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.runs):
        for name, (way, _) in ways.items():
            started = time.perf_counter()
            result = way()
            seconds[name].append(time.perf_counter() - started)
            if name.endswith("decision") and not isinstance(result, Promote):
                raise RuntimeError(f"{name}: the outcomes are those of a better challenger; it ends in {result!r}")
    title = f"{count:,} pairs: "
    rows = [
        measured("decision", title + name, "s", values, better="lower", target=ways[name][1])
        for name, values in seconds.items()
    ]
    return [*rows, measured("decision", title + "JSON text", "MB", [len(text.encode()) / 1e6], better="lower")]


def _pairs(count: int, rng: np.random.Generator) -> Pairs:
    """A challenger that gains 4 points on the champion, which equals the anchor."""
    draw = rng.random(count)
    easy = draw < 0.5
    return Pairs(
        task_ids=tuple(f"task-{number:08}" for number in range(count)),
        kinds=tuple(f"kind-{number}" for number in range(10)),
        kind=rng.integers(0, 10, count),
        challenger=_outcomes(easy | (draw > 0.91), rng),
        champion=_outcomes(easy | ((draw > 0.5) & (draw < 0.55)), rng),
        anchor=_outcomes(easy | ((draw > 0.5) & (draw < 0.55)), rng),
    )


def _outcomes(passed: NDArray[np.bool_], rng: np.random.Generator) -> Outcomes:
    count = len(passed)
    cut, never = rng.random(count) < 0.001, np.zeros(count, dtype=np.bool_)
    passed = passed & ~cut
    return Outcomes(
        passed=passed,
        rewards=passed.astype(np.float64),
        no_reply=never,
        invalid_tool_call=never,
        refused=~passed & (rng.random(count) < 0.02),
        engine_error=cut,
        verifier_error=never,
        tokens=np.where(cut, 0, rng.integers(50, 90, count)),
        milliseconds=np.where(cut, 0, rng.integers(900, 1500, count)),
    )


def _samples(task_ids: tuple[str, ...], commitment: str, rng: np.random.Generator) -> SampleEvidence:
    """Further answers of two arms that are equally varied."""
    rules = load_policy().collapse
    if rules == "none":
        raise RuntimeError("the policy that ships asks for no further answers; there is nothing to measure")
    chosen = sampled_tasks(task_ids, commitment=commitment, limit=rules.tasks)

    def arm() -> Samples:
        count = len(chosen)
        return Samples(
            passed=rng.integers(0, rules.samples + 1, count),
            cut_short=np.zeros(count, dtype=np.int64),
            tokens=rng.integers(400, 700, count),
            surprisal=rng.uniform(200.0, 400.0, count),
            strategies=rng.uniform(1.0, 4.0, count),
            distinct=rng.uniform(0.5, 1.0, count),
            vendi=rng.uniform(1.0, 4.0, count),
        )

    return SampleEvidence(task_ids=chosen, per_task=rules.samples, challenger=arm(), anchor=arm())


def _record(pairs: Pairs) -> tuple[dict[str, Any], GateState]:
    """What a decision's record is derived from, after a way through JSON, and a state with its epoch open."""
    salt = "salt"
    epoch = Epoch(
        id="epoch-1",
        number=1,
        commitment=commitment_of(pairs.task_ids, salt),
        size=len(pairs),
        opened_at=0.0,
        decoding={"temperature": 1.0},
        grading={"graded": []},
    )
    given: dict[str, Any] = {
        "format": 2,
        "policy": load_policy().values(),
        "salt": salt,
        "verifiers": {"benchmark": "1"},
        "available": len(pairs),
        "outcomes": encode_pairs(pairs),
        "samples": encode_samples(_samples(pairs.task_ids, epoch.commitment, np.random.default_rng(1))),
    }
    return json.loads(canonical_json(given)), GateState(epochs=(epoch,))
