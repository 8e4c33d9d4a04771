"""Answers as the monitors see them, drawn from policies of a given breadth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tidegate.core.monitors import RecordedAnswer

OPENINGS = ("the answer is", "it comes to", "we get", "that makes", "altogether", "in total", "so it is", "result:")


def one(identifier: str, **changes: Any) -> RecordedAnswer:
    """A passing answer of release ``r1``."""
    base = RecordedAnswer(
        id=identifier,
        release="r1",
        kind="sums",
        prompt=f"prompt-{identifier}",
        passed=True,
        strategy=((), "four"),
        tokens=4,
        no_reply=False,
        invalid_tool_call=False,
        refused=False,
        temperature=1.0,
        surprisal=2.0,
    )
    return replace(base, **changes)


def drawn(
    release: str,
    seed: int,
    *,
    episodes: int = 300,
    kinds: int = 4,
    prompts: int = 0,
    ways: int = len(OPENINGS),
    skill: float = 0.6,
    entropy: float = 0.8,
    unsolved: int = 0,
) -> list[RecordedAnswer]:
    """Answers of a policy.

    Args:
        release: that answered.
        seed: of everything drawn.
        episodes: how many.
        kinds: of tasks, equally often.
        prompts: so many different ones of a kind; 0: each episode has its own.
        ways: in which a passing answer may begin.
        skill: chance to pass.
        entropy: mean of -logprob, nats a token.
        unsolved: kinds that never pass.
    """
    rng = np.random.default_rng(seed)
    answers: list[RecordedAnswer] = []
    for number in range(episodes):
        kind = int(rng.integers(kinds))
        prompt = f"{kind}-{rng.integers(prompts)}" if prompts else f"{kind}-{release}-{seed}-{number}"
        tokens = int(rng.integers(5, 20))
        answers.append(
            one(
                f"{release}-{seed}-{number}",
                release=release,
                kind=f"kind-{kind}",
                prompt=prompt,
                passed=bool(rng.random() < skill) and kind >= unsolved,
                strategy=((), f"{OPENINGS[int(rng.integers(ways))]} {rng.integers(10)}"),
                tokens=tokens,
                surprisal=float(entropy * rng.gamma(4.0 * tokens) / 4.0),
            )
        )
    return answers
