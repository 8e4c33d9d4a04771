"""Preference objectives: right answers against wrong ones, each compared with what the start thought of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tidegate.config.settings import TrainingSettings
from tidegate.core.objectives.preference import dpo, kto, kto_baseline
from tidegate.training.forward import Forward
from tidegate.training.packing import TrainingSequence
from tidegate.training.updates import Mean, StepFigures, Unit, mean_length, measure_entropy


class PreferenceUpdate:
    """``dpo`` on pairs, each by the mean weight of its two examples, or ``kto`` on single answers, each by its own.

    The loss of a batch depends on sums over whole answers of several sequences at once. So each step computes these
    sums first, then how the loss changes with each of them, and then adds up the gradients row by row with these
    factors: exact for any batch, in the memory of one row (Gao et al. 2021, gradient caching).
    """

    def __init__(
        self, forward: Forward, units: Sequence[Unit], right: frozenset[TrainingSequence], settings: TrainingSettings
    ) -> None:
        """Use :meth:`of_pairs` or :meth:`of_thumbs`."""
        self.units: Sequence[Unit] = units
        self._forward = forward
        self._right = right
        self._settings = settings
        members = [sequence for unit in units for sequence in unit]
        self._wrong = len(members) - len(right)
        self._start = self._sums(members)
        self._foreign: dict[TrainingSequence, TrainingSequence] = {}
        if settings.objective == "kto":
            self._foreign = {
                own: _answered_by(own, other) for own, other in zip(members, _shifted(members), strict=True)
            }
        self._foreign_start = self._sums(list(self._foreign.values()))
        self.effective: Mapping[str, object] = {
            "objective": settings.objective,
            "preference_beta": settings.preference_beta,
            "right": len(right),
            "wrong": self._wrong,
        }

    @classmethod
    def of_pairs(
        cls,
        forward: Forward,
        pairs: Sequence[tuple[TrainingSequence, TrainingSequence]],
        settings: TrainingSettings,
    ) -> PreferenceUpdate:
        """``dpo`` on pairs (right, wrong)."""
        return cls(forward, list(pairs), frozenset(right for right, _ in pairs), settings)

    @classmethod
    def of_thumbs(
        cls,
        forward: Forward,
        right: Sequence[TrainingSequence],
        wrong: Sequence[TrainingSequence],
        settings: TrainingSettings,
    ) -> PreferenceUpdate:
        """``kto`` on answers of both sorts."""
        return cls(forward, [(sequence,) for sequence in (*right, *wrong)], frozenset(right), settings)

    def gradients(self, batch: Sequence[Unit]) -> StepFigures:
        """Sums, factors, then gradients row by row."""
        members = [sequence for unit in batch for sequence in unit]
        found = self._sums(members)
        now = torch.stack([found[sequence] for sequence in members]).requires_grad_()
        before = torch.stack([self._start[sequence] for sequence in members])
        loss, margins = self._loss(now, before, members)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        assert now.grad is not None  # noqa: S101 - the loss depends on every sum
        factors = dict(zip(members, now.grad, strict=True))
        nodes, entropy = 0, Mean()
        for row in self._forward.parts(members, max_nodes=self._settings.max_tokens_at_once):
            logits = self._forward.logits(row)
            measure_entropy(logits, entropy)
            logprobs_K = self._forward.logprobs(row, logits)  # noqa: N806
            sums = [logprobs_K[torch.tensor(made)].sum() for made in row.occurrences]
            part = torch.stack([factors[sequence] * total for sequence, total in zip(row.sequences, sums, strict=True)])
            part.sum().backward()  # pyright: ignore[reportUnknownMemberType]
            nodes += len(row.token_ids)
        figures = {
            "entropy": entropy.value,
            "margin": float(margins.mean()),
            "accuracy": float((margins > 0).double().mean()),
            "length": mean_length(members),
        }
        return StepFigures(loss=float(loss.detach()), nodes=2 * nodes, figures=figures)

    def _loss(
        self, now: torch.Tensor, before: torch.Tensor, members: Sequence[TrainingSequence]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's loss, and by how much each answer is preferred as it should be, in units of reward."""
        beta = self._settings.preference_beta
        weights = torch.tensor([sequence.weight for sequence in members])
        change = beta * (now - before).detach()
        if self._settings.objective == "dpo":
            pairs = dpo(
                now[0::2], now[1::2], before[0::2], before[1::2], total=len(members) // 2, beta=beta,
                weights_B=(weights[0::2] + weights[1::2]) / 2,
            )  # fmt: skip
            return pairs.loss, change[0::2] - change[1::2]
        right = torch.tensor([sequence in self._right for sequence in members])
        thumbs = kto(
            now, before, right, total=len(members), baseline=self._kto_baseline(members), beta=beta,
            desirable_weight=self._weight_of(len(self._right)), undesirable_weight=self._weight_of(self._wrong),
            weights_B=weights,
        )  # fmt: skip
        return thumbs.loss, change * torch.where(right, 1.0, -1.0)

    def _weight_of(self, count: int) -> float:
        """Right and wrong answers weigh the same in all, however many there are of each."""
        return (len(self._right) + self._wrong) / (2 * count)

    def _kto_baseline(self, members: Sequence[TrainingSequence]) -> float:
        """How far the model has moved on answers that belong to other prompts."""
        foreign = [self._foreign[sequence] for sequence in members]
        now, before = self._sums(foreign), self._foreign_start
        return kto_baseline(
            torch.stack([now[sequence] for sequence in foreign]),
            torch.stack([before[sequence] for sequence in foreign]),
        )

    def _sums(self, sequences: Sequence[TrainingSequence]) -> dict[TrainingSequence, torch.Tensor]:
        """Log-probability of each whole answer as the model stands, without gradient."""
        found: dict[TrainingSequence, torch.Tensor] = {}
        if not sequences:
            return found
        with torch.no_grad():
            for row in self._forward.parts(sequences, max_nodes=self._settings.max_tokens_at_once):
                logprobs_K = self._forward.logprobs(row, self._forward.logits(row))  # noqa: N806
                for sequence, made in zip(row.sequences, row.occurrences, strict=True):
                    found[sequence] = logprobs_K[torch.tensor(made)].sum()
        return found


def _shifted(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    return [*sequences[1:], sequences[0]]


def _answered_by(own: TrainingSequence, other: TrainingSequence) -> TrainingSequence:
    """One sequence's prompt with another's answer."""
    prompt, start = own.loss_mask.index(1), other.loss_mask.index(1)
    return TrainingSequence(
        example_id=f"{own.example_id} answered by {other.example_id}",
        token_ids=(*own.token_ids[:prompt], *other.token_ids[start:]),
        loss_mask=(*own.loss_mask[:prompt], *other.loss_mask[start:]),
        weight=1.0,
    )
