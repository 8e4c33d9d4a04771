"""How far two policies are apart: per-token estimates from the sampled token, and exact values from logits.

The estimates take samples x of the policy pi and the log-probabilities of these tokens under pi and under a reference
q. All three estimate KL(pi || q) = E_pi[log pi - log q]; used as a loss, they pull in different directions:

- k1: the gradient E_pi[grad log pi] is 0 in expectation, so that it is for monitoring only.
- k2: the gradient is that of KL(pi || q) in expectation.
- k3: the gradient is that of KL(q || pi) in expectation, equal to the former's to first order near pi = q.

Source: Schulman (2020), Approximating KL divergence.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case

from __future__ import annotations

import torch

from tidegate.core.objectives.rows import exact


def k1(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``log pi - log q``: unbiased, any sign, of large variance.

    Args:
        policy: log-probabilities of tokens under the policy that sampled them, any shape.
        reference: those of the same tokens under the reference, same shape.

    Returns:
        One estimate a token, in nats; gradient 1 with respect to ``policy``.

    Raises:
        ValueError: the shapes differ or a tensor is not of a float type.
    """
    return -_log_ratio(policy, reference).to(exact(policy, "policy").dtype)


def k2(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``(log pi - log q)^2 / 2`` >= 0: biased, of small variance; gradient ``log pi - log q``.

    Arguments, result and errors as :func:`k1`.
    """
    return (0.5 * _log_ratio(policy, reference).square()).to(exact(policy, "policy").dtype)


def k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``q/pi - 1 - log(q/pi)`` >= 0: unbiased, of small variance; gradient ``1 - q/pi``.

    Arguments, result and errors as :func:`k1`.
    """
    log_ratio = _log_ratio(policy, reference)
    return (torch.expm1(log_ratio) - log_ratio).to(exact(policy, "policy").dtype)


def entropy(logits_K_V: torch.Tensor) -> torch.Tensor:
    """Shannon entropy of each distribution, ``-sum_v p_v log p_v``.

    Args:
        logits_K_V: scores before the softmax, shape (K, V), finite.

    Returns:
        (K,) in nats, in [0, ln V]. Gradient with respect to logit v: ``-p_v (log p_v + entropy)``.

    Raises:
        ValueError: the shape is another one, or a row is not finite.
    """
    logprobs_K_V = log_softmax(logits_K_V, "logits_K_V")
    return -(logprobs_K_V.exp() * logprobs_K_V).sum(dim=-1)


def kl(policy_logits_K_V: torch.Tensor, reference_logits_K_V: torch.Tensor) -> torch.Tensor:
    """Exact KL(pi || q) of each pair of distributions, ``sum_v p_v (log p_v - log q_v)``.

    Computed in float64: near pi = q, where training begins, the terms all but cancel.

    Args:
        policy_logits_K_V: scores of the policy, shape (K, V), finite.
        reference_logits_K_V: scores of the reference, shape (K, V), finite; no gradient flows into them.

    Returns:
        (K,) in nats, >= 0 up to rounding. Gradient with respect to the policy's logit v:
        ``p_v (log p_v - log q_v - kl)``.

    Raises:
        ValueError: the shapes differ, or a row is not finite.
    """
    if policy_logits_K_V.shape != reference_logits_K_V.shape:
        raise ValueError(
            f"shapes {tuple(policy_logits_K_V.shape)} and {tuple(reference_logits_K_V.shape)} do not fit; "
            "(K, V) twice is expected"
        )
    dtype = exact(policy_logits_K_V, "policy_logits_K_V").dtype
    policy_K_V = log_softmax(policy_logits_K_V.double(), "policy_logits_K_V")
    reference_K_V = log_softmax(reference_logits_K_V.detach().double(), "reference_logits_K_V")
    return (policy_K_V.exp() * (policy_K_V - reference_K_V)).sum(dim=-1).to(dtype)


def log_softmax(logits_K_V: torch.Tensor, name: str) -> torch.Tensor:
    """Log-probabilities (K, V) of finite scores, in at least single precision.

    Raises:
        ValueError: the shape is another one, or a score is not finite.
    """
    if logits_K_V.ndim != 2 or logits_K_V.numel() == 0:
        raise ValueError(f"{name} has the shape {tuple(logits_K_V.shape)}; (K, V) is expected")
    logprobs_K_V = exact(logits_K_V, name).log_softmax(dim=-1)
    # One number a row tells: a score that is not finite leaves its mark on the sum.
    if not bool(torch.isfinite(logprobs_K_V.detach().sum(dim=-1)).all()):
        raise ValueError(f"{name} holds a number that is not finite; finite scores are accepted")
    return logprobs_K_V


def _log_ratio(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``log q - log pi`` in float64: what is left of two close numbers must not be rounding."""
    if policy.shape != reference.shape:
        raise ValueError(f"shapes {tuple(policy.shape)} and {tuple(reference.shape)} do not fit; equal ones are")
    return exact(reference, "reference").detach().double() - exact(policy, "policy").double()
