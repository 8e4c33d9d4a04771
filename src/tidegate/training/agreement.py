"""What the trainer computes with the weights that it just made, for texts that the serving engine can be asked for too.

Nothing is generated and nothing of the batch is used: the texts are those of :mod:`tidegate.core.agreement`. The
same weights on the same machine give the same numbers, so that the same run still gives the same adapter hash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch

from tidegate.config.training import TrainingSettings
from tidegate.core.agreement import AGREEMENT_TEXTS, MAX_SCORED, AgreementRecord, ScoredSequence, rounded
from tidegate.core.chat import encode_prompt
from tidegate.core.errors import RequestError, TrainingError
from tidegate.training.examples import TrainingTokenizer
from tidegate.training.forward import Forward
from tidegate.training.model import LoraModel
from tidegate.training.packing import TrainingSequence


def agreement_record(trained: LoraModel, forward: Forward, settings: TrainingSettings) -> AgreementRecord | None:
    """Score the texts with the trained weights and with the base model.

    Args:
        trained: the weights as they are written.
        forward: computes as the training steps did, packed rows included.
        settings: of the run.

    Returns:
        The record; None where no text fits: its tokenizer has no chat template that takes them, or all are too long.

    Raises:
        TrainingError: the weights compute numbers that are none.
    """
    sequences = agreement_sequences(trained, max_length=settings.max_length)
    if not sequences:
        return None
    found = sequence_logprobs(forward, sequences, max_nodes=settings.max_tokens_at_once)
    with trained.model.disable_adapter():
        base = sequence_logprobs(forward, sequences, max_nodes=settings.max_tokens_at_once)
    if not all(map(math.isfinite, chain.from_iterable((*found.values(), *base.values())))):
        raise TrainingError(
            "the trained weights give log-probabilities that are not finite for plain texts; nothing was written. "
            "Lower training.learning_rate"
        )
    scored = [
        ScoredSequence(
            token_ids=sequence.token_ids,
            first=len(sequence.token_ids) - sequence.trained,
            logprobs=rounded(found[sequence]),
            base_logprobs=rounded(base[sequence]),
        )
        for sequence in sequences
    ]
    return AgreementRecord(dtype=dtype_of(trained), sequences=tuple(scored))


def dtype_of(trained: LoraModel) -> str:
    """Name of the base weights' type."""
    return str(trained.base.dtype).removeprefix("torch.")


def agreement_sequences(trained: LoraModel, *, max_length: int) -> list[TrainingSequence]:
    """The texts as this model's tokens, those that it takes and that are not too long."""
    config = trained.base.config.get_text_config(decoder=True)
    longest = min(max_length, getattr(config, "max_position_embeddings", max_length))
    found: list[TrainingSequence] = []
    for number, (messages, answer) in enumerate(AGREEMENT_TEXTS):
        tokenizer: TrainingTokenizer = trained.tokenizer
        try:
            prompt = encode_prompt(tokenizer, messages, ())
        except RequestError:  # templates without system turns, tokenizers without a template
            continue
        completion = tuple(tokenizer.encode(answer, add_special_tokens=False))[:MAX_SCORED]
        if prompt and completion and len(prompt) + len(completion) <= longest:
            found.append(scored_sequence(f"agreement {number}", (*prompt, *completion), first=len(prompt)))
    return found


def scored_sequence(name: str, token_ids: Sequence[int], *, first: int) -> TrainingSequence:
    """A sequence (T,) whose tokens from index ``first`` on, in [1, T), are to be scored."""
    mask = (*(0 for _ in range(first)), *(1 for _ in range(len(token_ids) - first)))
    return TrainingSequence(example_id=name, token_ids=tuple(token_ids), loss_mask=mask, weight=1.0)


def sequence_logprobs(
    forward: Forward, sequences: Sequence[TrainingSequence], *, max_nodes: int, temperature: float = 1.0
) -> dict[TrainingSequence, tuple[float, ...]]:
    """Log-probabilities in nats of each sequence's trained tokens, in order.

    Args:
        forward: computes.
        sequences: at least one trained token each.
        max_nodes: tokens computed at once, >= 1.
        temperature: > 0, of the distribution that is asked for.
    """
    found: dict[TrainingSequence, tuple[float, ...]] = {}
    with torch.no_grad():
        for row in forward.parts(sequences, max_nodes=max_nodes):
            values: list[float] = forward.logprobs(row, forward.logits(row) / temperature).tolist()
            for sequence, made in zip(row.sequences, row.occurrences, strict=True):
                found[sequence] = tuple(values[place] for place in made)
    return found
