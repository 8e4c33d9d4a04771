"""The trainer's own backend: sequences as one token tree, any objective, weights by example."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.machine import available_memory_bytes
from tidegate.training.checkpoint import checkpoint_of
from tidegate.training.fitting import Fitted, PreparedRun, state_plan
from tidegate.training.forward import prepare_forward
from tidegate.training.loop import run_loop
from tidegate.training.memory import memory_bound, require_memory
from tidegate.training.objective import prepare_update
from tidegate.training.record import Emit


def fit(run: PreparedRun, *, emit: Emit, clock: Callable[[], float]) -> Fitted:
    """Train the run's LoRA matrices; see :meth:`tidegate.training.backends.Backend.fit`."""
    job, trained = run.job, run.trained
    forward = prepare_forward(trained.base, trained.model, run.sequences)
    bound = memory_bound(trained, run.sequences, job.training, packed=forward.packed)
    require_memory(bound, available_memory_bytes())
    update, left_out = prepare_update(
        forward,
        run.examples,
        run.sequences,
        list(trained.tensors.values()),
        job.training,
        success_threshold=job.success_threshold,
    )
    state_plan(job, update.units, bound, emit)
    result = run_loop(job, update, trained.tensors, checkpoint_of(job), emit=emit, clock=clock)
    return Fitted(
        result=result,
        units=update.units,
        left_out=left_out,
        effective={**update.effective, "backend": "own", "packed": forward.packed},
        bound=bound,
        forward=forward,
    )
