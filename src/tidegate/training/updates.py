"""What one optimizer step asks of the model: the loss of a batch, its gradients, and figures that show how it goes.

An update is made for a whole run. It groups the run's sequences into units that belong in one step (a pair of
answers, the answers to one prompt), and is then asked for the gradients of one batch of units after another.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from tidegate.config.training import TrainingSettings
from tidegate.core.objectives.divergence import entropy as exact_entropy
from tidegate.core.objectives.divergence import kl as exact_kl
from tidegate.core.objectives.sft import weighted_nll
from tidegate.training.forward import Forward
from tidegate.training.packing import Pack, TrainingSequence

_ENTROPY_AT = 64
"""Predictions of a row whose entropy is measured: each costs a pass over the vocabulary."""

Unit: TypeAlias = tuple[TrainingSequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Loss of a batch, tokens that were computed, and what else was measured, by name.

    ``figures``: ``entropy`` (nats a token), ``kl`` (nats a token, to the start of training), ``clip_fraction``,
    ``ratio`` (mean), ``effective_sample_size`` (of the importance weights, as a share of the tokens), ``reward`` (mean
    of the batch), ``margin`` and ``accuracy`` (of preferences), ``length`` (trained tokens a sequence).
    """

    loss: float
    nodes: int
    figures: Mapping[str, float]


class Update(Protocol):
    """One objective over one run's sequences."""

    @property
    def units(self) -> Sequence[Unit]:
        """What belongs in one step together."""
        ...

    @property
    def effective(self) -> Mapping[str, object]:
        """Hyperparameters of the objective as they took effect, by name."""
        ...

    def gradients(self, batch: Sequence[Unit]) -> StepFigures:
        """Add the gradients of a batch's loss to the parameters."""
        ...


class Start:
    """The weights that training started from, to compare with later ones."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Keep a copy of ``parameters``."""
        self._parameters = parameters
        self._copies = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def in_force(self) -> Generator[None]:
        """The model computes with the weights of the start inside the block, without gradients.

        No graph that a backward pass still needs may have been built before the block.
        """
        self._swap()
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.data, self._copies[index] = self._copies[index], parameter.data


class LikelihoodUpdate:
    """``sft``: likelihood of the trained tokens, each token by its example's weight.

    A step is divided by its trained tokens, not by their weights: light examples move less than heavy ones also where
    they come in different steps. With a KL coefficient the divergence of the whole next-token distribution from that of
    the start, KL(now || start), is added at the same tokens with the same weights: a smaller change where nothing asks
    for one.
    """

    def __init__(
        self,
        forward: Forward,
        sequences: Sequence[TrainingSequence],
        parameters: Sequence[torch.nn.Parameter],
        settings: TrainingSettings,
    ) -> None:
        """Train ``parameters`` of the model behind ``forward`` on ``sequences``."""
        self.units: Sequence[Unit] = [(sequence,) for sequence in sequences]
        self.effective: Mapping[str, object] = {"objective": "sft", "kl_coefficient": settings.kl_coefficient}
        self._forward = forward
        self._settings = settings
        self._start = Start(parameters) if settings.kl_coefficient > 0 else None

    def gradients(self, batch: Sequence[Unit]) -> StepFigures:
        """Add up the batch's gradients part by part."""
        members = [sequence for unit in batch for sequence in unit]
        tokens = sum(sequence.trained for sequence in members)
        loss, nodes, kl = 0.0, 0, 0.0
        entropy = Mean()
        for row in self._forward.parts(members, max_nodes=self._settings.max_tokens_at_once):
            part, divergence = self._loss(row, tokens, entropy)
            part.backward()  # pyright: ignore[reportUnknownMemberType]
            loss += float(part.detach())
            kl += divergence
            nodes += len(row.token_ids)
        figures = {"entropy": entropy.value, "length": mean_length(members)}
        if self._start is not None:
            figures["kl"] = kl
        return StepFigures(loss=loss, nodes=nodes, figures=figures)

    def _loss(self, row: Pack, tokens: int, entropy: Mean) -> tuple[torch.Tensor, float]:
        """The row's share of the loss, and of the divergence in nats a token."""
        before: torch.Tensor | None = None
        if self._start is not None:
            with self._start.in_force():
                before = self._forward.logits(row)
        logits, weights = self._forward.logits(row), torch.tensor(row.weights)
        measure_entropy(logits, entropy)
        loss = weighted_nll(logits, torch.tensor(row.targets), weights, total_weight=tokens)
        if before is None:
            return loss, 0.0
        divergence = (exact_kl(logits, before) * weights).sum() / tokens
        return loss + self._settings.kl_coefficient * divergence, float(divergence.detach())


class Mean:
    """A mean that is added up in parts."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0.0

    def add(self, total: float, count: float) -> None:
        """Take in the sum of ``count`` more values."""
        self._sum += total
        self._count += count

    @property
    def value(self) -> float:
        """The mean so far; 0 of nothing."""
        return self._sum / self._count if self._count else 0.0


def measure_entropy(logits_K_V: torch.Tensor, entropy: Mean) -> None:  # noqa: N803 - shape suffixes are upper case
    """Add the entropy at some predictions, evenly spaced."""
    stride = -(-len(logits_K_V) // _ENTROPY_AT)
    with torch.no_grad():
        values = exact_entropy(logits_K_V[::stride])
    entropy.add(float(values.sum()), len(values))


def mean_length(sequences: Sequence[TrainingSequence]) -> float:
    """Trained tokens a sequence."""
    return sum(sequence.trained for sequence in sequences) / len(sequences)
