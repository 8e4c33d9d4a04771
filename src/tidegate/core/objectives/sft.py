"""Supervised objective of STaR, RFT and ReST-EM: likelihood of verified answers.

Sources: Zelikman et al. 2022 (STaR), Yuan et al. 2023 (RFT), Singh et al. 2023 (ReST-EM).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader knows


def weighted_nll(
    logits_K_V: torch.Tensor,  # noqa: N803 - shape suffixes are upper case
    targets_K: torch.Tensor,  # noqa: N803
    weights_K: torch.Tensor,  # noqa: N803
    *,
    total_weight: float,
) -> torch.Tensor:
    """Weighted negative log-likelihood, ``sum_k w_k * -log softmax(logits_k)[target_k] / total_weight``.

    The normaliser is an argument, so that a batch may be summed up in parts: gradients of the parts add up to
    the gradient of the whole.

    Args:
        logits_K_V: scores before the softmax, only where a token is trained, shape (K, V); any float type.
        targets_K: token ids, shape (K,), int64 in [0, V).
        weights_K: weights >= 0, shape (K,).
        total_weight: what the sum is divided by, > 0; one number for the whole batch: its trained tokens where the
            weights average 1 over a run, or the sum of its weights.

    Returns:
        A float32 scalar (float64 for float64 logits) in nats.

    Raises:
        ValueError: shapes do not fit, or ``total_weight`` is not positive.
    """
    if logits_K_V.ndim != 2 or targets_K.shape != logits_K_V.shape[:1] or weights_K.shape != targets_K.shape:
        raise ValueError(
            f"shapes {tuple(logits_K_V.shape)}, {tuple(targets_K.shape)}, {tuple(weights_K.shape)} do not fit; "
            "(K, V), (K,), (K,) are expected"
        )
    if not total_weight > 0:
        raise ValueError(f"total_weight = {total_weight!r} cannot normalise a loss; a positive number is expected")
    exact = logits_K_V if logits_K_V.dtype == torch.float64 else logits_K_V.float()
    losses_K = F.cross_entropy(exact, targets_K, reduction="none")  # noqa: N806
    return (losses_K * weights_K.to(exact.dtype)).sum() / total_weight
