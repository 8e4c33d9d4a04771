"""The script of the demonstration: who comes when, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.chat import content_text
from tidegate.core.types import Task

CALCULATOR_KINDS = ("chain_sum", "products", "basic_arithmetic")
NEW_KIND = "leg_counting"
"""Appears later, so that the traffic drifts; the first release solves none of it."""

ANIMALS = ("ant", "bee", "cat", "chicken", "cow", "crab", "dog", "duck", "horse", "sheep", "snake", "spider")
"""Those that users ask about. How many legs one has must be shown: two dozen demonstrations are too few for all 37."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of a run. A session is a number of episodes, one of each user.

    ``opening`` and ``drifted`` sessions run at full concurrency; while a cycle runs, users go on at
    ``background_per_s`` episodes a second for at most ``background`` episodes. ``shown`` demonstrations of the new
    kind are sent by users as feedback.
    """

    demonstrations_per_kind: int = 8
    seed_epochs: int = 4
    cycle_epochs: int = 4
    opening: Sequence[int] = (76, 60)
    between: int = 14
    drifted: Sequence[int] = (52, 40)
    closing: int = 18
    after_rollback: int = 6
    background: int = 12
    background_per_s: float = 0.06
    shown: int = 80
    concurrency: int = 32
    max_tokens: int = 40

    def quick(self) -> Plan:
        """A quarter of the episodes: every stage runs, the gate abstains for lack of evidence."""
        return Plan(opening=(24,), between=6, drifted=(20,), closing=8, after_rollback=4, background=8, shown=8)


SETTINGS = """\
# Written by 'tidegate demo'. The data of the run lies beside this file.
data_dir = {data_dir}
policy = {policy}

[server]
port = 0
admin_port = 0

[split] # a tenth of the default's traffic must fill the sealed set, so more users go there
train = 0.42
dev = 0.12
sealed = 0.46

[cycle]
max_dev_tasks = 10

[curation]
min_fresh = 8
max_examples = 24

[training]
epochs = {epochs}
batch_size = 8
seed = {seed}
"""


def is_asked(task: Task) -> bool:
    """Whether a user of the demonstration would ask it: one of the new kind names an animal that they know."""
    words = content_text(task.messages[-1].get("content")).rstrip("?").split()
    return task.kind != NEW_KIND or words[-1] in ANIMALS or words[-1].removesuffix("s") in ANIMALS


def settings_text(run_dir: Path, *, seed: int, epochs: int) -> str:
    """The run's settings file."""
    return SETTINGS.format(
        data_dir=_quoted(run_dir / "data"), policy=_quoted(run_dir / "gate.toml"), epochs=epochs, seed=seed
    )


def _quoted(path: Path) -> str:
    text = str(path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
