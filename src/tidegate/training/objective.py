"""From a batch's rewards to the update that its objective asks for; what gives no signal is left out and counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tidegate.config.settings import TrainingSettings
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
) -> tuple[Update, dict[str, int]]:
    """The update of the configured objective.

    Args:
        forward: computes logits.
        examples: of the batch, with rewards and groups.
        sequences: what they were rendered to, at least one.
        parameters: what is trained, as it is at the start.
        settings: objective and its hyperparameters.

    Returns:
        The update, and how many sequences were left out by reason.

    Raises:
        TrainingError: nothing is left that would change the weights.
    """
    if settings.objective == "sft":
        return LikelihoodUpdate(forward, _balanced(sequences), parameters, settings), {}
    left_out: Counter[str] = Counter()
    scored = {example.id: example for example in examples if example.reward is not None}
    kept = _sifted(sequences, scored, "unscored", left_out)
    if settings.objective in ("dpo", "kto"):
        return _preferences(forward, kept, scored, settings, left_out), dict(left_out)
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
    return PolicyUpdate(
        forward, _balanced(kept), advantages=compared, rewards=rewards, groups=groups, settings=settings
    )


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


def _preferences(
    forward: Forward,
    sequences: Sequence[TrainingSequence],
    scored: Mapping[str, Example],
    settings: TrainingSettings,
    left_out: Counter[str],
) -> PreferenceUpdate:
    parts = Counter(sequence.example_id for sequence in sequences)
    whole = _sifted(sequences, {name for name, count in parts.items() if count == 1}, "in_several_sequences", left_out)
    if settings.objective == "kto":
        whole = _balanced(whole)
    right = [sequence for sequence in whole if _is_right(scored[sequence.example_id])]
    wrong = [sequence for sequence in whole if not _is_right(scored[sequence.example_id])]
    if settings.objective == "kto":
        if not right or not wrong:
            raise TrainingError(
                f"{len(right)} right and {len(wrong)} wrong answers: 'kto' needs both; the batch must keep failures"
            )
        return PreferenceUpdate.of_thumbs(forward, right, wrong, settings)
    pairs = _pairs(right, wrong, scored)
    left_out["unpaired"] += len(whole) - 2 * len(pairs)
    if not pairs:
        raise TrainingError(
            f"no prompt has a right and a wrong answer ({len(right)} right, {len(wrong)} wrong): 'dpo' has nothing to "
            "compare. Take more answers to each prompt (rollouts.samples), or training.objective = 'kto'"
        )
    paired = _balanced([sequence for pair in pairs for sequence in pair])
    return PreferenceUpdate.of_pairs(forward, list(zip(paired[0::2], paired[1::2], strict=True)), settings)


def _is_right(example: Example) -> bool:
    return (example.reward or 0.0) >= 0.5


def _pairs(
    right: Sequence[TrainingSequence], wrong: Sequence[TrainingSequence], scored: Mapping[str, Example]
) -> list[tuple[TrainingSequence, TrainingSequence]]:
    """A right and a wrong answer to the same prompt, each used once."""
    losers: defaultdict[str, list[TrainingSequence]] = defaultdict(list)
    for sequence in wrong:
        losers[scored[sequence.example_id].group or ""].append(sequence)
    pairs: list[tuple[TrainingSequence, TrainingSequence]] = []
    for sequence in right:
        group = scored[sequence.example_id].group
        if group is not None and losers[group]:
            pairs.append((sequence, losers[group].pop(0)))
    return pairs


def _balanced(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
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
