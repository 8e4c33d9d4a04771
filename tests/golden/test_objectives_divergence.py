"""Divergences, entropy and importance weights against golden numbers and independent computations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import objective_oracle as oracle
from objective_oracle import relative_error
from tidegate.core.objectives.divergence import entropy, k1, k2, k3, kl
from tidegate.core.objectives.off_policy import effective_sample_size, ips, snips, truncated_importance

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("objective_vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", VECTORS["kl_k3"])
def test_k3_matches_the_vectors(case: dict[str, float]) -> None:
    found = k3(torch.tensor(case["policy_logprob"]), torch.tensor(case["reference_logprob"]))
    assert found.item() == pytest.approx(case["k3"], rel=1e-6)


@pytest.mark.parametrize("gap", [-3.0, -0.4, -1e-4, 1e-5, 0.7, 5.0])
def test_estimates_and_gradients_keep_their_digits(gap: float) -> None:
    """Also where policy and reference nearly agree, which is where training begins."""
    log_pi = torch.tensor(-6.25, requires_grad=True)
    log_q = torch.tensor(-6.25 + gap)
    d = float(log_q.item() - log_pi.item())
    expected = {
        k1: (-d, 1.0),
        k2: (d * d / 2, -d),
        k3: (math.expm1(d) - d if abs(d) > 1e-3 else d * d / 2 + d**3 / 6, -math.expm1(d)),
    }
    for estimate, (value, slope) in expected.items():
        found = estimate(log_pi, log_q)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(value, rel=1e-6)
        assert torch.autograd.grad(found, log_pi)[0].item() == pytest.approx(slope, rel=1e-6)


def distributions(seed: int, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (1, 7) of a policy and a reference; gradients flow into the first."""
    torch.manual_seed(seed)
    scores = torch.randn(2, 1, 7, dtype=torch.float64) * scale
    return scores[0].clone().requires_grad_(), scores[1]


def expected_slope(estimate: Callable[..., torch.Tensor], policy: torch.Tensor, reference: torch.Tensor) -> np.ndarray:
    """The mean gradient of an estimate over all tokens that the policy may sample."""
    logprobs, log_q = policy.log_softmax(dim=-1)[0], reference.log_softmax(dim=-1)[0]
    value = (logprobs.exp().detach() * estimate(logprobs, log_q)).sum()
    return torch.autograd.grad(value, policy)[0].numpy()


def test_what_each_estimate_minimises_as_a_loss() -> None:
    policy, reference = distributions(1)
    assert np.abs(expected_slope(k1, policy, reference)).max() < 1e-12
    (reverse,) = torch.autograd.grad(kl(policy, reference).sum(), policy)
    assert relative_error(expected_slope(k2, policy, reference), reverse.numpy()) < 1e-12
    p, q = (values.detach().log_softmax(dim=-1).exp().numpy() for values in (policy, reference))
    forward = p - q  # d KL(q || pi) / d logits
    assert relative_error(expected_slope(k3, policy, reference), forward) < 1e-12


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    policy, reference = distributions(2)
    p, log_p, log_q = policy.softmax(-1), policy.log_softmax(-1), reference.log_softmax(-1)
    for estimate in (k1, k3):
        assert (p * estimate(log_p, log_q)).sum().item() == pytest.approx(kl(policy, reference).item(), rel=1e-12)
    assert bool((k3(log_p, log_q) >= 0).all())


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_entropy_and_kl_match_an_independent_computation(scale: float) -> None:
    stream = np.random.default_rng(3)
    scores = (stream.standard_normal((2, 4, 13)) * scale).astype(np.float32)
    policy = torch.tensor(scores[0], requires_grad=True)
    reference = torch.tensor(scores[1], requires_grad=True)

    def entropies(logits: np.ndarray) -> list[float]:
        return [-sum(p * math.log(p) for p in oracle.softmax(row)) for row in logits]

    def divergences(logits: np.ndarray) -> list[float]:
        pairs = zip(logits, scores[1].astype(np.float64), strict=True)
        return [oracle.kl_divergence(oracle.softmax(row), oracle.softmax(other)) for row, other in pairs]

    start = scores[0].astype(np.float64)
    for found, function in ((entropy(policy), entropies), (kl(policy, reference), divergences)):
        assert relative_error(found.detach().numpy(), function(start)) <= 1e-5
        (slope,) = torch.autograd.grad(found.sum(), policy)

        def total(logits: np.ndarray, function: Callable[[np.ndarray], list[float]] = function) -> float:
            return sum(function(logits))

        assert relative_error(slope.numpy(), oracle.gradient(total, start)) <= 1e-5
    assert torch.autograd.grad(kl(policy, reference).sum(), reference, allow_unused=True) == (None,)


