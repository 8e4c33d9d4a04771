"""From a batch's rewards to the update that its objective asks for; what gives no signal is left out and counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tidegate.config.training import TrainingSettings
from tidegate.core.errors import TrainingError
from tidegate.core.objectives.advantages import group_advantages, reinforce_pp, rloo, running_mean_advantages
from tidegate.core.types import Example
from tidegate.training.forward import Forward
from tidegate.training.packing import TrainingSequence
from tidegate.training.policy_update import PolicyUpdate
from tidegate.training.preference_update import PreferenceUpdate
from tidegate.training.updates import LikelihoodUpdate, Update


def prepare_update(
    forward: Forward,
    examples: Sequence[Example],
    sequences: Sequence[TrainingSequence],
    parameters: Sequence[torch.nn.Parameter],
    settings: TrainingSettings,
    *,
    success_threshold: float,
) -> tuple[Update, dict[str, int]]:
    """The update of the configured objective.

    Args:
        forward: computes logits.
        examples: of the batch, with rewards and groups.
        sequences: what they were rendered to, at least one.
        parameters: what is trained, as it is at the start.
        settings: objective and its hyperparameters.
        success_threshold: reward from which on 'kto' takes an answer for right, in [0, 1].

    Returns:
        The update, and how many sequences were left out by reason.

    Raises:
        TrainingError: nothing is left that would change the weights.
    """
    if settings.objective == "sft":
        return LikelihoodUpdate(forward, balanced(sequences), parameters, settings), {}
    if settings.objective == "dpo":
        pairs, unpaired = preference_pairs(examples, sequences)
        return PreferenceUpdate.of_pairs(forward, pairs, settings), unpaired
    left_out: Counter[str] = Counter()
    scored = _scored(examples)
    kept = _sifted(sequences, scored, "unscored", left_out)
    if settings.objective == "kto":
        whole = _whole(kept, left_out)
        return _thumbs(forward, whole, scored, settings, success_threshold), dict(left_out)
    return _policy(forward, kept, scored, settings, left_out), dict(left_out)


def _policy(
    forward: Forward,
    sequences: Sequence[TrainingSequence],
    scored: Mapping[str, Example],
    settings: TrainingSettings,
    left_out: Counter[str],
) -> PolicyUpdate:
    present = {sequence.example_id for sequence in sequences}
    compared = example_advantages([scored[name] for name in sorted(present)], settings)
    kept = _sifted(sequences, compared, "without_comparison", left_out)
    kept = _sifted(kept, {name for name, value in compared.items() if value != 0.0}, "as_expected", left_out)
    if not kept:
        raise TrainingError(
            f"no answer is better or worse than training.baseline = {settings.baseline!r} expects "
            f"({_counted(left_out)} sequences left out): the update would change nothing. Take more answers to each "
            "prompt (rollouts.samples), or training.baseline = 'slice' for one answer a prompt"
        )
    groups = {name: example.group for name, example in scored.items() if example.group is not None}
    rewards = {name: example.reward or 0.0 for name, example in scored.items()}
    return PolicyUpdate(forward, balanced(kept), advantages=compared, rewards=rewards, groups=groups, settings=settings)


def example_advantages(examples: Sequence[Example], settings: TrainingSettings) -> dict[str, float]:
    """How much better than expected each answer was, by example id; answers without a comparison are left out.

    ``group`` and ``leave_one_out`` compare with the other answers to the same prompt, of which there must be one.
    ``slice`` compares with earlier answers to other prompts of the same kind, ``batch`` with the whole batch.
    """
    if settings.baseline in ("group", "leave_one_out"):
        sizes = Counter(example.group for example in examples)
        examples = [example for example in examples if example.group is not None and sizes[example.group] > 1]
    if not examples:
        return {}
    ordered = sorted(examples, key=lambda example: (example.sampled_at or 0.0, example.id))
    rewards = [float(example.reward or 0.0) for example in ordered]
    names = [example.id for example in ordered]
    groups = [str(example.group) for example in ordered]
    if settings.baseline == "group":
        values = group_advantages(rewards, groups, scale=settings.reward_scale)
    elif settings.baseline == "leave_one_out":
        values = rloo(rewards, groups)
    elif settings.baseline == "slice":
        kinds = [example.kind for example in ordered]
        values = running_mean_advantages(rewards, kinds, half_life=settings.slice_half_life)
    else:
        values = reinforce_pp(rewards)
    return dict(zip(names, values, strict=True))


def _thumbs(
    forward: Forward,
    sequences: Sequence[TrainingSequence],
    scored: Mapping[str, Example],
    settings: TrainingSettings,
    success_threshold: float,
) -> PreferenceUpdate:
    sequences = balanced(sequences)
    right = [sequence for sequence in sequences if _reward(scored, sequence) >= success_threshold]
    wrong = [sequence for sequence in sequences if _reward(scored, sequence) < success_threshold]
    if not right or not wrong:
        raise TrainingError(
            f"{len(right)} right and {len(wrong)} wrong answers by curation.success_threshold = {success_threshold:g}: "
            "'kto' needs both; the batch must keep failures"
        )
    return PreferenceUpdate.of_thumbs(forward, right, wrong, settings, success_threshold=success_threshold)


def preference_pairs(
    examples: Sequence[Example], sequences: Sequence[TrainingSequence]
) -> tuple[list[tuple[TrainingSequence, TrainingSequence]], dict[str, int]]:
    """The best answer to a prompt with the worst, the second best with the second worst, while their rewards differ.

    Args:
        examples: of the batch, with rewards and groups.
        sequences: what they were rendered to, at least one.

    Returns:
        Pairs (better, worse) with a mean weight of 1, and how many sequences were left out by reason.

    Raises:
        TrainingError: there is no pair.
    """
    left_out: Counter[str] = Counter()
    scored = _scored(examples)
    sequences = _whole(_sifted(sequences, scored, "unscored", left_out), left_out)
    groups: defaultdict[str, list[TrainingSequence]] = defaultdict(list)
    for sequence in sequences:
        group = scored[sequence.example_id].group
        if group is not None:
            groups[group].append(sequence)
    paired: list[TrainingSequence] = []
    for members in groups.values():
        ranked = sorted(members, key=lambda sequence: -_reward(scored, sequence))
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if _reward(scored, better) <= _reward(scored, worse):
                continue
            if better.token_ids == worse.token_ids:  # their gradients would cancel
                left_out["same_answer"] += 2
            else:
                paired += (better, worse)
    unpaired = len(sequences) - len(paired) - left_out["same_answer"]
    if unpaired:
        left_out["unpaired"] += unpaired
    if not paired:
        raise TrainingError(
            f"no prompt has two different answers of unequal reward ({_counted(left_out)} sequences left out): 'dpo' "
            "has nothing to compare. Take more answers to each prompt (rollouts.samples), or training.objective = 'kto'"
        )
    paired = balanced(paired)
    return list(zip(paired[0::2], paired[1::2], strict=True)), dict(left_out)


def _scored(examples: Sequence[Example]) -> dict[str, Example]:
    return {example.id: example for example in examples if example.reward is not None}


def _whole(sequences: Sequence[TrainingSequence], left_out: Counter[str]) -> list[TrainingSequence]:
    """Without the answers that took several sequences to render: their log-probability is in no single one."""
    parts = Counter(sequence.example_id for sequence in sequences)
    once = {name for name, count in parts.items() if count == 1}
    return _sifted(sequences, once, "in_several_sequences", left_out)


def _reward(scored: Mapping[str, Example], sequence: TrainingSequence) -> float:
    return float(scored[sequence.example_id].reward or 0.0)


def balanced(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The sequences of a run with a mean weight of 1: only how weights compare may count, not how large they are."""
    mean = sum(sequence.weight for sequence in sequences) / max(1, len(sequences))
    return [replace(sequence, weight=sequence.weight / mean) for sequence in sequences]


def _sifted(
    sequences: Sequence[TrainingSequence], wanted: Mapping[str, object] | set[str], reason: str, left_out: Counter[str]
) -> list[TrainingSequence]:
    kept = [sequence for sequence in sequences if sequence.example_id in wanted]
    if len(kept) < len(sequences):
        left_out[reason] += len(sequences) - len(kept)
    return kept


def _counted(left_out: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "0"
