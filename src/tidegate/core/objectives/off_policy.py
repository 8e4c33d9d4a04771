"""Learning from tokens that another policy sampled: importance weights, estimates with them, and what they are worth.

The behaviour policy mu is the one whose log-probabilities serving recorded. Where top-p, top-k or penalties shaped the
sampling, these are not those of the distribution that was sampled from; such samples have no weight and must be left
out.
"""

from __future__ import annotations

import math

import torch

from tidegate.core.objectives.rows import exact, refuse

CAP = 3.0
"""C: no token counts more than three times."""


def truncated_importance(policy: torch.Tensor, behaviour: torch.Tensor, *, cap: float = CAP) -> torch.Tensor:
    """Truncated importance weights ``min(pi / mu, C)``.

    Truncation bounds the variance; the price is a bias towards mu where pi / mu > C.

    Args:
        policy: finite log-probabilities of the tokens under the policy that is to be learned about, any shape.
        behaviour: those under the policy that sampled them, same shape.
        cap: C > 0.

    Returns:
        Weights in [0, C] of the same shape, without gradient.

    Raises:
        ValueError: the shapes differ, a number is not finite, or ``cap`` is not positive.

    Source: Ionides (2008), Truncated importance sampling; Espeholt et al. (2018), IMPALA.
    """
    if policy.shape != behaviour.shape:
        raise ValueError(f"shapes {tuple(policy.shape)} and {tuple(behaviour.shape)} do not fit; equal ones are")
    if not (cap > 0 and math.isfinite(cap)):
        raise ValueError(f"cap = {cap!r}; a finite number above 0 is accepted")
    log_ratio = exact(policy.detach(), "policy") - exact(behaviour.detach(), "behaviour")
    refuse(log_ratio, ~torch.isfinite(log_ratio), "log(pi / mu)", "finite log-probabilities are accepted")
    return log_ratio.exp().clamp(max=cap)


def ips(weights: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Inverse propensity score: what the policy would earn, ``mean(w r)``; unbiased while no weight is truncated.

    Args:
        weights: (N,) pi / mu of each sample, >= 0, with a sum above 0.
        rewards: (N,) what each sample earned.

    Returns:
        A scalar.

    Raises:
        ValueError: shapes do not fit, a number is not finite, or the weights are negative or all 0.

    Source: Horvitz and Thompson (1952).
    """
    w, r = _weighted(weights, rewards)
    return (w * r).mean()


def snips(weights: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Self-normalised inverse propensity score, ``sum(w r) / sum(w)``.

    Biased, of smaller variance, and never outside the range of the rewards. Arguments, result and errors as
    :func:`ips`.

    Source: Swaminathan and Joachims (2015), The self-normalized estimator for counterfactual learning.
    """
    w, r = _weighted(weights, rewards)
    return (w * r).sum() / w.sum()


def effective_sample_size(weights: torch.Tensor) -> torch.Tensor:
    """How many equally weighted samples the weights are worth, ``sum(w)^2 / sum(w^2)``.

    Args:
        weights: (N,) numbers >= 0 with a sum above 0.

    Returns:
        A scalar in [1, N]: N when all are equal, 1 when one has all the weight.

    Raises:
        ValueError: the shape is another one, a number is not finite, or the weights are negative or all 0.

    Source: Kong (1992), A note on importance sampling using standardized weights.
    """
    w, _ = _weighted(weights, weights)
    return w.sum().square() / w.square().sum()


def _weighted(weights: torch.Tensor, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if weights.ndim != 1 or weights.shape != rewards.shape or len(weights) == 0:
        raise ValueError(f"shapes {tuple(weights.shape)} and {tuple(rewards.shape)} do not fit; (N,) twice is expected")
    w, r = exact(weights, "weights"), exact(rewards, "rewards")
    refuse(w, ~(torch.isfinite(w) & (w >= 0)), "weights", "finite numbers >= 0 are accepted")
    refuse(r, ~torch.isfinite(r), "rewards", "finite numbers are accepted")
    if not bool(w.sum() > 0):
        raise ValueError("all weights are 0; nothing can be said of a policy that takes none of the recorded choices")
    return w, r
