"""Policy-gradient objectives against golden numbers, an independent computation, and each other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import objective_oracle as oracle
from objective_oracle import Batch, random_batch, relative_error
from tidegate.core.objectives.policy import PolicyLoss, cispo, grpo, gspo, ppo_clip, reinforce
from tidegate.core.objectives.rows import Aggregation, aggregate
from tidegate.core.objectives.sft import weighted_nll

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("objective_vectors.json").read_text(encoding="utf-8"))
OBJECTIVES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo_clip": ppo_clip,
    "grpo": grpo,
    "reinforce": reinforce,
    "gspo": gspo,
    "cispo": cispo,
}
CLIPS: dict[str, dict[str, float]] = {
    "ppo_clip": {"eps_low": 0.2, "eps_high": 0.28},
    "grpo": {"eps_low": 0.2, "eps_high": 0.2},
    "reinforce": {},
    "gspo": {"eps_low": 0.05, "eps_high": 0.1},
    "cispo": {"eps_low": 0.4, "eps_high": 0.3},
}
ONE = Aggregation(tokens=1, sequences=1)


def counts(batch: Batch, how: Any) -> Aggregation:
    return Aggregation(how=how, tokens=int(batch.mask.sum()), sequences=len(batch.mask), max_length=oracle.MAX_LENGTH)


def run(name: str, batch: Batch, how: str, beta: float, dtype: torch.dtype) -> tuple[PolicyLoss, np.ndarray]:
    """Loss and gradient with everything that an objective takes."""
    logprobs = torch.tensor(batch.logprobs, dtype=dtype, requires_grad=True)
    penalty = {} if name == "ppo_clip" else {"beta": beta, "reference_B_T": torch.tensor(batch.reference, dtype=dtype)}
    found = OBJECTIVES[name](
        logprobs,
        torch.tensor(batch.old, dtype=dtype),
        torch.tensor(batch.mask),
        torch.tensor(batch.advantages, dtype=dtype),
        aggregation=counts(batch, how),
        importance_B_T=torch.tensor(batch.importance, dtype=dtype),
        entropy_B_T=torch.tensor(batch.entropy, dtype=dtype),
        **CLIPS[name],
        **penalty,
    )
    (slope,) = torch.autograd.grad(found.loss, logprobs)
    return found, slope.double().numpy()


@pytest.mark.parametrize("how", ["token", "sequence", "dr_grpo"])
@pytest.mark.parametrize(
    ("name", "per_token"),
    [*((name, False) for name in OBJECTIVES), *((name, True) for name in OBJECTIVES if name != "gspo")],
)
def test_loss_and_gradient_match_an_independent_computation(name: str, per_token: bool, how: str) -> None:
    beta = 0.0 if name == "ppo_clip" else 0.05
    for seed in range(3):
        batch = random_batch(seed, per_token=per_token)

        def loss_at(logprobs: np.ndarray, batch: Batch = batch) -> float:
            moved = replace(batch, logprobs=logprobs)
            return oracle.policy_loss(name, moved, how, CLIPS[name], beta=beta, frozen=batch.logprobs)

        found, slope = run(name, batch, how, beta, torch.float32)
        assert found.loss.dtype == torch.float32
        assert found.loss.item() == pytest.approx(loss_at(batch.logprobs), rel=1e-5)
        assert relative_error(slope, oracle.gradient(loss_at, batch.logprobs)) <= 1e-5
        double, _ = run(name, batch, how, beta, torch.float64)
        assert double.loss.item() == pytest.approx(loss_at(batch.logprobs), rel=1e-12)


def test_the_defaults_of_gspo_clip_where_the_paper_does() -> None:
    for seed in range(4):
        batch = random_batch(seed, spread=2e-3)
        expected = oracle.policy_loss("gspo", batch, "sequence", {"eps_low": 3e-4, "eps_high": 4e-4})
        found = gspo(
            torch.tensor(batch.logprobs, dtype=torch.float32),
            torch.tensor(batch.old, dtype=torch.float32),
            torch.tensor(batch.mask),
            torch.tensor(batch.advantages, dtype=torch.float32),
            aggregation=counts(batch, "sequence"),
            importance_B_T=torch.tensor(batch.importance),
        )
        assert found.loss.item() == pytest.approx(expected, rel=1e-5)
        clipped = [
            row
            for row, advantage in enumerate(batch.advantages)
            if (oracle.sequence_ratio(batch, row) > 1 + 4e-4 and advantage > 0)
            or (oracle.sequence_ratio(batch, row) < 1 - 3e-4 and advantage < 0)
        ]
        assert found.clipped_tokens == batch.mask[clipped].sum()


@pytest.mark.parametrize("case", VECTORS["ppo_clip"])
def test_ppo_clip_matches_the_vectors(case: dict[str, float]) -> None:
    arguments = [torch.tensor([[math.log(case[name])]], dtype=torch.float64) for name in ("new_prob", "old_prob")]
    found = ppo_clip(
        *arguments,
        torch.ones(1, 1),
        torch.tensor([case["advantage"]]).double(),
        aggregation=ONE,
        eps_low=case["eps"],
        eps_high=case["eps"],
    )
    assert -found.loss.item() == pytest.approx(case["value"], rel=1e-6)


def test_what_is_reported_adds_up_from_the_tokens() -> None:
    batch = random_batch(11)
    found, _ = run("grpo", batch, "token", 0.0, torch.float64)
    places = list(zip(*np.nonzero(batch.mask), strict=True))
    ratios = {place: math.exp(batch.logprobs[place] - batch.old[place]) for place in places}
    clipped = sum(
        (ratios[place] > 1.2 and batch.advantages[place[0]] > 0)
        or (ratios[place] < 0.8 and batch.advantages[place[0]] < 0)
        for place in places
    )
    assert (found.sequences, found.tokens, found.clipped_tokens) == (5, len(places), clipped)
    assert 0 < clipped < len(places)
    sums = (found.ratio_sum, found.old_kl_sum, found.reference_kl_sum, found.entropy_sum, found.importance_sum)
    assert sums == pytest.approx(
        (
            sum(ratios.values()),
            sum(oracle.kl_k3(batch.old[place], batch.logprobs[place]) for place in places),
            sum(oracle.kl_k3(batch.logprobs[place], batch.reference[place]) for place in places),
            batch.entropy[batch.mask].sum(),
            batch.importance[batch.mask].sum(),
        ),
        rel=1e-12,
    )
    assert found.importance_square_sum == pytest.approx((batch.importance[batch.mask] ** 2).sum(), rel=1e-12)
    bounded, _ = run("cispo", batch, "token", 0.0, torch.float64)
    assert bounded.clipped_tokens == sum(ratio < 0.6 or ratio > 1.3 for ratio in ratios.values()) > 0


def test_what_was_not_given_is_not_reported() -> None:
    found = reinforce(-torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3), torch.ones(2), aggregation=SIX)
    assert (found.reference_kl_sum, found.entropy_sum) == (None, None)
    assert (found.importance_sum, found.importance_square_sum, found.clipped_tokens) == (6.0, 6.0, 0)


SIX = Aggregation(tokens=6, sequences=2)


@pytest.mark.parametrize("how", ["token", "sequence", "dr_grpo"])
@pytest.mark.parametrize("name", ["ppo_clip", "grpo", "gspo", "cispo"])
def test_before_the_first_step_all_gradients_are_those_of_reinforce(name: str, how: str) -> None:
    start = random_batch(3)
    even = np.repeat(start.importance[:, :1], start.mask.shape[1], axis=1)  # gspo averages over a sequence's tokens
    batch = replace(start, old=start.logprobs, importance=even if name == "gspo" else start.importance)
    _, slope = run(name, batch, how, 0.0, torch.float64)
    _, plain = run("reinforce", batch, how, 0.0, torch.float64)
    assert relative_error(slope, plain) <= 1e-12


def test_a_clipped_token_has_no_gradient_in_ppo_and_one_in_cispo() -> None:
    old = torch.tensor([[math.log(0.2)] * 4]).double()
    logprobs = torch.log(torch.tensor([[0.3, 0.1, 0.3, 0.1]]).double()).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0]]).double()
    four = Aggregation(tokens=4, sequences=1)
    (clipped,) = torch.autograd.grad(
        ppo_clip(logprobs, old, torch.ones(1, 4), advantages, aggregation=four).loss, logprobs
    )
    assert clipped.tolist() == [pytest.approx([0.0, 0.0, 1.5 / 4, -0.5 / 4])]
    (weighted,) = torch.autograd.grad(
        cispo(logprobs, old, torch.ones(1, 4), advantages, aggregation=four, eps_high=0.2).loss, logprobs
    )
    assert weighted.tolist() == [pytest.approx([-1.2 / 4, 0.5 / 4, 1.2 / 4, -0.5 / 4])]


def test_reinforce_with_advantage_1_is_the_supervised_objective() -> None:
    torch.manual_seed(5)
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 9, (6,))
    supervised = weighted_nll(logits, targets, torch.ones(6), total_weight=6.0)
    rows = logits.log_softmax(dim=-1).gather(1, targets[:, None]).view(2, 3)
    found = reinforce(rows, rows.detach(), torch.ones(2, 3), torch.ones(2), aggregation=SIX)
    assert found.loss.item() == pytest.approx(supervised.item(), rel=1e-12)
    slopes = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found.loss, supervised)]
    assert relative_error(slopes[0], slopes[1]) <= 1e-12


def test_the_penalty_adds_its_own_gradient() -> None:
    batch = random_batch(8)
    _, without = run("grpo", batch, "token", 0.0, torch.float64)
    _, penalised = run("grpo", batch, "token", 0.04, torch.float64)
    expected = 0.04 * (1 - np.exp(batch.reference - batch.logprobs)) * batch.importance * batch.mask / batch.mask.sum()
    assert relative_error(penalised - without, expected) <= 1e-9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_flow_into_the_current_policy_only(name: str) -> None:
    batch = random_batch(2)
    inputs = [
        torch.tensor(values, requires_grad=True)
        for values in (batch.logprobs, batch.old, batch.advantages, batch.importance, batch.reference)
    ]
    penalty = {} if name == "ppo_clip" else {"beta": 0.1, "reference_B_T": inputs[4]}
    found = OBJECTIVES[name](
        inputs[0],
        inputs[1],
        torch.tensor(batch.mask),
        inputs[2],
        aggregation=counts(batch, "token"),
        importance_B_T=inputs[3],
        **penalty,
    )
    slopes = torch.autograd.grad(found.loss, inputs, allow_unused=True)
    assert slopes[0] is not None
    assert slopes[1:] == (None, None, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    batch = random_batch(4)
    halves = [torch.tensor(values).to(dtype) for values in (batch.logprobs, batch.old, batch.advantages)]
    mask = torch.tensor(batch.mask)
    found = ppo_clip(halves[0], halves[1], mask, halves[2], aggregation=counts(batch, "token"))
    single = [half.float() for half in halves]
    expected = ppo_clip(single[0], single[1], mask, single[2], aggregation=counts(batch, "token"))
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == expected.loss.item()


def test_the_three_averages_by_hand() -> None:
    losses, mask = torch.tensor([[1.0, 2.0, 3.0], [6.0, 9.0, math.nan]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = {"token": 12 / 4, "sequence": (2 + 6) / 2, "dr_grpo": 12 / (2 * 5)}
    for how, value in expected.items():
        settings: dict[str, Any] = {"how": how, "tokens": 4, "sequences": 2, "max_length": 5}
        assert aggregate(losses, mask, Aggregation(**settings)).item() == pytest.approx(value)


def changed(**inputs: Any) -> dict[str, Any]:
    """Two rows of three tokens that an objective takes, with some inputs replaced."""
    names = ("logprobs_B_T", "old_B_T", "mask_B_T", "advantages")
    values = (-torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2, 3), torch.ones(2))
    return dict(zip(names, values, strict=True)) | {"aggregation": SIX} | inputs


def at(value: float, fill: float = -1.0) -> torch.Tensor:
    """Two rows of three with one odd value in the second."""
    rows = torch.full((2, 3), fill)
    rows[1, 2] = value
    return rows


@pytest.mark.parametrize(
    ("objective", "inputs", "message"),
    [
        (ppo_clip, changed(old_B_T=-torch.ones(2, 4)), r"old_B_T \(2, 4\) and mask \(2, 3\) do not fit"),
        (ppo_clip, changed(mask_B_T=torch.ones(2, 4)), r"mask \(2, 4\) do not fit"),
        (ppo_clip, changed(mask_B_T=at(0.5, 1.0)), "other values than 0 and 1"),
        (ppo_clip, changed(mask_B_T=torch.tensor([[1, 1, 1], [0, 0, 0]])), "row 1 trains no token"),
        (ppo_clip, changed(logprobs_B_T=-torch.ones(0, 3), mask_B_T=torch.ones(0, 3)), "do not fit"),
        (ppo_clip, changed(advantages=torch.ones(3)), r"advantages \(3,\) and mask \(2, 3\) do not fit"),
        (ppo_clip, changed(advantages=torch.tensor([1.0, math.nan])), r"advantages is nan at \(1, 0\)"),
        (ppo_clip, changed(logprobs_B_T=at(math.nan)), r"logprobs_B_T is nan at \(1, 2\)"),
        (ppo_clip, changed(old_B_T=at(-math.inf)), r"old_B_T is -inf at \(1, 2\)"),
        (ppo_clip, changed(logprobs_B_T=at(0.3)), r"logprobs_B_T is 0.3.* log-probabilities, up to 0"),
        (ppo_clip, changed(old_B_T=at(-200.0)), r"pi / old is inf at \(1, 2\); the policies are too far apart"),
        (ppo_clip, changed(logprobs_B_T=torch.ones(2, 3, dtype=torch.int64)), "int64; a float type is expected"),
        (ppo_clip, changed(eps_low=-0.1), r"eps_low = -0.1; a finite number in \[0, 1\]"),
        (ppo_clip, changed(eps_low=1.1), "eps_low = 1.1"),
        (ppo_clip, changed(eps_high=-0.1), "eps_high = -0.1; a finite number >= 0"),
        (gspo, changed(eps_high=math.nan), "eps_high = nan"),
        (cispo, changed(eps_low=-1.0), "eps_low = -1.0"),
        (gspo, changed(advantages=torch.ones(2, 3)), "one for each sequence"),
        (grpo, changed(beta=-0.1), "beta = -0.1"),
        (grpo, changed(beta=0.1), "beta = 0.1 without reference_B_T"),
        (grpo, changed(beta=0.1, reference_B_T=at(math.nan)), "reference_B_T is nan"),
        (grpo, changed(logprobs_B_T=at(-150.0), old_B_T=at(-150.0), reference_B_T=at(-1.0)), "k3 is inf"),
        (grpo, changed(beta=0.1, reference_B_T=-torch.ones(2, 1)), "do not fit"),
        (reinforce, changed(importance_B_T=at(-0.5, 1.0)), "importance_B_T is -0.5"),
        (reinforce, changed(importance_B_T=at(math.inf, 1.0)), "importance_B_T is inf"),
        (reinforce, changed(importance_B_T=torch.ones(2)), "do not fit"),
        (reinforce, changed(entropy_B_T=at(math.nan, 1.0)), "entropy_B_T is nan"),
        (
            reinforce,
            changed(aggregation=Aggregation(tokens=5, sequences=2)),
            "6 trained tokens in 2 sequences are more",
        ),
        (reinforce, changed(aggregation=Aggregation(tokens=6, sequences=1)), "more than the 6 in 1 that the whole"),
    ],
)
def test_bad_input_is_refused(objective: Callable[..., PolicyLoss], inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(**inputs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"how": "mean", "tokens": 1, "sequences": 1}, "unknown aggregation 'mean'; choose one of 'token', 'sequence'"),
        ({"tokens": 0, "sequences": 1}, "tokens = 0, sequences = 1 cannot normalise"),
        ({"tokens": 1, "sequences": 0}, "sequences = 0 cannot normalise"),
        ({"how": "dr_grpo", "tokens": 1, "sequences": 1}, "max_length = 0; 'dr_grpo' divides by"),
    ],
)
def test_counts_that_normalise_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Aggregation(**settings)