def test_off_policy_estimates_match_the_vectors() -> None:
    case = VECTORS["off_policy"]
    weights, rewards = (torch.tensor(case[name], dtype=torch.float64) for name in ("weights", "rewards"))
    assert ips(weights, rewards).item() == pytest.approx(case["ips"], abs=1e-6)
    assert snips(weights, rewards).item() == pytest.approx(case["snips"], abs=1e-6)
    assert effective_sample_size(weights).item() == pytest.approx(case["ess"], abs=1e-6)


def test_importance_weights_are_ratios_up_to_the_cap() -> None:
    policy = torch.tensor([[math.log(0.3), math.log(0.9), -0.1, -700.0]], requires_grad=True)
    behaviour = torch.tensor([[math.log(0.6), math.log(0.5), -500.0, -1.0]])
    found = truncated_importance(policy, behaviour)
    assert found.tolist() == [pytest.approx([0.5, 1.8, 3.0, 0.0])]
    assert not found.requires_grad
    assert truncated_importance(policy, behaviour, cap=1.5).max() == 1.5
    assert truncated_importance(policy.bfloat16(), behaviour.bfloat16()).dtype == torch.float32


def test_weights_below_the_cap_make_ips_unbiased() -> None:
    """Over all choices of the behaviour policy the mean is what the policy would earn."""
    pi, mu, earned = torch.tensor([0.5, 0.2, 0.3]), torch.tensor([0.3, 0.4, 0.3]), torch.tensor([1.0, 0.0, 0.4])
    weights = truncated_importance(pi.log(), mu.log())
    assert (mu * weights * earned).sum().item() == pytest.approx((pi * earned).sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: k1(torch.zeros(2), torch.zeros(3)), r"shapes \(2,\) and \(3,\) do not fit"),
        (lambda: k3(torch.zeros(2, dtype=torch.int64), torch.zeros(2)), "policy is of type torch.int64"),
        (lambda: entropy(torch.zeros(3)), r"logits_K_V has the shape \(3,\)"),
        (lambda: entropy(torch.zeros(0, 3)), r"logits_K_V has the shape \(0, 3\)"),
        (lambda: entropy(torch.tensor([[0.0, math.nan]])), "logits_K_V holds a number that is not finite"),
        (lambda: entropy(torch.tensor([[0.0, -math.inf]])), "logits_K_V holds a number that is not finite"),
        (lambda: kl(torch.zeros(2, 3), torch.zeros(2, 4)), "do not fit"),
        (lambda: kl(torch.zeros(1, 2), torch.tensor([[0.0, math.inf]])), "reference_logits_K_V holds a number"),
        (lambda: truncated_importance(torch.zeros(2), torch.zeros(3)), "do not fit"),
        (lambda: truncated_importance(torch.zeros(2), torch.zeros(2), cap=0.0), "cap = 0.0; a finite number above 0"),
        (lambda: truncated_importance(torch.tensor([math.nan]), torch.zeros(1)), r"log\(pi / mu\) is nan at \(0,\)"),
        (lambda: truncated_importance(torch.zeros(1), torch.tensor([-math.inf])), r"log\(pi / mu\) is inf"),
        (lambda: ips(torch.ones(2), torch.ones(3)), "do not fit"),
        (lambda: ips(torch.ones(0), torch.ones(0)), "do not fit"),
        (lambda: ips(torch.tensor([1.0, -1.0]), torch.ones(2)), r"weights is -1.0 at \(1,\)"),
        (lambda: snips(torch.ones(2), torch.tensor([1.0, math.nan])), r"rewards is nan at \(1,\)"),
        (lambda: snips(torch.zeros(2), torch.ones(2)), "all weights are 0"),
        (lambda: effective_sample_size(torch.ones(2, 2)), "do not fit"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
