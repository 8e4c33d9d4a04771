"""The supervised objective against an independent float64 computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidegate.core.objectives.sft import weighted_nll


def reference(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, total: float) -> tuple[float, np.ndarray]:
    """Loss and gradient by the formulas: w (logsumexp - logit), w (softmax - onehot)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(targets))
    loss = float((-np.log(probabilities[rows, targets]) * weights).sum() / total)
    onehot = np.zeros_like(logits)
    onehot[rows, targets] = 1.0
    return loss, (probabilities - onehot) * weights[:, None] / total


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_loss_and_gradient_match_a_float64_reference(scale: float) -> None:
    stream = np.random.default_rng(7)
    logits = stream.standard_normal((23, 101)) * scale
    targets = stream.integers(0, 101, 23)
    weights = stream.uniform(0.1, 2.0, 23)
    single = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    loss = weighted_nll(single, torch.tensor(targets), torch.tensor(weights), total_weight=float(weights.sum()))
    loss.backward()
    expected, gradient = reference(single.detach().double().numpy(), targets, weights, float(weights.sum()))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert single.grad is not None
    error = np.linalg.norm(single.grad.double().numpy() - gradient) / np.linalg.norm(gradient)
    assert error <= 1e-5


def test_golden_values() -> None:
    # Uniform over 4: ln 4 each; weights 1 and 3 over a total of 4 leave ln 4.
    uniform = weighted_nll(torch.zeros(2, 4), torch.tensor([0, 3]), torch.tensor([1.0, 3.0]), total_weight=4.0)
    assert uniform.item() == pytest.approx(1.3862943611, rel=1e-6)
    # Odds 3:1 for the target with weight 1, against it with weight 2, total 3: (ln(4/3) + 2 ln 4) / 3.
    odds = torch.tensor([[np.log(3.0), 0.0], [np.log(3.0), 0.0]])
    mixed = weighted_nll(odds, torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), total_weight=3.0)
    assert mixed.item() == pytest.approx(1.0200902647, rel=1e-6)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    logits, targets, weights = torch.randn(9, 5).double(), torch.randint(0, 5, (9,)), torch.rand(9).double()
    whole = weighted_nll(logits, targets, weights, total_weight=4.0)
    parts = sum(
        weighted_nll(logits[part], targets[part], weights[part], total_weight=4.0)
        for part in (slice(0, 2), slice(2, 9))
    )
    assert float(parts) == pytest.approx(float(whole), rel=1e-12)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = weighted_nll(logits, torch.tensor([1, 2, 3, 4]), torch.ones(4), total_weight=4.0)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("logits", "targets", "weights", "total"),
    [((3,), (3,), (3,), 1.0), ((3, 4), (2,), (3,), 1.0), ((3, 4), (3,), (2,), 1.0), ((3, 4), (3,), (3,), 0.0)],
)
def test_misfits_are_refused(
    logits: tuple[int, ...], targets: tuple[int, ...], weights: tuple[int, ...], total: float
) -> None:
    with pytest.raises(ValueError, match="expected"):
        weighted_nll(
            torch.zeros(logits), torch.zeros(targets, dtype=torch.int64), torch.ones(weights), total_weight=total
        )
