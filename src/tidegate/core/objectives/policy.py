"""Policy-gradient objectives over recorded tokens.

All take padded rows:

- ``logprobs_B_T``: log-probabilities of the tokens under the current policy pi, (B, T); the only input that gradients
  flow into.
- ``old_B_T``: those under the policy that the update started from, (B, T). Their ratio is rho = pi / old.
- ``mask_B_T``: 1 where a token is trained, (B, T), bool or 0/1; at least one in each row.
- ``advantages``: A, one for each sequence (B,) or one for each token (B, T).

and, by name:

- ``aggregation``: how per-token losses are averaged, with the counts of the whole batch, so that parts add up.
- ``importance_B_T``: weights >= 0 that multiply the per-token losses, KL penalty included; without gradient; 1 where
  none are given. For tokens that a policy mu other than the old one sampled they are ``truncated_importance(old, mu)``
  of :mod:`tidegate.core.objectives.off_policy`, for rho leads from old to pi; for :func:`reinforce`, which has no rho,
  ``truncated_importance(pi, mu)``.
- ``reference_B_T`` and ``beta`` >= 0: log-probabilities under the frozen reference, and the coefficient of the k3
  estimate of KL(pi || reference) that is added to each token's loss. With ``beta`` 0 the KL is only reported.
- ``entropy_B_T``: exact entropies of the policy at the tokens, reported and not trained.

Every objective raises ``ValueError`` when shapes do not fit, a trained token's number is not finite, a log-probability
is above 0, a row trains nothing, a setting is outside its range, or the policies are so far apart that a ratio
overflows.

At pi = old, without KL, the gradients of all five are those of :func:`reinforce` (of :func:`gspo`, where a sequence's
tokens have equal importance).
"""

