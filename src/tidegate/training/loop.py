"""The optimizer loop: deterministic, guarded at every step, measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tidegate.core.errors import TrainingError
from tidegate.training.checkpoint import CheckpointFile
from tidegate.training.job import TrainingJob
from tidegate.training.record import Emit, LoopResult, RunRecord
from tidegate.training.schedule import Step, plan_run
from tidegate.training.updates import StepFigures, Unit, Update


def run_loop(
    job: TrainingJob,
    update: Update,
    tensors: Mapping[str, torch.nn.Parameter],
    checkpoint: CheckpointFile,
    *,
    emit: Emit,
    clock: Callable[[], float],
) -> LoopResult:
    """Train ``tensors``.

    Args:
        job: hyperparameters and seed.
        update: gives the units and the gradients.
        tensors: the LoRA matrices by name; the optimizer's state starts fresh.
        checkpoint: where the state is kept and found again.
        emit: told after each step, see :class:`tidegate.training.record.RunRecord`.
        clock: seconds, for the progress only.

    Raises:
        TrainingError: a loss or a gradient norm is not finite.
    """
    settings = job.training
    units, parameters = update.units, list(tensors.values())
    steps = plan_run(units, settings, seed=job.seed)
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=settings.weight_decay, fused=True)
    record = RunRecord(
        steps, tensors, optimizer, checkpoint, checkpoint_steps=settings.checkpoint_steps, emit=emit, clock=clock
    )
    for number, step in enumerate(record.remaining, record.resumed_at + 1):
        batch = [units[index] for index in step.members]
        made = _gradients(update, batch, number, len(steps))
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        record.require_finite(made.loss, norm)
        record.add(batch, made, norm=norm, rate=_step(optimizer, step))
    return record.result()


def _step(optimizer: torch.optim.Optimizer, step: Step) -> float:
    for group in optimizer.param_groups:
        group["lr"] = step.learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(optimizer.param_groups[0]["lr"])


def _gradients(update: Update, batch: Sequence[Unit], number: int, steps: int) -> StepFigures:
    try:
        return update.gradients(batch)
    except ValueError as error:  # objectives refuse what they cannot compute with
        raise TrainingError(
            f"step {number} of {steps}: {error}; nothing was written. Lower training.learning_rate, or look for odd "
            "values in the batch"
        ) from error
