"""The optimizer loop: deterministic, guarded at every step, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tidegate.core.errors import TrainingError
from tidegate.core.types import JsonObject
from tidegate.training.checkpoint import CheckpointFile
from tidegate.training.job import TrainingJob
from tidegate.training.schedule import Step, plan_steps
from tidegate.training.updates import StepFigures, Unit, Update

Emit = Callable[[JsonObject], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """One entry a step in ``losses``, ``grad_norms`` (before clipping), ``rates`` (the optimizer's) and ``series``."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    rates: tuple[float, ...]
    series: Mapping[str, tuple[float | None, ...]]
    units_seen: int
    units_a_step: int
    tokens: int
    tokens_computed: int
    tokens_trained: int
    weight_decay: float
    resumed_at: int


@dataclass(slots=True)
class _Progress:
    """What the steps so far have made; plain JSON, as it travels in checkpoints."""

    losses: list[float] = field(default_factory=list[float])
    grad_norms: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])
    figures: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    tokens: int = 0
    tokens_computed: int = 0
    tokens_trained: int = 0

    def series(self) -> dict[str, tuple[float | None, ...]]:
        names = sorted({name for figures in self.figures for name in figures})
        return {name: tuple(figures.get(name) for figures in self.figures) for name in names}


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
        emit: told after each step: step, steps, epoch, loss, grad_norm, figures, tokens_per_s, eta_s; and a
            note where a checkpoint cannot be used or written.
        clock: seconds, for the progress only.

    Raises:
        TrainingError: a loss or a gradient norm is not finite.
    """
    settings = job.training
    units, parameters = update.units, list(tensors.values())
    together = units_a_step(units, settings.batch_size)
    steps = plan_steps(
        len(units),
        batch_size=together,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_fraction=settings.warmup_fraction,
        seed=job.seed,
    )
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=settings.weight_decay, fused=True)
    found, unusable = checkpoint.load(tensors, optimizer)
    progress = _Progress() if found is None else _Progress(**found)
    resumed_at = len(progress.losses)
    if unusable:
        emit({"note": f"{unusable}; training starts from its first step"})
    started = clock()
    tokens_before = progress.tokens
    for number, step in enumerate(steps[resumed_at:], resumed_at + 1):
        batch = [units[index] for index in step.members]
        made = _gradients(update, batch, number, len(steps))
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        _require_finite(number, len(steps), made.loss, norm)
        progress.rates.append(_step(optimizer, step))
        progress.losses.append(made.loss)
        progress.grad_norms.append(norm)
        progress.figures.append(dict(made.figures))
        progress.tokens += sum(len(sequence.token_ids) for unit in batch for sequence in unit)
        progress.tokens_computed += made.nodes
        progress.tokens_trained += sum(sequence.trained for unit in batch for sequence in unit)
        if settings.checkpoint_steps and number % settings.checkpoint_steps == 0 and number < len(steps):
            try:
                checkpoint.save(tensors, optimizer, asdict(progress))
            except OSError as error:
                emit({"note": f"no checkpoint after step {number} ({error}); training goes on, free some space"})
        seconds = max(clock() - started, 1e-9)
        emit(
            {
                "step": number,
                "steps": len(steps),
                "epoch": step.epoch + 1,
                "loss": made.loss,
                "grad_norm": norm,
                "figures": dict(made.figures),
                "tokens_per_s": (progress.tokens - tokens_before) / seconds,
                "eta_s": seconds / (number - resumed_at) * (len(steps) - number),
            }
        )
    group: dict[str, Any] = optimizer.param_groups[0]
    return LoopResult(
        losses=tuple(progress.losses),
        grad_norms=tuple(progress.grad_norms),
        rates=tuple(progress.rates),
        series=progress.series(),
        units_seen=sum(len(step.members) for step in steps),
        units_a_step=max(len(step.members) for step in steps),
        tokens=progress.tokens,
        tokens_computed=progress.tokens_computed,
        tokens_trained=progress.tokens_trained,
        weight_decay=float(group["weight_decay"]),
        resumed_at=resumed_at,
    )


def units_a_step(units: Sequence[Unit], batch_size: int) -> int:
    """How many units make about ``batch_size`` sequences; at least one."""
    return max(1, batch_size * len(units) // sum(map(len, units)))


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


def _require_finite(number: int, steps: int, loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(
            f"step {number} of {steps} gave loss {loss!r} and gradient norm {norm!r}; nothing was written. "
            "Lower training.learning_rate, or look for odd weights in the batch"
        )
