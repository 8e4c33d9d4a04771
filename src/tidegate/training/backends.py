"""Who computes the updates of a run: the trainer's own step, or TRL. No torch here: each is imported when it trains.

Everything around the updates is the same for both: the token sequences, the weights that training starts from, the
guards, the report and the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from tidegate.config.training import TrainingSettings
from tidegate.core.errors import ConfigError
from tidegate.training.examples import read_examples
from tidegate.training.job import TrainingJob

if TYPE_CHECKING:
    from tidegate.training.fitting import Fitted, PreparedRun
    from tidegate.training.record import Emit

_TRL = "1.16."
"""Start of the version of TRL that the backend is written against: other ones prepare batches otherwise."""

_EQUAL = 1e-6
"""Largest relative difference of weights that count as equal: curation rounds them to nine decimals."""


class Backend(Protocol):
    """Computes the updates of a run."""

    @property
    def packages(self) -> Sequence[str]:
        """Packages whose versions decide what comes out, beside torch, transformers and PEFT."""
        ...

    def require_installed(self) -> None:
        """Check that it can run here.

        Raises:
            ConfigError: a package is missing or of another version.
        """
        ...

    def require_batch(self, job: TrainingJob) -> None:
        """Check that it can train what the job's examples ask for.

        Raises:
            ConfigError: it can't.
            TrainingError: the examples cannot be read.
        """
        ...

    def fit(self, run: PreparedRun, *, emit: Emit, clock: Callable[[], float]) -> Fitted:
        """Train the run's LoRA matrices in place, and nothing else.

        Args:
            run: what to train.
            emit: told a plan before the first step, then what :class:`tidegate.training.record.RunRecord` says.
            clock: seconds, for the progress only.

        Raises:
            TrainingError: nothing would change the weights, it takes too much memory, or a number is not finite.
        """
        ...


class OwnBackend:
    """The trainer's own step."""

    packages: Sequence[str] = ()

    def require_installed(self) -> None:
        """It needs what the trainer needs."""

    def require_batch(self, job: TrainingJob) -> None:
        """It takes any batch."""

    def fit(self, run: PreparedRun, *, emit: Emit, clock: Callable[[], float]) -> Fitted:
        """See :meth:`Backend.fit`."""
        from tidegate.training.own_step import fit  # noqa: PLC0415

        return fit(run, emit=emit, clock=clock)


class TrlBackend:
    """TRL's trainers for ``sft`` and ``dpo``; what else they lack is refused by the settings."""

    packages: Sequence[str] = ("trl", "accelerate", "datasets")

    def require_installed(self) -> None:
        """See :meth:`Backend.require_installed`."""
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"training.backend = 'trl' needs the package {missing[0]!r}, which is not installed; "
                "pip install 'tidegate[trl]', or set training.backend = 'own'"
            )
        try:
            found = version("trl")
        except PackageNotFoundError:
            found = "unknown"
        if not found.startswith(_TRL):
            raise ConfigError(
                f"training.backend = 'trl' with trl {found} installed; it needs trl {_TRL}x: pip install "
                "'tidegate[trl]', or set training.backend = 'own'"
            )

    def require_batch(self, job: TrainingJob) -> None:
        """Refuse examples of unequal weight."""
        weights = {example.weight: example.id for example in read_examples(job.examples)}
        if not weights:
            return
        lightest, heaviest = min(weights), max(weights)
        if not math.isclose(lightest, heaviest, rel_tol=_EQUAL):
            raise ConfigError(
                f"training.backend = 'trl' with a batch of unequal weights ({lightest:g} of {weights[lightest]!r} to "
                f"{heaviest:g} of {weights[heaviest]!r}): TRL's trainers weigh every example alike; set "
                "training.backend = 'own', or train on examples of one kind and strategy"
            )

    def fit(self, run: PreparedRun, *, emit: Emit, clock: Callable[[], float]) -> Fitted:
        """See :meth:`Backend.fit`."""
        from tidegate.training.trl_step import fit  # noqa: PLC0415

        return fit(run, emit=emit, clock=clock)


_BACKENDS: Mapping[str, Backend] = {"own": OwnBackend(), "trl": TrlBackend()}


def backend_of(settings: TrainingSettings) -> Backend:
    """The backend that ``training.backend`` names."""
    return _BACKENDS[settings.backend]
