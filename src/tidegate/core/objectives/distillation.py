"""On-policy distillation: the student's own samples, each token's distribution pulled towards a teacher's.

The teacher is a larger model, or the same one with a hint or a demonstration in its prompt. What is minimised is the
reverse KL at each token of the student's samples, KL(student || teacher). The prefixes are taken as given: that a token
changes which prefixes come later gives no gradient.

Sources: Agarwal et al. (2024), On-policy distillation of language models; Gu et al. (2024), MiniLLM; Lu and Thinking
Machines Lab (2025), On-policy distillation.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tidegate.core.objectives.divergence import log_softmax
from tidegate.core.objectives.policy import PolicyLoss, reinforce
from tidegate.core.objectives.rows import Aggregation, aggregate, kept, kept_logprobs, refuse, trained_tokens

_TAIL_FLOOR = 1e-6
"""Least mass of a captured teacher's tail: what the rounding of its log-probabilities leaves uncertain."""

_SUM_TOLERANCE = 1e-3
"""How far from 1 rounding may put a sum of probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationLoss:
    """A loss, and sums over the trained tokens of this part that add up to those of the batch.

    ``kl_sum`` is of the bucketed KL in nats, before any weights.
    """

    loss: torch.Tensor
    sequences: int
    tokens: int
    kl_sum: float


def opd(
    student_B_T_C: torch.Tensor,
    teacher_B_T_C: torch.Tensor,
    mask_B_T: torch.Tensor,
    *,
    aggregation: Aggregation,
    importance_B_T: torch.Tensor | None = None,
) -> DistillationLoss:
    """Reverse KL over buckets: each of the teacher's top K tokens is one, all other tokens together are the last.

    Per token ``sum_c p_c (log p_c - log q_c)``, p the student's and q the teacher's mass in bucket c. This is the exact
    KL of the two distributions over buckets; it is at most the KL over tokens, and equal to it when student and teacher
    spread their tails alike. Inside the tail the student is free. The gradient is the exact one of that number: with
    respect to the student's logit of a token in bucket c it is ``p_token (log p_c - log q_c - kl)``. Given buckets of
    one token each, the whole vocabulary, it is the exact KL over tokens.

    Args:
        student_B_T_C: the student's log-probabilities of the buckets, shape (B, T, C), from :func:`bucket_logprobs`.
        teacher_B_T_C: the teacher's, same shape, from there or from :func:`captured_buckets`; no gradient flows in.
        mask_B_T: 1 where a token is trained, shape (B, T), bool or 0/1; at least one in each row.
        aggregation: how tokens are averaged, with the counts of the whole batch.
        importance_B_T: weights >= 0 that multiply the per-token losses, without gradient.

    Raises:
        ValueError: shapes do not fit, a trained token's number is not finite, or its buckets do not sum to 1.
    """
    trained_B_T = trained_tokens(mask_B_T, student_B_T_C.shape[:2])
    student = _kept_buckets(student_B_T_C, trained_B_T, "student_B_T_C")
    teacher = _kept_buckets(teacher_B_T_C.detach(), trained_B_T, "teacher_B_T_C").to(student.dtype)
    if student.shape != teacher.shape:
        raise ValueError(
            f"shapes student {tuple(student.shape)} and teacher {tuple(teacher.shape)} do not fit; "
            "(B, T, C) twice is expected"
        )
    kl_B_T = (student.exp() * (student - teacher)).sum(dim=-1)
    losses_B_T = kl_B_T
    if importance_B_T is not None:
        weights_B_T = kept(importance_B_T.detach(), trained_B_T, "importance_B_T").to(student.dtype)
        refuse(weights_B_T, weights_B_T < 0, "importance_B_T", "weights >= 0 are accepted")
        losses_B_T = weights_B_T * kl_B_T
    return DistillationLoss(
        loss=aggregate(losses_B_T, trained_B_T, aggregation),
        sequences=len(trained_B_T),
        tokens=int(trained_B_T.sum()),
        kl_sum=float(kl_B_T.detach().double()[trained_B_T].sum()),
    )


def opd_sampled(
    logprobs_B_T: torch.Tensor,
    old_B_T: torch.Tensor,
    teacher_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    *,
    aggregation: Aggregation,
    importance_B_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """Reverse KL estimated from the sampled tokens alone: :func:`reinforce` with A = log q - log p of each token.

    The gradient of a token's loss is ``log p - log q`` times that of ``log p``: over tokens sampled from the student it
    is the gradient of KL(student || teacher) in expectation. It needs one number a token from the teacher and has the
    larger variance. The value of the loss is no divergence; ``reference_kl_sum`` of the result estimates it.

    Args:
        logprobs_B_T: log-probabilities of the sampled tokens under the student, shape (B, T).
        old_B_T: those under the policy that the update started from.
        teacher_B_T: those under the teacher; no gradient flows into it.
        mask_B_T: 1 where a token is trained.
        aggregation: how tokens are averaged, with the counts of the whole batch.
        importance_B_T: weights of tokens that another policy sampled.

    Raises:
        ValueError: as the objectives of :mod:`tidegate.core.objectives.policy`.
    """
    trained_B_T = trained_tokens(mask_B_T, logprobs_B_T.shape)
    student_B_T = kept_logprobs(logprobs_B_T.detach(), trained_B_T, "logprobs_B_T")
    advantages_B_T = kept_logprobs(teacher_B_T.detach(), trained_B_T, "teacher_B_T") - student_B_T
    return reinforce(
        logprobs_B_T,
        old_B_T,
        mask_B_T,
        advantages_B_T,
        aggregation=aggregation,
        reference_B_T=teacher_B_T,
        importance_B_T=importance_B_T,
    )


def bucket_logprobs(logits_N_V: torch.Tensor, ids_N_K: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens and, last, of all the others together.

    The tail is summed up from its own tokens and not as 1 minus the rest, which would lose a small one.

    Args:
        logits_N_V: scores before the softmax, shape (N, V), finite.
        ids_N_K: different token ids in each row, shape (N, K), int64 in [0, V), 1 <= K < V.

    Returns:
        (N, K + 1) log-probabilities that sum to 1.

    Raises:
        ValueError: shapes, types or ranges do not fit, ids repeat in a row, or a score is not finite.
    """
    logprobs_N_V = log_softmax(logits_N_V, "logits_N_V")
    rows, vocabulary = logprobs_N_V.shape
    if ids_N_K.ndim != 2 or len(ids_N_K) != rows or not 1 <= ids_N_K.shape[1] < vocabulary:
        raise ValueError(
            f"shapes {(rows, vocabulary)} and {tuple(ids_N_K.shape)} do not fit; "
            "(N, V), (N, K) with 1 <= K < V is expected"
        )
    if ids_N_K.dtype != torch.int64 or not bool(((ids_N_K >= 0) & (ids_N_K < vocabulary)).all()):
        raise ValueError(f"ids_N_K ({ids_N_K.dtype}) holds other values than int64 token ids in [0, {vocabulary})")
    if bool((ids_N_K.sort(dim=1).values.diff(dim=1) == 0).any()):
        raise ValueError("ids_N_K names a token twice in one row; different ids are expected")
    tail_N = logprobs_N_V.scatter(1, ids_N_K, -math.inf).logsumexp(dim=1)
    return torch.cat([logprobs_N_V.gather(1, ids_N_K), tail_N[:, None]], dim=1)


