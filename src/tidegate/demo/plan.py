"""The script of the demonstration: who comes when, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CALCULATOR_KINDS = ("chain_sum", "products", "basic_arithmetic")
NEW_KIND = "leg_counting"
"""Appears later, so that the traffic drifts; the first release solves none of it."""


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
    opening: Sequence[int] = (80, 64)
    between: int = 14
    drifted: Sequence[int] = (64, 48)
    closing: int = 24
    after_rollback: int = 6
    background: int = 12
    background_per_s: float = 0.06
    shown: int = 80
    concurrency: int = 32
    max_tokens: int = 40

    def quick(self) -> Plan:
        """A tenth of the traffic: every stage runs, the gate abstains for lack of evidence."""
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
max_dev_tasks = 12

[curation]
min_fresh = 12
max_examples = 24

[training]
epochs = {epochs}
batch_size = 8
seed = {seed}
"""


def settings_text(run_dir: Path, *, seed: int, epochs: int) -> str:
    """The run's settings file."""
    return SETTINGS.format(
        data_dir=_quoted(run_dir / "data"), policy=_quoted(run_dir / "gate.toml"), epochs=epochs, seed=seed
    )


def _quoted(path: Path) -> str:
    text = str(path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