# ruff: noqa: N803, N806, N815 - shape suffixes are upper case

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidegate.core.objectives.divergence import k3
from tidegate.core.objectives.rows import (
    Aggregation,
    aggregate,
    kept,
    kept_logprobs,
    refuse,
    refuse_outside,
    trained_tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss, and sums over the trained tokens of this part that add up to those of the batch.

    ``clipped_tokens`` counts tokens whose clip took effect. ``ratio_sum`` is of rho (of the sequence's ratio for
    :func:`gspo`), ``old_kl_sum`` of the k3 estimate of KL(old || pi), how far this update has gone;
    ``reference_kl_sum`` of that of KL(pi || reference), None without a reference. ``importance_sum`` squared over
    ``importance_square_sum`` is the effective number of tokens. ``entropy_sum`` is None where none was given.
    """

    loss: torch.Tensor
    sequences: int
    tokens: int
    clipped_tokens: int
    ratio_sum: float
    old_kl_sum: float
    importance_sum: float
    importance_square_sum: float
    reference_kl_sum: float | None
    entropy_sum: float | None


def ppo_clip(
    logprobs_B_T: torch.Tensor,
    old_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    advantages: torch.Tensor,
    *,
    aggregation: Aggregation,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    importance_B_T: torch.Tensor | None = None,
    entropy_B_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, per token ``-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)``.

    The gradient of a token's loss with respect to its log-probability is ``-rho A``, and 0 where the clip takes
    effect: rho > 1 + eps_high with A > 0, or rho < 1 - eps_low with A < 0.

    Args:
        logprobs_B_T: see the module, as for all that is not named here.
        old_B_T: the same tokens under the policy that the update started from.
        mask_B_T: 1 where a token is trained.
        advantages: (B,) or (B, T).
        aggregation: how tokens are averaged.
        eps_low: in [0, 1].
        eps_high: >= 0. Clip-higher, .28, lets rare tokens grow and keeps entropy up (Yu et al. 2025, DAPO).
        importance_B_T: weights of the tokens.
        entropy_B_T: entropies to report.

    Source: Schulman et al. (2017), Proximal policy optimization algorithms, equation 7.
    """
    rows = _rows(logprobs_B_T, old_B_T, mask_B_T, advantages, importance_B_T)
    losses_B_T, clipped_B_T = _clipped_surrogate(rows.ratio_B_T, rows.advantages_B_T, eps_low, eps_high)
    return _summed(rows, losses_B_T, rows.ratio_B_T, clipped_B_T, aggregation, entropy_B_T=entropy_B_T)


def grpo(
    logprobs_B_T: torch.Tensor,
    old_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    advantages: torch.Tensor,
    *,
    aggregation: Aggregation,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta: float = 0.0,
    reference_B_T: torch.Tensor | None = None,
    importance_B_T: torch.Tensor | None = None,
    entropy_B_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """GRPO: :func:`ppo_clip` with group-normalised advantages, plus ``beta * k3`` to the reference.

    The KL adds ``beta (1 - reference / pi)`` to the gradient of a token's loss: in expectation over tokens of pi the
    gradient of beta KL(reference || pi), see :mod:`tidegate.core.objectives.divergence`. With beta 0 this is
    ``ppo_clip``.

    Args and errors as :func:`ppo_clip` and the module. The paper averages by ``sequence`` and sets beta to .04;
    .001 to .05 are usual. Advantages come from :func:`tidegate.core.objectives.advantages.group_advantages`.

    Source: Shao et al. (2024), DeepSeekMath, equations 3 and 4.
    """
    rows = _rows(logprobs_B_T, old_B_T, mask_B_T, advantages, importance_B_T)
    losses_B_T, clipped_B_T = _clipped_surrogate(rows.ratio_B_T, rows.advantages_B_T, eps_low, eps_high)
    return _summed(
        rows,
        losses_B_T,
        rows.ratio_B_T,
        clipped_B_T,
        aggregation,
        beta=beta,
        reference_B_T=reference_B_T,
        entropy_B_T=entropy_B_T,
    )


def reinforce(
    logprobs_B_T: torch.Tensor,
    old_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    advantages: torch.Tensor,
    *,
    aggregation: Aggregation,
    beta: float = 0.0,
    reference_B_T: torch.Tensor | None = None,
    importance_B_T: torch.Tensor | None = None,
    entropy_B_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """The plain policy gradient, per token ``-A log pi``; gradient ``-A``.

    Right for one update on the tokens of pi; later ones need ``importance_B_T``. With A = 1 it is the supervised
    objective of :func:`tidegate.core.objectives.sft.weighted_nll` with weights 1. The old policy is only reported
    against, nothing is clipped.

    Args and errors as :func:`grpo` and the module. Advantages come from ``rloo``, ``reinforce_pp`` or
    ``running_mean_advantages`` of :mod:`tidegate.core.objectives.advantages`.

    Source: Williams (1992), Simple statistical gradient-following algorithms for connectionist reinforcement learning.
    """
    rows = _rows(logprobs_B_T, old_B_T, mask_B_T, advantages, importance_B_T)
    losses_B_T = -rows.advantages_B_T * rows.logprobs_B_T
    nothing_B_T = torch.zeros_like(rows.trained_B_T)
    return _summed(
        rows,
        losses_B_T,
        rows.ratio_B_T,
        nothing_B_T,
        aggregation,
        beta=beta,
        reference_B_T=reference_B_T,
        entropy_B_T=entropy_B_T,
    )


def gspo(
    logprobs_B_T: torch.Tensor,
    old_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    advantages: torch.Tensor,
    *,
    aggregation: Aggregation,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    beta: float = 0.0,
    reference_B_T: torch.Tensor | None = None,
    importance_B_T: torch.Tensor | None = None,
    entropy_B_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """GSPO: the clipped surrogate of one ratio for each sequence, ``s = exp(mean_t(log pi - log old))``.

    The sequence's loss ``-min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)`` stands at each of its tokens, so that with
    ``sequence`` aggregation it is counted once. Its gradient with respect to each of the n tokens' log-probabilities is
    ``-s A / n``, or 0 for all of them where the clip takes effect. The mean over tokens makes s vary far less than
    rho, hence the small defaults, which are the paper's. Importance weights of tokens count as their sequence's mean.

    Args and errors as :func:`grpo` and the module, but one advantage for each sequence, (B,), is taken.

    Source: Zheng et al. (2025), Group sequence policy optimization, equations 5 to 7.
    """
    if advantages.ndim != 1:
        raise ValueError(f"advantages of shape {tuple(advantages.shape)}; gspo takes one for each sequence, (B,)")
    rows = _rows(logprobs_B_T, old_B_T, mask_B_T, advantages, importance_B_T)
    lengths_B_1 = rows.trained_B_T.sum(dim=1, keepdim=True)
    ratio_B_1 = ((rows.logprobs_B_T - rows.old_B_T).sum(dim=1, keepdim=True) / lengths_B_1).exp()
    ratio_B_T = ratio_B_1.expand_as(rows.logprobs_B_T)
    losses_B_T, clipped_B_T = _clipped_surrogate(ratio_B_T, rows.advantages_B_T, eps_low, eps_high)
    return _summed(
        rows,
        losses_B_T,
        ratio_B_T,
        clipped_B_T,
        aggregation,
        beta=beta,
        reference_B_T=reference_B_T,
        entropy_B_T=entropy_B_T,
    )


def cispo(
    logprobs_B_T: torch.Tensor,
    old_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    advantages: torch.Tensor,
    *,
    aggregation: Aggregation,
    eps_low: float = 1.0,
    eps_high: float = 4.0,
    beta: float = 0.0,
    reference_B_T: torch.Tensor | None = None,
    importance_B_T: torch.Tensor | None = None,
    entropy_B_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """CISPO: REINFORCE with a clipped weight, per token ``-sg(clip(rho, 1 - eps_low, 1 + eps_high)) A log pi``.

    sg stops the gradient, which is ``-clip(rho) A``: unlike ``ppo_clip``, no token is ever left without one, so that
    rare tokens at which an answer turns keep learning.

    Args and errors as :func:`grpo` and the module. ``eps_low`` = 1 sets no lower bound, as in the paper. The paper
    does not publish its ``eps_high``; 4 caps the weight at 5, within the 4 to 8 that Khatri et al. (2025), The art of
    scaling reinforcement learning compute for LLMs, find to work.

    Source: MiniMax (2025), MiniMax-M1, equations 4 and 5.
    """
    _refuse_clip(eps_low, eps_high)
    rows = _rows(logprobs_B_T, old_B_T, mask_B_T, advantages, importance_B_T)
    ratio_B_T = rows.ratio_B_T.detach()
    losses_B_T = -ratio_B_T.clamp(1.0 - eps_low, 1.0 + eps_high) * rows.advantages_B_T * rows.logprobs_B_T
    clipped_B_T = (ratio_B_T < 1.0 - eps_low) | (ratio_B_T > 1.0 + eps_high)
    return _summed(
        rows,
        losses_B_T,
        ratio_B_T,
        clipped_B_T,
        aggregation,
        beta=beta,
        reference_B_T=reference_B_T,
        entropy_B_T=entropy_B_T,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Checked inputs of one precision, finite everywhere; gradients flow into log-probabilities and ratio only."""

    trained_B_T: torch.Tensor
    logprobs_B_T: torch.Tensor
    old_B_T: torch.Tensor
    ratio_B_T: torch.Tensor
    advantages_B_T: torch.Tensor
    importance_B_T: torch.Tensor


def _rows(
    logprobs_B_T: torch.Tensor,
    old_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    advantages: torch.Tensor,
    importance_B_T: torch.Tensor | None,
) -> _Rows:
    trained_B_T = trained_tokens(mask_B_T, logprobs_B_T.shape)
    policy_B_T = kept_logprobs(logprobs_B_T, trained_B_T, "logprobs_B_T")
    before_B_T = kept_logprobs(old_B_T.detach(), trained_B_T, "old_B_T").to(policy_B_T.dtype)
    ratio_B_T = (policy_B_T - before_B_T).exp()
    refuse(ratio_B_T, ~torch.isfinite(ratio_B_T), "pi / old", "the policies are too far apart to learn from this token")
    if advantages.shape not in (trained_B_T.shape, trained_B_T.shape[:1]):
        raise ValueError(
            f"shapes advantages {tuple(advantages.shape)} and mask {tuple(mask_B_T.shape)} do not fit; "
            "(B,) or (B, T) is expected"
        )
    spread_B_T = advantages[:, None].expand_as(trained_B_T) if advantages.ndim == 1 else advantages
    weights_B_T = torch.ones_like(policy_B_T)
    if importance_B_T is not None:
        weights_B_T = kept(importance_B_T.detach(), trained_B_T, "importance_B_T").to(policy_B_T.dtype)
        refuse(weights_B_T, weights_B_T < 0, "importance_B_T", "weights >= 0 are accepted")
    return _Rows(
        trained_B_T=trained_B_T,
        logprobs_B_T=policy_B_T,
        old_B_T=before_B_T,
        ratio_B_T=ratio_B_T,
        advantages_B_T=kept(spread_B_T.detach(), trained_B_T, "advantages").to(policy_B_T.dtype),
        importance_B_T=weights_B_T,
    )


def _refuse_clip(eps_low: float, eps_high: float) -> None:
    refuse_outside("eps_low", eps_low, 0.0, 1.0)
    refuse_outside("eps_high", eps_high, 0.0)


def _clipped_surrogate(
    ratio_B_T: torch.Tensor, advantages_B_T: torch.Tensor, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token losses, and where the clip took effect."""
    _refuse_clip(eps_low, eps_high)
    bounded_B_T = ratio_B_T.clamp(1.0 - eps_low, 1.0 + eps_high)
    losses_B_T = -torch.minimum(ratio_B_T * advantages_B_T, bounded_B_T * advantages_B_T)
    rose_B_T = (ratio_B_T > 1.0 + eps_high) & (advantages_B_T > 0)
    fell_B_T = (ratio_B_T < 1.0 - eps_low) & (advantages_B_T < 0)
    return losses_B_T, rose_B_T | fell_B_T


def _summed(
    rows: _Rows,
    losses_B_T: torch.Tensor,
    ratio_B_T: torch.Tensor,
    clipped_B_T: torch.Tensor,
    aggregation: Aggregation,
    *,
    beta: float = 0.0,
    reference_B_T: torch.Tensor | None = None,
    entropy_B_T: torch.Tensor | None = None,
) -> PolicyLoss:
    """Add the penalty, weigh, aggregate, and report."""
    refuse_outside("beta", beta, 0.0)
    trained_B_T = rows.trained_B_T
    penalised_B_T = losses_B_T
    reported = [clipped_B_T, ratio_B_T, k3(rows.old_B_T, rows.logprobs_B_T), rows.importance_B_T]
    reported.append(rows.importance_B_T.square())
    if reference_B_T is not None:
        kl_B_T = k3(rows.logprobs_B_T, kept_logprobs(reference_B_T, trained_B_T, "reference_B_T"))
        refuse(kl_B_T, ~torch.isfinite(kl_B_T), "k3", "the policy is too far from the reference to go on")
        penalised_B_T = losses_B_T + beta * kl_B_T
        reported.append(kl_B_T)
    elif beta > 0:
        raise ValueError(f"beta = {beta!r} without reference_B_T; pass the reference's log-probabilities, or beta 0")
    if entropy_B_T is not None:
        reported.append(kept(entropy_B_T, trained_B_T, "entropy_B_T"))
    # One transfer for all of them.
    sums = torch.stack([torch.where(trained_B_T, v.detach().double(), 0.0).sum() for v in reported]).tolist()
    return PolicyLoss(
        loss=aggregate(penalised_B_T * rows.importance_B_T, trained_B_T, aggregation),
        sequences=len(trained_B_T),
        tokens=int(trained_B_T.sum()),
        clipped_tokens=int(sums[0]),
        ratio_sum=sums[1],
        old_kl_sum=sums[2],
        importance_sum=sums[3],
        importance_square_sum=sums[4],
        reference_kl_sum=sums[5] if reference_B_T is not None else None,
        entropy_sum=sums[-1] if entropy_B_T is not None else None,
    )