def captured_buckets(topk_N_K: torch.Tensor) -> torch.Tensor:
    """A teacher's captured top log-probabilities and, last, what they leave over.

    ``log(1 - sum_k q_k)``, of which rounding leaves nothing when the teacher is nearly certain: the tail's mass is
    taken to be at least 1e-6, so that a student's tail costs at most about 14 nats.

    Args:
        topk_N_K: log-probabilities of the teacher's K likeliest tokens, shape (N, K), finite, with a sum of
            probabilities up to 1; 4 of them hold nearly all the mass of most tokens.

    Returns:
        (N, K + 1), without gradient.

    Raises:
        ValueError: the shape is another one, a number is not finite, or the probabilities sum to more than 1.
    """
    if topk_N_K.ndim != 2 or topk_N_K.numel() == 0:
        raise ValueError(f"topk_N_K has the shape {tuple(topk_N_K.shape)}; (N, K) is expected")
    top_N_K = kept_logprobs(topk_N_K.detach(), torch.ones_like(topk_N_K, dtype=torch.bool), "topk_N_K")
    sum_N = top_N_K.double().logsumexp(dim=1)
    refuse(sum_N.exp(), sum_N > math.log1p(_SUM_TOLERANCE), "the sum of a row's probabilities", "up to 1 is accepted")
    tail_N = (-torch.expm1(sum_N)).clamp(min=_TAIL_FLOOR).log().to(top_N_K.dtype)
    return torch.cat([top_N_K, tail_N[:, None]], dim=1)


def _kept_buckets(values: torch.Tensor, trained_B_T: torch.Tensor, name: str) -> torch.Tensor:
    """Log-probabilities (B, T, C), those of each trained token summing to 1."""
    if values.ndim != 3:
        raise ValueError(f"{name} has the shape {tuple(values.shape)}; (B, T, C) is expected")
    found = kept_logprobs(values, trained_B_T, name)
    sums_B_T = found.detach().exp().sum(dim=-1)
    wrong_B_T = trained_B_T & ((sums_B_T - 1.0).abs() > _SUM_TOLERANCE)
    refuse(
        sums_B_T, wrong_B_T, f"the sum of a token's {name}", "buckets that sum to 1, the tail included, are accepted"
    )
    return found
