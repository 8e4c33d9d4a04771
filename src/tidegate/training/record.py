"""What the steps of a run have made so far: taken down, kept on disk, told to whoever listens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from tidegate.core.errors import TrainingError
from tidegate.core.types import JsonObject
from tidegate.training.checkpoint import CheckpointFile
from tidegate.training.schedule import Step
from tidegate.training.updates import StepFigures, Unit

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


class RunRecord:
    """The record of one run, which goes on from its checkpoint where there is one."""

    def __init__(
        self,
        steps: Sequence[Step],
        tensors: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        checkpoint: CheckpointFile,
        *,
        checkpoint_steps: int,
        emit: Emit,
        clock: Callable[[], float],
    ) -> None:
        """Put the state on disk, if any, into ``tensors`` and ``optimizer``.

        Args:
            steps: of the whole run.
            tensors: what is trained, by name.
            optimizer: of these tensors, without a state yet.
            checkpoint: where the state is kept and found again.
            checkpoint_steps: steps between two writes of the state; 0 writes none.
            emit: told after each step: step, steps, epoch, loss, grad_norm, figures, tokens_per_s, eta_s; and a note
                where a checkpoint cannot be used or written.
            clock: seconds, for the progress only.
        """
        self._steps = steps
        self._tensors = tensors
        self._optimizer = optimizer
        self._checkpoint = checkpoint
        self._checkpoint_steps = checkpoint_steps
        self._emit = emit
        self._clock = clock
        found, unusable = checkpoint.load(tensors, optimizer)
        self._progress = _Progress() if found is None else _Progress(**found)
        if unusable:
            emit({"note": f"{unusable}; training starts from its first step"})
        self.resumed_at = len(self._progress.losses)
        """Steps that an earlier process has done."""
        self._started = clock()
        self._tokens_before = self._progress.tokens

    @property
    def remaining(self) -> Sequence[Step]:
        """The steps that are still to do."""
        return self._steps[len(self._progress.losses) :]

    def require_finite(self, loss: float, norm: float) -> None:
        """Refuse to go on from the next step's numbers.

        Raises:
            TrainingError: loss or gradient norm is not finite.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {len(self._progress.losses) + 1} of {len(self._steps)} gave loss {loss!r} and gradient norm "
                f"{norm!r}; nothing was written. Lower training.learning_rate, or look for odd weights in the batch"
            )

    def add(self, batch: Sequence[Unit], made: StepFigures, *, norm: float, rate: float) -> None:
        """Take down the next step, after the optimizer's.

        Args:
            batch: what it trained.
            made: loss, computed tokens and figures.
            norm: of its gradients, before clipping.
            rate: the optimizer's learning rate in it.
        """
        progress = self._progress
        step = self._steps[len(progress.losses)]
        progress.rates.append(rate)
        progress.losses.append(made.loss)
        progress.grad_norms.append(norm)
        progress.figures.append(dict(made.figures))
        progress.tokens += sum(len(sequence.token_ids) for unit in batch for sequence in unit)
        progress.tokens_computed += made.nodes
        progress.tokens_trained += sum(sequence.trained for unit in batch for sequence in unit)
        number, steps = len(progress.losses), len(self._steps)
        if self._checkpoint_steps and number % self._checkpoint_steps == 0 and number < steps:
            try:
                self._checkpoint.save(self._tensors, self._optimizer, asdict(progress))
            except OSError as error:
                self._emit({"note": f"no checkpoint after step {number} ({error}); training goes on, free some space"})
        seconds = max(self._clock() - self._started, 1e-9)
        self._emit(
            {
                "step": number,
                "steps": steps,
                "epoch": step.epoch + 1,
                "loss": made.loss,
                "grad_norm": norm,
                "figures": dict(made.figures),
                "tokens_per_s": (progress.tokens - self._tokens_before) / seconds,
                "eta_s": seconds / (number - self.resumed_at) * (steps - number),
            }
        )

    def result(self) -> LoopResult:
        """The whole run, once no step remains."""
        progress = self._progress
        return LoopResult(
            losses=tuple(progress.losses),
            grad_norms=tuple(progress.grad_norms),
            rates=tuple(progress.rates),
            series=progress.series(),
            units_seen=sum(len(step.members) for step in self._steps[: len(progress.losses)]),
            units_a_step=max(len(step.members) for step in self._steps),
            tokens=progress.tokens,
            tokens_computed=progress.tokens_computed,
            tokens_trained=progress.tokens_trained,
            weight_decay=float(self._optimizer.param_groups[0]["weight_decay"]),
            resumed_at=self.resumed_at,
        )
