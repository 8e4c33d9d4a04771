"""DPO and KTO against numbers worked out by hand and an independent computation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import objective_oracle as oracle
from objective_oracle import relative_error
from tidegate.core.objectives.preference import dpo, kto, kto_baseline


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sums(seed: int, rows: int, columns: int) -> np.ndarray:
    """Log-probabilities of whole answers, single-precision numbers."""
    values = -np.random.default_rng(seed).uniform(1, 60, (columns, rows))
    return values.astype(np.float32).astype(np.float64)


def test_dpo_by_hand() -> None:
    # Margin .1 * ((-10 + 12) - (-8 + 7)) = .3: loss ln(1 + exp(-.3)), slope -.1 / (1 + exp(.3)).
    inputs = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (-10.0, -8.0, -12.0, -7.0)]
    found = dpo(*inputs, total=1)
    assert found.loss.item() == pytest.approx(0.5543552444685272, rel=1e-12)
    slopes = torch.autograd.grad(found.loss, inputs, allow_unused=True)
    assert slopes[0] is not None
    assert slopes[1] is not None
    assert (slopes[0].item(), slopes[1].item()) == pytest.approx((-0.04255574831883411, 0.04255574831883411), rel=1e-9)
    assert slopes[2:] == (None, None)
    assert (found.pairs, found.correct) == (1, 1)
    assert (found.chosen_reward_sum, found.rejected_reward_sum) == pytest.approx((0.2, -0.1))


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_matches_an_independent_computation(beta: float) -> None:
    values = sums(1, 6, 4)

    def loss_at(policy: np.ndarray) -> float:
        margins = [beta * ((c - rc) - (r - rr)) for c, r, rc, rr in zip(*policy, values[2], values[3], strict=True)]
        return sum(-math.log(sigmoid(margin)) for margin in margins) / 8

    single = torch.tensor(values, dtype=torch.float32)
    chosen, rejected = single[0].clone().requires_grad_(), single[1].clone().requires_grad_()
    found = dpo(chosen, rejected, single[2], single[3], total=8, beta=beta)
    assert found.loss.item() == pytest.approx(loss_at(values[:2]), rel=1e-5)
    slopes = [slope.numpy() for slope in torch.autograd.grad(found.loss, (chosen, rejected))]
    assert relative_error(slopes, oracle.gradient(loss_at, values[:2])) <= 1e-5
    margins = (values[0] - values[2]) - (values[1] - values[3])
    assert found.correct == int((margins > 0).sum())
    assert 0 < found.correct < 6


def test_a_hopeless_pair_has_a_finite_loss_and_its_whole_gradient() -> None:
    chosen = torch.tensor([-9000.0], requires_grad=True)
    found = dpo(chosen, torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([-9000.0]), total=1)
    assert found.loss.item() == pytest.approx(0.1 * 2 * 8999, rel=1e-6)
    assert torch.autograd.grad(found.loss, chosen)[0].item() == pytest.approx(-0.1, rel=1e-6)


def test_kto_by_hand() -> None:
    # Log-ratios 4 and -1, z = 2, beta .5: 1 - sigmoid(1) liked; 1 - sigmoid(1.5), weight 3, disliked; over 2 answers.
    policy = torch.tensor([-6.0, -9.0], dtype=torch.float64, requires_grad=True)
    found = kto(
        policy,
        torch.tensor([-10.0, -8.0], dtype=torch.float64),
        torch.tensor([True, False]),
        total=2,
        baseline=2.0,
        beta=0.5,
        undesirable_weight=3.0,
    )
    liked, disliked = sigmoid(1.0), sigmoid(1.5)
    assert found.loss.item() == pytest.approx(0.2689414213699951 / 2 + 3 * 0.18242552380635635 / 2, rel=1e-12)
    slopes = torch.autograd.grad(found.loss, policy)[0].tolist()
    expected = [-0.5 * liked * (1 - liked) / 2, 3 * 0.5 * disliked * (1 - disliked) / 2]
    assert slopes == pytest.approx(expected, rel=1e-12)
    assert (found.desirable, found.undesirable) == (1, 1)
    assert (found.desirable_reward_sum, found.undesirable_reward_sum) == (2.0, -0.5)


def test_kto_matches_an_independent_computation() -> None:
    values = sums(2, 7, 2)
    liked = np.array([True, False, False, True, False, True, True])
    z = kto_baseline(torch.tensor(np.roll(values[0], 1)), torch.tensor(values[1]))
    assert z == pytest.approx(max(0.0, (values[0].sum() - values[1].sum()) / 7), rel=1e-12)

    def loss_at(policy: np.ndarray) -> float:
        total = 0.0
        for log_pi, log_ref, good in zip(policy, values[1], liked, strict=True):
            reward = log_pi - log_ref
            total += 1.3 - 1.3 * sigmoid(0.1 * (reward - z)) if good else 0.8 - 0.8 * sigmoid(0.1 * (z - reward))
        return total / 7

    policy = torch.tensor(values[0], dtype=torch.float32, requires_grad=True)
    reference = torch.tensor(values[1], dtype=torch.float32)
    settings: dict[str, Any] = {"desirable_weight": 1.3, "undesirable_weight": 0.8, "total": 7, "baseline": z}
    found = kto(policy, reference, torch.tensor(liked), **settings)
    assert found.loss.item() == pytest.approx(loss_at(values[0]), rel=1e-5)
    (slope,) = torch.autograd.grad(found.loss, policy)
    assert relative_error(slope.numpy(), oracle.gradient(loss_at, values[0])) <= 1e-5


def test_the_baseline_is_never_negative_and_has_no_gradient() -> None:
    policy = torch.tensor([-3.0, -1.0], requires_grad=True)
    assert kto_baseline(policy, torch.tensor([-1.0, -1.0])) == 0.0
    assert kto_baseline(policy, torch.tensor([-5.0, -2.0])) == pytest.approx(1.5)


TWO = -torch.ones(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejected_B": -torch.ones(3), "reference_rejected_B": -torch.ones(3)}, "2 chosen and 3 rejected answers"),
        ({"reference_chosen_B": -torch.ones(3)}, r"chosen_B \(2,\) and reference \(3,\) do not fit"),
        ({"chosen_B": -torch.ones(2, 1)}, "pairs are expected"),
        ({"chosen_B": torch.tensor([-1.0, math.nan])}, r"chosen_B is nan at \(1,\)"),
        ({"rejected_B": torch.tensor([0.5, -1.0])}, r"rejected_B is 0.5 at \(0,\)"),
        ({"reference_rejected_B": torch.tensor([-1.0, -math.inf])}, "reference of rejected_B is -inf"),
        ({"beta": 0.0}, "beta = 0.0 would teach nothing"),
        ({"beta": -0.1}, "beta = -0.1; a finite number"),
        ({"total": 1}, "total = 1 for 2 rows"),
        ({"weights_B": torch.ones(3)}, "3 weights for 2 losses"),
        ({"weights_B": torch.tensor([1.0, -1.0])}, "weights_B is -1.0"),
        ({"weights_B": torch.tensor([math.nan, 1.0])}, "weights_B is nan"),
    ],
)
def test_bad_pairs_are_refused(changes: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = dict.fromkeys(
        ("chosen_B", "rejected_B", "reference_chosen_B", "reference_rejected_B"), TWO
    )
    with pytest.raises(ValueError, match=message):
        dpo(**(inputs | {"total": 2} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference_B": -torch.ones(3)}, "do not fit"),
        ({"policy_B": -torch.ones(0), "reference_B": -torch.ones(0), "desirable_B": torch.ones(0) > 0}, "do not fit"),
        ({"policy_B": torch.tensor([-1.0, math.nan])}, "policy_B is nan"),
        ({"desirable_B": torch.ones(2)}, "desirable_B is torch.float32"),
        ({"desirable_B": torch.ones(3) > 0}, r"shape \(3,\); bool of shape \(2,\) is expected"),
        ({"baseline": -0.1}, "baseline = -0.1"),
        ({"baseline": math.nan}, "baseline = nan"),
        ({"desirable_weight": 0.0}, "desirable_weight = 0.0 would teach nothing"),
        ({"undesirable_weight": -1.0}, "undesirable_weight = -1.0"),
        ({"beta": 0.0}, "beta = 0.0"),
        ({"total": 1}, "total = 1 for 2 rows"),
    ],
)
def test_bad_thumbs_are_refused(changes: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {"policy_B": TWO, "reference_B": TWO, "desirable_B": torch.ones(2) > 0}
    with pytest.raises(ValueError, match=message):
        kto(**(inputs | {"total": 2, "baseline": 0.0} | changes))
