"""The optimizer loop: deterministic, guarded at every step, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidegate.core.errors import TrainingError
from tidegate.core.types import JsonObject
from tidegate.training.forward import Forward
from tidegate.training.job import TrainingJob
from tidegate.training.packing import TrainingSequence
from tidegate.training.schedule import Step, plan_steps

Emit = Callable[[JsonObject], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """One entry a step in ``losses``, ``grad_norms`` (before clipping) and ``rates`` (read from the optimizer)."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    rates: tuple[float, ...]
    sequences_seen: int
    largest_batch: int
    tokens: int
    tokens_computed: int
    tokens_trained: int
    weight_decay: float


def run_loop(
    job: TrainingJob,
    forward: Forward,
    parameters: Sequence[torch.nn.Parameter],
    sequences: Sequence[TrainingSequence],
    *,
    emit: Emit,
    clock: Callable[[], float],
) -> LoopResult:
    """Train ``parameters`` on ``sequences``.

    Args:
        job: hyperparameters and seed.
        forward: computes losses.
        parameters: the LoRA matrices; the optimizer's state starts fresh.
        sequences: at least one.
        emit: told after each step: step, steps, epoch, loss, grad_norm, tokens_per_s, eta_s.
        clock: seconds, for the progress only.

    Raises:
        TrainingError: a loss or a gradient norm is not finite.
    """
    settings = job.training
    steps = plan_steps(
        len(sequences),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_fraction=settings.warmup_fraction,
        seed=job.seed,
    )
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=settings.weight_decay, fused=True)
    losses: list[float] = []
    norms: list[float] = []
    rates: list[float] = []
    tokens = computed = trained = 0
    started = clock()
    for number, step in enumerate(steps, 1):
        batch = [sequences[index] for index in step.members]
        loss, nodes = _gradients(forward, batch, max_nodes=job.max_nodes)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        _require_finite(number, len(steps), loss, norm)
        rates.append(_update(optimizer, step))
        losses.append(loss)
        norms.append(norm)
        tokens += sum(len(sequence.token_ids) for sequence in batch)
        computed += nodes
        trained += sum(sum(sequence.loss_mask) for sequence in batch)
        seconds = max(clock() - started, 1e-9)
        emit(
            {
                "step": number,
                "steps": len(steps),
                "epoch": step.epoch + 1,
                "loss": loss,
                "grad_norm": norm,
                "tokens_per_s": tokens / seconds,
                "eta_s": seconds / number * (len(steps) - number),
            }
        )
    group: dict[str, Any] = optimizer.param_groups[0]
    return LoopResult(
        losses=tuple(losses),
        grad_norms=tuple(norms),
        rates=tuple(rates),
        sequences_seen=sum(len(step.members) for step in steps),
        largest_batch=max(len(step.members) for step in steps),
        tokens=tokens,
        tokens_computed=computed,
        tokens_trained=trained,
        weight_decay=float(group["weight_decay"]),
    )


def _gradients(forward: Forward, batch: Sequence[TrainingSequence], *, max_nodes: int) -> tuple[float, int]:
    """Add up a batch's gradients part by part; returns its loss and the number of computed tokens."""
    total = sum(sequence.weight * sum(sequence.loss_mask) for sequence in batch)
    loss, nodes = 0.0, 0
    for row in forward.parts(batch, max_nodes=max_nodes):
        part = forward.loss(row, total_weight=total)
        part.backward()  # pyright: ignore[reportUnknownMemberType]
        loss += float(part.detach())
        nodes += len(row.token_ids)
    return loss, nodes


def _update(optimizer: torch.optim.Optimizer, step: Step) -> float:
    for group in optimizer.param_groups:
        group["lr"] = step.learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(optimizer.param_groups[0]["lr"])


def _require_finite(number: int, steps: int, loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(
            f"step {number} of {steps} gave loss {loss!r} and gradient norm {norm!r}; nothing was written. "
            "Lower training.learning_rate, or look for odd weights in the batch"
        )
