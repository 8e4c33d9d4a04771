"""Policy-gradient objectives over packed rows: what was rewarded becomes more likely, what was not less."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tidegate.config.training import TrainingSettings
from tidegate.core.objectives.off_policy import effective_sample_size, truncated_importance
from tidegate.core.objectives.policy import PolicyLoss, cispo, grpo, gspo, reinforce
from tidegate.core.objectives.rows import Aggregation
from tidegate.training.forward import Forward
from tidegate.training.packing import Pack, TrainingSequence
from tidegate.training.updates import Mean, StepFigures, Unit, mean_length, measure_entropy

_CLIPPED: Mapping[str, Callable[..., PolicyLoss]] = {"grpo": grpo, "gspo": gspo, "cispo": cispo}


class PolicyUpdate:
    """``grpo``, ``reinforce``, ``gspo`` or ``cispo`` on answers whose advantages are known.

    The policy that the update starts from is the old one of the ratio and the reference of the KL; its
    log-probabilities are computed once, before the first step, or in it when there is no other. Where serving recorded
    those of the policy that sampled, truncated importance weights make up for the difference. An example's own weight
    multiplies the losses of its tokens, divergence included.
    """

    def __init__(
        self,
        forward: Forward,
        sequences: Sequence[TrainingSequence],
        *,
        advantages: Mapping[str, float],
        rewards: Mapping[str, float],
        groups: Mapping[str, str],
        settings: TrainingSettings,
    ) -> None:
        """Train on ``sequences``; ``advantages``, ``rewards`` and ``groups`` are by example id."""
        together: defaultdict[str, list[TrainingSequence]] = defaultdict(list)
        for sequence in sequences:
            together[groups.get(sequence.example_id, f"example:{sequence.example_id}")].append(sequence)
        self.units: Sequence[Unit] = [
            tuple(members[start : start + settings.batch_size])
            for _, members in sorted(together.items())
            for start in range(0, len(members), settings.batch_size)
        ]
        self._forward = forward
        self._settings = settings
        self._advantages = advantages
        self._rewards = rewards
        only_step = settings.epochs == 1 and sum(map(len, self.units)) <= settings.batch_size
        self._start = {} if only_step else self._logprobs_at_start(sequences)
        recorded = sum(bool(sequence.logprobs) for sequence in sequences)
        self._clip = _clip(settings)
        self.effective: Mapping[str, object] = {
            "objective": settings.objective,
            "baseline": settings.baseline,
            "reward_scale": settings.reward_scale if settings.baseline == "group" else None,
            "aggregate": settings.aggregate,
            "max_completion": settings.max_completion if settings.aggregate == "dr_grpo" else None,
            "clip_low": self._clip.get("eps_low"),
            "clip_high": self._clip.get("eps_high"),
            "kl_coefficient": settings.kl_coefficient,
            "importance_cap": settings.importance_cap,
            "sequences_with_recorded_logprobs": recorded,
            "units": len(self.units),
        }

    def gradients(self, batch: Sequence[Unit]) -> StepFigures:
        """Add up the batch's gradients part by part."""
        members = [sequence for unit in batch for sequence in unit]
        aggregation = Aggregation(
            how=self._settings.aggregate,
            tokens=sum(sequence.trained for sequence in members),
            sequences=len(members),
            max_length=self._settings.max_completion,
        )
        parts: list[PolicyLoss] = []
        importance: list[torch.Tensor] = []
        loss, nodes = 0.0, 0
        entropy = Mean()
        for row in self._forward.parts(members, max_nodes=self._settings.max_tokens_at_once):
            logits = self._forward.logits(row)
            measure_entropy(logits, entropy)
            logprobs = self._forward.logprobs(row, logits)
            if not self._start.keys() >= set(row.sequences):
                self._start |= _by_sequence(row, logprobs.detach())
            of_row = [
                self._importance(sequence, logprobs.detach()[torch.tensor(made)].clamp(max=0.0))
                for sequence, made in zip(row.sequences, row.occurrences, strict=True)
            ]
            part = self._loss(row, logprobs, of_row, aggregation)
            part.loss.backward()  # pyright: ignore[reportUnknownMemberType]
            loss += float(part.loss.detach())
            nodes += len(row.token_ids)
            parts.append(part)
            importance.extend(of_row)
        return StepFigures(loss=loss, nodes=nodes, figures=self._figures(parts, members, importance, entropy))

    def _loss(
        self,
        row: Pack,
        logprobs_K: torch.Tensor,  # noqa: N803
        importance: Sequence[torch.Tensor],
        aggregation: Aggregation,
    ) -> PolicyLoss:
        settings = self._settings
        places_B_T = _padded([torch.tensor(made) for made in row.occurrences], 0)  # noqa: N806
        lengths = torch.tensor([len(made) for made in row.occurrences])
        mask_B_T = torch.arange(places_B_T.shape[1])[None, :] < lengths[:, None]  # noqa: N806
        old_B_T = _padded([self._start[sequence] for sequence in row.sequences], 0.0)  # noqa: N806
        inputs: dict[str, Any] = {
            "logprobs_B_T": logprobs_K[places_B_T],
            "old_B_T": old_B_T,
            "mask_B_T": mask_B_T,
            "advantages": torch.tensor([self._advantages[sequence.example_id] for sequence in row.sequences]),
            "aggregation": aggregation,
            "importance_B_T": _padded(
                [sequence.weight * own for sequence, own in zip(row.sequences, importance, strict=True)], 1.0
            ),
            "beta": settings.kl_coefficient,
            "reference_B_T": old_B_T,
        }
        if settings.objective == "reinforce":
            return reinforce(**inputs)
        return _CLIPPED[settings.objective](**inputs, **self._clip)

    def _importance(self, sequence: TrainingSequence, now: torch.Tensor) -> torch.Tensor:
        """Weights of a sequence's trained tokens; where nothing is known of who sampled them, the start did.

        The other objectives have a ratio of their own from the start to ``now``; ``reinforce`` has none.
        """
        start = self._start[sequence]
        if self._settings.importance_cap == 0:
            return torch.ones_like(start)
        sampled = start
        if sequence.logprobs:
            recorded = zip(sequence.logprobs, sequence.loss_mask, strict=True)
            sampled = torch.tensor([value for value, trained in recorded if trained])
        learning = now if self._settings.objective == "reinforce" else start
        return truncated_importance(learning, sampled, cap=self._settings.importance_cap)

    def _logprobs_at_start(self, sequences: Sequence[TrainingSequence]) -> dict[TrainingSequence, torch.Tensor]:
        found: dict[TrainingSequence, torch.Tensor] = {}
        with torch.no_grad():
            for row in self._forward.parts(sequences, max_nodes=self._settings.max_tokens_at_once):
                found |= _by_sequence(row, self._forward.logprobs(row, self._forward.logits(row)))
        return found

    def _figures(
        self,
        parts: Sequence[PolicyLoss],
        members: Sequence[TrainingSequence],
        importance: Sequence[torch.Tensor],
        entropy: Mean,
    ) -> dict[str, float]:
        tokens = sum(part.tokens for part in parts)
        weights = torch.cat(list(importance)).double()
        return {
            "entropy": entropy.value,
            "kl": sum(part.reference_kl_sum or 0.0 for part in parts) / tokens,
            "clip_fraction": sum(part.clipped_tokens for part in parts) / tokens,
            "ratio": sum(part.ratio_sum for part in parts) / tokens,
            "effective_sample_size": float(effective_sample_size(weights)) / tokens if bool(weights.any()) else 0.0,
            "reward": sum(self._rewards[sequence.example_id] for sequence in members) / len(members),
            "length": mean_length(members),
        }


def _clip(settings: TrainingSettings) -> dict[str, float]:
    """The bounds of the ratio: as configured, else the objective's own; none where it has none."""
    if settings.objective not in _CLIPPED:
        return {}
    own = inspect.signature(_CLIPPED[settings.objective]).parameters
    asked = {"eps_low": settings.clip_low, "eps_high": settings.clip_high}
    return {name: float(own[name].default) if bound is None else bound for name, bound in asked.items()}


def _by_sequence(row: Pack, logprobs_K: torch.Tensor) -> dict[TrainingSequence, torch.Tensor]:  # noqa: N803
    """Each sequence's share of what was computed for its row."""
    return {
        sequence: logprobs_K[torch.tensor(made)].clamp(max=0.0)
        for sequence, made in zip(row.sequences, row.occurrences, strict=True)
    }


def _padded(rows: Sequence[torch.Tensor], value: float) -> torch.Tensor:
    """Rows of unequal length as one (B, T) tensor."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)
