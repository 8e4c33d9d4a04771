"""Learning from preferences: pairs of answers to one prompt, or single answers with a thumb up or down.

Both take log-probabilities of whole answers: the sum over an answer's trained tokens, under the policy and under the
frozen reference. ``total`` is the number of pairs or answers of the whole batch, so that the losses and gradients of
its parts add up to those of the whole. ``weights_B`` multiply the losses of single pairs or answers.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader knows

from tidegate.core.objectives.rows import exact, refuse, refuse_outside


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """A loss, and sums over the pairs of this part that add up to those of the batch.

    ``correct`` counts pairs whose chosen answer has the larger implicit reward; ``chosen_reward_sum`` and
    ``rejected_reward_sum`` are of the implicit rewards ``beta (log pi - log reference)``.
    """

    loss: torch.Tensor
    pairs: int
    correct: int
    chosen_reward_sum: float
    rejected_reward_sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThumbLoss:
    """A loss, and sums over the answers of this part that add up to those of the batch.

    The rewards are the implicit ones, ``beta (log pi - log reference)``, of desirable and of undesirable answers.
    """

    loss: torch.Tensor
    desirable: int
    undesirable: int
    desirable_reward_sum: float
    undesirable_reward_sum: float


def dpo(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    reference_chosen_B: torch.Tensor,
    reference_rejected_B: torch.Tensor,
    *,
    total: int,
    beta: float = 0.1,
    weights_B: torch.Tensor | None = None,
) -> PairLoss:
    """DPO, ``-log sigmoid(beta (log pi(c)/ref(c) - log pi(r)/ref(r)))`` for chosen c and rejected r.

    The gradient with respect to ``log pi(c)`` is ``-beta sigmoid(-margin)``, to ``log pi(r)`` its opposite: a pair
    that is ordered wrongly counts up to ``beta``, one far on the right side hardly at all.

    Args:
        chosen_B: log-probabilities of the better answers under the policy, shape (B,), finite and <= 0.
        rejected_B: those of the worse answers to the same prompts.
        reference_chosen_B: the better answers under the reference; no gradient flows into it.
        reference_rejected_B: the worse ones under the reference; no gradient either.
        total: pairs in the whole batch, >= B.
        beta: how much moving away from the reference costs, > 0.
        weights_B: of the pairs, shape (B,), finite and >= 0; 1 where none are given.

    Raises:
        ValueError: shapes do not fit, a log-probability is not finite or above 0, or a setting is outside its range.

    Source: Rafailov et al. (2023), Direct preference optimization, equation 7.
    """
    _refuse_settings(beta, total, len(chosen_B))
    if chosen_B.shape != rejected_B.shape:
        raise ValueError(f"{len(chosen_B)} chosen and {len(rejected_B)} rejected answers; pairs are expected")
    chosen_reward_B = beta * _log_ratio(chosen_B, reference_chosen_B, "chosen_B")
    rejected_reward_B = beta * _log_ratio(rejected_B, reference_rejected_B, "rejected_B")
    margin_B = chosen_reward_B - rejected_reward_B
    return PairLoss(
        loss=-(_weights(weights_B, margin_B) * F.logsigmoid(margin_B)).sum() / total,
        pairs=len(margin_B),
        correct=int((margin_B > 0).sum()),
        chosen_reward_sum=float(chosen_reward_B.detach().double().sum()),
        rejected_reward_sum=float(rejected_reward_B.detach().double().sum()),
    )


def kto(
    policy_B: torch.Tensor,
    reference_B: torch.Tensor,
    desirable_B: torch.Tensor,
    *,
    total: int,
    baseline: float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    weights_B: torch.Tensor | None = None,
) -> ThumbLoss:
    """KTO: how far an answer's log-ratio r = log pi - log reference lies on the right side of the KL baseline z.

    ``w+ (1 - sigmoid(beta (r - z)))`` for desirable answers, ``w- (1 - sigmoid(beta (z - r)))`` for undesirable ones.
    The gradient with respect to log pi is ``-w+ beta s (1 - s)`` and ``+w- beta s (1 - s)``, s the sigmoid: answers
    that are already on the right side, and hopeless ones, count little.

    Args:
        policy_B: log-probabilities of answers under the policy, shape (B,), finite and <= 0.
        reference_B: those under the reference; no gradient flows into it.
        desirable_B: whether each answer was liked, shape (B,), bool.
        total: answers in the whole batch, >= B.
        baseline: z >= 0 in nats, from :func:`kto_baseline` over the whole batch.
        beta: how much moving away from the reference costs, > 0.
        desirable_weight: w+ > 0; choose it so that w+ n+ and w- n- are about equal where thumbs are unbalanced.
        undesirable_weight: w- > 0.
        weights_B: of the single answers, shape (B,), finite and >= 0; 1 where none are given.

    Raises:
        ValueError: shapes or types do not fit, a log-probability is not finite or above 0, or a setting is outside
            its range.

    Source: Ethayarajh et al. (2024), KTO: model alignment as prospect theoretic optimization, equation 8.
    """
    _refuse_settings(beta, total, len(policy_B))
    refuse_outside("baseline", baseline, 0.0)
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        _refuse_not_positive(name, weight)
    if desirable_B.dtype != torch.bool or desirable_B.shape != policy_B.shape:
        raise ValueError(
            f"desirable_B is {desirable_B.dtype} of shape {tuple(desirable_B.shape)}; "
            f"bool of shape {tuple(policy_B.shape)} is expected"
        )
    log_ratio_B = _log_ratio(policy_B, reference_B, "policy_B")
    value_B = torch.where(desirable_B, log_ratio_B - baseline, baseline - log_ratio_B) * beta
    weight_B = torch.where(desirable_B, desirable_weight, undesirable_weight).to(value_B.dtype)
    reward_B = beta * log_ratio_B.detach().double()
    liked = int(desirable_B.sum())
    return ThumbLoss(
        # 1 - sigmoid(x) is sigmoid(-x), which keeps its digits where the value is large.
        loss=(weight_B * _weights(weights_B, value_B) * torch.sigmoid(-value_B)).sum() / total,
        desirable=liked,
        undesirable=len(policy_B) - liked,
        desirable_reward_sum=float(reward_B[desirable_B].sum()),
        undesirable_reward_sum=float(reward_B[~desirable_B].sum()),
    )


def kto_baseline(policy_B: torch.Tensor, reference_B: torch.Tensor) -> float:
    """KTO's estimate of KL(pi || reference) over a batch, ``max(0, mean(log pi - log reference))``.

    It is meant to be given answers that belong to *other* prompts: those of the batch, shifted by one, so that an
    answer does not set the bar for itself. With each prompt's own answers it grows with what was learned about them.

    Args:
        policy_B: log-probabilities of the answers under the policy, shape (B,), of the whole batch.
        reference_B: those under the reference, same shape.

    Returns:
        A number >= 0 in nats, without gradient.

    Raises:
        ValueError: shapes do not fit, or a log-probability is not finite or above 0.

    Source: Ethayarajh et al. (2024), section 4.1.
    """
    return max(0.0, float(_log_ratio(policy_B.detach(), reference_B, "policy_B").double().mean()))


def _weights(weights_B: torch.Tensor | None, like_B: torch.Tensor) -> torch.Tensor:
    """Checked weights in the type of the losses; 1 where none are given."""
    if weights_B is None:
        return torch.ones_like(like_B)
    if weights_B.shape != like_B.shape:
        raise ValueError(f"{len(weights_B)} weights for {len(like_B)} losses; one for each is expected")
    refuse(weights_B, ~(torch.isfinite(weights_B) & (weights_B >= 0)), "weights_B", "finite weights >= 0 are accepted")
    return weights_B.detach().to(like_B.dtype)


def _refuse_settings(beta: float, total: int, rows: int) -> None:
    _refuse_not_positive("beta", beta)
    if total < rows:
        raise ValueError(f"total = {total!r} for {rows} rows; the number of the whole batch is expected")


def _refuse_not_positive(name: str, value: float) -> None:
    refuse_outside(name, value, 0.0)
    if value == 0:
        raise ValueError(f"{name} = {value!r} would teach nothing; a number above 0 is accepted")


def _log_ratio(policy_B: torch.Tensor, reference_B: torch.Tensor, name: str) -> torch.Tensor:
    if policy_B.ndim != 1 or len(policy_B) == 0 or policy_B.shape != reference_B.shape:
        raise ValueError(
            f"shapes {name} {tuple(policy_B.shape)} and reference {tuple(reference_B.shape)} do not fit; "
            "(B,) twice is expected"
        )
    pi, reference = exact(policy_B, name), exact(reference_B.detach(), f"reference of {name}")
    for values, of in ((pi, name), (reference, f"reference of {name}")):
        refuse(values, ~(torch.isfinite(values) & (values <= 0)), of, "finite sums of log-probabilities are accepted")
    return pi - reference.to(pi.dtype)
