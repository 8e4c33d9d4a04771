"""Preference objectives: right answers against wrong ones, each compared with what the start thought of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tidegate.config.training import TrainingSettings
from tidegate.core.errors import TrainingError
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
        self,
        forward: Forward,
        units: Sequence[Unit],
        right: frozenset[TrainingSequence],
        settings: TrainingSettings,
        effective: Mapping[str, object],
    ) -> None:
        """Use :meth:`of_pairs` or :meth:`of_thumbs`."""
        self.units: Sequence[Unit] = units
        self._forward = forward
        self._right = right
        self._settings = settings
        self._nodes = 0
        members = [sequence for unit in units for sequence in unit]
        self._wrong = len(members) - len(right)
        self._foreign: dict[TrainingSequence, TrainingSequence] = {}
        if settings.objective == "kto":
            self._foreign = _foreign_answers(members, max_length=settings.max_length)
        self._start = self._sums(members)
        self._foreign_start = self._sums(list(self._foreign.values()))
        self.effective: dict[str, object] = {
            "objective": settings.objective,
            "preference_beta": settings.preference_beta,
            "right": len(right),
            "wrong": self._wrong,
            **effective,
        }
        if settings.objective == "kto":
            self.effective["without_foreign_answer"] = sum(sequence not in self._foreign for sequence in members)

    @classmethod
    def of_pairs(
        cls,
        forward: Forward,
        pairs: Sequence[tuple[TrainingSequence, TrainingSequence]],
        settings: TrainingSettings,
    ) -> PreferenceUpdate:
        """``dpo`` on pairs (better, worse)."""
        return cls(forward, list(pairs), frozenset(better for better, _ in pairs), settings, {})

    @classmethod
    def of_thumbs(
        cls,
        forward: Forward,
        right: Sequence[TrainingSequence],
        wrong: Sequence[TrainingSequence],
        settings: TrainingSettings,
        *,
        success_threshold: float,
    ) -> PreferenceUpdate:
        """``kto`` on answers of both sorts; ``success_threshold`` told them apart.

        Raises:
            TrainingError: no answer to another prompt is there to set the bar.
        """
        units = [(sequence,) for sequence in (*right, *wrong)]
        return cls(forward, units, frozenset(right), settings, {"success_threshold": success_threshold})

    def gradients(self, batch: Sequence[Unit]) -> StepFigures:
        """Sums, factors, then gradients row by row."""
        computed_before = self._nodes
        members = [sequence for unit in batch for sequence in unit]
        found = self._sums(members)
        now = torch.stack([found[sequence] for sequence in members]).requires_grad_()
        before = torch.stack([self._start[sequence] for sequence in members])
        loss, margins = self._loss(now, before, members)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        assert now.grad is not None  # noqa: S101 - the loss depends on every sum
        factors = dict(zip(members, now.grad, strict=True))
        entropy = Mean()
        for row in self._forward.parts(members, max_nodes=self._settings.max_tokens_at_once):
            logits = self._forward.logits(row)
            measure_entropy(logits, entropy)
            logprobs_K = self._forward.logprobs(row, logits)  # noqa: N806
            sums = [logprobs_K[torch.tensor(made)].sum() for made in row.occurrences]
            part = torch.stack([factors[sequence] * total for sequence, total in zip(row.sequences, sums, strict=True)])
            part.sum().backward()  # pyright: ignore[reportUnknownMemberType]
            self._nodes += len(row.token_ids)
        figures = {
            "entropy": entropy.value,
            "margin": float(margins.mean()),
            "accuracy": float((margins > 0).double().mean()),
            "length": mean_length(members),
        }
        return StepFigures(loss=float(loss.detach()), nodes=self._nodes - computed_before, figures=figures)

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
        """How far the model has moved on answers that belong to other prompts; 0 where a batch has none that fits."""
        foreign = [self._foreign[sequence] for sequence in members if sequence in self._foreign]
        if not foreign:
            return 0.0
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
                self._nodes += len(row.token_ids)
                for sequence, made in zip(row.sequences, row.occurrences, strict=True):
                    found[sequence] = logprobs_K[torch.tensor(made)].sum()
        return found


def _foreign_answers(
    sequences: Sequence[TrainingSequence], *, max_length: int
) -> dict[TrainingSequence, TrainingSequence]:
    """Each sequence's prompt with the next answer to another prompt that fits; those that none fits are left out.

    Raises:
        TrainingError: there is no other prompt, or nothing fits anywhere.
    """
    prompts = [_prompt(sequence) for sequence in sequences]
    if len(set(prompts)) == 1:
        raise TrainingError(
            f"all {len(sequences)} answers belong to one prompt: 'kto' compares with answers to other prompts. Train "
            "on more prompts, or with training.objective = 'dpo'"
        )
    found: dict[TrainingSequence, TrainingSequence] = {}
    for index, own in enumerate(sequences):
        others = (*range(index + 1, len(sequences)), *range(index))
        rows = (_answered_by(own, sequences[other]) for other in others if prompts[other] != prompts[index])
        fitting = next((row for row in rows if len(row.token_ids) <= max_length), None)
        if fitting is not None:
            found[own] = fitting
    if not found:
        raise TrainingError(
            f"no answer fits behind another prompt within training.max_length = {max_length}: 'kto' has nothing to "
            "compare with; raise training.max_length"
        )
    return found


def _prompt(sequence: TrainingSequence) -> tuple[int, ...]:
    """The tokens before the first trained one."""
    return sequence.token_ids[: sequence.loss_mask.index(1)]


def _answered_by(own: TrainingSequence, other: TrainingSequence) -> TrainingSequence:
    """One sequence's prompt with another's answer."""
    prompt, start = own.loss_mask.index(1), other.loss_mask.index(1)
    return TrainingSequence(
        example_id=f"{own.example_id} answered by {other.example_id}",
        token_ids=(*own.token_ids[:prompt], *other.token_ids[start:]),
        loss_mask=(*own.loss_mask[:prompt], *other.loss_mask[start:]),
        weight=1.0,
    )
