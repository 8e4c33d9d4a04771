"""What a backend gets to train and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.core.types import Example
from tidegate.training.forward import Forward
from tidegate.training.job import TrainingJob
from tidegate.training.memory import MemoryBound
from tidegate.training.model import LoraModel
from tidegate.training.packing import TrainingSequence
from tidegate.training.record import Emit, LoopResult
from tidegate.training.updates import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run before its first step.

    ``trained`` holds the weights of the start, ``sequences`` (at least one) what ``examples`` were rendered to and
    fits; ``scratch`` is the job's own folder, the only one that may be written to beside the checkpoints.
    """

    job: TrainingJob
    trained: LoraModel
    examples: Sequence[Example]
    sequences: Sequence[TrainingSequence]
    scratch: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A run after its last step.

    ``units`` is what belonged in a step together, ``left_out`` counts sequences that gave no signal by reason,
    ``effective`` holds the hyperparameters of objective and backend as they took effect, by name. ``forward``
    computes as the steps did.
    """

    result: LoopResult
    units: Sequence[Unit]
    left_out: Mapping[str, int]
    effective: Mapping[str, object]
    bound: MemoryBound | None
    forward: Forward


def state_plan(job: TrainingJob, units: Sequence[Unit], bound: MemoryBound | None, emit: Emit) -> None:
    """Say what the run will take before its first step."""
    tokens = sum(len(sequence.token_ids) for unit in units for sequence in unit)
    emit(
        {
            "plan": {
                "sequences": sum(map(len, units)),
                "tokens": job.training.epochs * tokens,
                "memory_bound_bytes": None if bound is None else bound.total,
            }
        }
    )
