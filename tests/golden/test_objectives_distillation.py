"""On-policy distillation against the exact divergence and an independent computation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import objective_oracle as oracle
from objective_oracle import relative_error
from tidegate.core.objectives.distillation import bucket_logprobs, captured_buckets, opd, opd_sampled
from tidegate.core.objectives.divergence import kl
from tidegate.core.objectives.rows import Aggregation

VOCABULARY = 11
SIX = Aggregation(tokens=6, sequences=2)
ALL = torch.ones(2, 3)


def scores(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Student and teacher logits (6, V) of single-precision numbers, and the teacher's four likeliest tokens."""
    torch.manual_seed(seed)
    student, teacher = (torch.randn(2, 6, VOCABULARY) * 2).to(dtype)
    return student.requires_grad_(), teacher, teacher.topk(4, dim=1).indices


def rows(values: torch.Tensor) -> torch.Tensor:
    """(6, ...) as two rows of three tokens."""
    return values.reshape(2, 3, *values.shape[1:])


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_match_an_independent_computation(seed: int) -> None:
    student, teacher, ids = scores(seed, torch.float32)
    weights = torch.rand(2, 3)

    def loss_at(logits: np.ndarray) -> float:
        total = 0.0
        for row, other, named, weight in zip(
            logits, teacher.double().numpy(), ids.tolist(), weights.view(-1), strict=True
        ):
            p, q = oracle.bucketed(oracle.softmax(row), named), oracle.bucketed(oracle.softmax(other), named)
            total += float(weight) * oracle.kl_divergence(p, q)
        return total / 6

    start = student.detach().double().numpy()
    found = opd(
        rows(bucket_logprobs(student, ids)),
        rows(captured_buckets(teacher.log_softmax(dim=1).gather(1, ids))),
        ALL,
        aggregation=SIX,
        importance_B_T=weights,
    )
    assert found.loss.item() == pytest.approx(loss_at(start), rel=1e-5)
    (slope,) = torch.autograd.grad(found.loss, student)
    assert relative_error(slope.numpy(), oracle.gradient(loss_at, start)) <= 1e-5
    assert (found.sequences, found.tokens) == (2, 6)


def test_the_gradient_is_the_stated_one() -> None:
    student, teacher, ids = scores(4, torch.float64)
    p, q = bucket_logprobs(student, ids), bucket_logprobs(teacher, ids)
    found = opd(rows(p), rows(q), ALL, aggregation=SIX)
    (slope,) = torch.autograd.grad(found.loss, student)
    with torch.no_grad():
        gaps = p - q
        each = (p.exp() * gaps).sum(dim=1, keepdim=True)
        of_token = gaps[:, -1:].expand(6, VOCABULARY).scatter(1, ids, gaps[:, :-1])
        expected = student.softmax(dim=1) * (of_token - each) / 6
    assert relative_error(slope.numpy(), expected.numpy()) < 1e-12
    assert found.kl_sum == pytest.approx(each.sum().item(), rel=1e-12)


def test_buckets_of_single_tokens_give_the_exact_divergence_and_merging_some_can_only_lower_it() -> None:
    student, teacher, ids = scores(5, torch.float64)
    exact = kl(student, teacher)
    whole = opd(rows(student.log_softmax(1)), rows(teacher.log_softmax(1)), ALL, aggregation=SIX)
    assert whole.kl_sum == pytest.approx(exact.sum().item(), rel=1e-12)
    merged = [
        opd(rows(bucket_logprobs(student, some)), rows(bucket_logprobs(teacher, some)), ALL, aggregation=SIX).kl_sum
        for some in (ids[:, :1], ids[:, :2], ids)
    ]
    assert 0 < merged[0] < merged[1] < merged[2] < whole.kl_sum


def test_tails_of_one_shape_lose_nothing() -> None:
    student, teacher, ids = scores(6, torch.float64)
    inside = teacher.detach().clone()
    inside.scatter_(1, ids, student.detach().gather(1, ids))  # likely tokens differ, the others are alike
    alike = opd(rows(bucket_logprobs(inside, ids)), rows(bucket_logprobs(teacher, ids)), ALL, aggregation=SIX)
    assert alike.kl_sum == pytest.approx(kl(inside, teacher).sum().item(), rel=1e-12)


def test_the_sampled_estimate_has_the_gradient_of_the_exact_divergence_in_expectation() -> None:
    student, teacher, _ = scores(7, torch.float64)
    one = student[:1].detach().requires_grad_()
    mean = torch.zeros_like(one)
    for token in range(VOCABULARY):
        sampled, wanted = one.log_softmax(1)[:, [token]], teacher[:1].log_softmax(1)[:, [token]]
        found = opd_sampled(
            sampled, sampled.detach(), wanted, torch.ones(1, 1), aggregation=Aggregation(tokens=1, sequences=1)
        )
        (slope,) = torch.autograd.grad(found.loss, one)
        mean += sampled.detach().exp() * slope
    (expected,) = torch.autograd.grad(kl(one, teacher[:1]).sum(), one)
    assert relative_error(mean.numpy(), expected.numpy()) < 1e-12


def test_the_sampled_estimate_reports_the_divergence_to_the_teacher() -> None:
    student = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    teacher = torch.tensor([[-1.5, -0.5]], requires_grad=True)
    pair = Aggregation(tokens=2, sequences=1)
    found = opd_sampled(student, student.detach(), teacher, torch.ones(1, 2), aggregation=pair)
    assert found.reference_kl_sum == pytest.approx(oracle.kl_k3(-1.0, -1.5) + oracle.kl_k3(-2.0, -0.5), rel=1e-6)
    slopes = torch.autograd.grad(found.loss, (student, teacher), allow_unused=True)
    assert slopes[0] is not None
    assert slopes[0].tolist() == [pytest.approx([0.5 / 2, -1.5 / 2])]
    assert slopes[1] is None


def test_small_tails_keep_their_digits_and_gradients_stay_finite() -> None:
    logits = torch.tensor([[40.0, 0.0, 1.0, 2.0]], requires_grad=True)
    found = bucket_logprobs(logits, torch.tensor([[0]]))
    assert found[0, 1].item() == pytest.approx(math.log(1 + math.e + math.e**2) - 40, rel=1e-6)
    (slope,) = torch.autograd.grad(found[0, 1], logits)
    assert bool(torch.isfinite(slope).all())


def test_a_captured_tail_is_what_is_left_and_never_nothing() -> None:
    left = captured_buckets(torch.tensor([[0.5, 0.3], [0.9, 0.1], [0.6, 0.3999999]]).log())
    assert left[0].exp().tolist() == pytest.approx([0.5, 0.3, 0.2], rel=1e-6)
    assert left[1:, 2].exp().tolist() == pytest.approx([1e-6, 1e-6], rel=1e-5)


def test_no_gradient_flows_into_the_teacher() -> None:
    student, teacher, ids = scores(8, torch.float32)
    wanted = bucket_logprobs(teacher.requires_grad_(), ids)
    found = opd(rows(bucket_logprobs(student, ids)), rows(wanted), ALL, aggregation=SIX)
    assert torch.autograd.grad(found.loss, (student, teacher), allow_unused=True)[1] is None


HALVES = torch.full((2, 3, 2), math.log(0.5))


def odd(value: float) -> torch.Tensor:
    changed = HALVES.clone()
    changed[1, 2, 0] = value
    return changed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: opd(HALVES[:, :, 0], HALVES, ALL, aggregation=SIX), r"student_B_T_C has the shape \(2, 3\)"),
        (lambda: opd(HALVES, HALVES[:, :2], ALL, aggregation=SIX), r"teacher_B_T_C \(2, 2, 2\) and mask"),
        (lambda: opd(HALVES, torch.full((2, 3, 4), math.log(0.25)), ALL, aggregation=SIX), r"teacher \(2, 3, 4\) do"),
        (lambda: opd(HALVES, HALVES, torch.zeros(2, 3), aggregation=SIX), "row 0 trains no token"),
        (lambda: opd(odd(math.nan), HALVES, ALL, aggregation=SIX), r"student_B_T_C is nan at \(1, 2, 0\)"),
        (lambda: opd(HALVES, odd(-math.inf), ALL, aggregation=SIX), r"teacher_B_T_C is -inf at \(1, 2, 0\)"),
        (
            lambda: opd(HALVES, odd(-2.0), ALL, aggregation=SIX),
            r"the sum of a token's teacher_B_T_C is 0.63.* \(1, 2\)",
        ),
        (lambda: opd(HALVES, HALVES, ALL, aggregation=SIX, importance_B_T=-ALL), "importance_B_T is -1.0"),
        (lambda: opd_sampled(-ALL, -ALL, -torch.ones(2, 1), ALL, aggregation=SIX), r"teacher_B_T \(2, 1\) and mask"),
        (lambda: opd_sampled(-ALL, -ALL, -ALL * math.inf, ALL, aggregation=SIX), "teacher_B_T is -inf"),
        (lambda: bucket_logprobs(torch.zeros(2, 3), torch.zeros(3, 1, dtype=torch.int64)), "do not fit"),
        (lambda: bucket_logprobs(torch.zeros(1, 3), torch.tensor([[0, 1, 2]])), "1 <= K < V is expected"),
        (lambda: bucket_logprobs(torch.zeros(1, 3), torch.tensor([[3]])), r"token ids in \[0, 3\)"),
        (lambda: bucket_logprobs(torch.zeros(1, 3), torch.tensor([[1.0]])), r"ids_N_K \(torch.float32\)"),
        (lambda: bucket_logprobs(torch.zeros(1, 3), torch.tensor([[1, 1]])), "names a token twice"),
        (lambda: bucket_logprobs(torch.tensor([[0.0, math.nan]]), torch.tensor([[0]])), "logits_N_V holds a number"),
        (lambda: captured_buckets(torch.zeros(3)), r"topk_N_K has the shape \(3,\)"),
        (lambda: captured_buckets(torch.tensor([[-1.0, -math.inf]])), r"topk_N_K is -inf at \(0, 1\)"),
        (lambda: captured_buckets(torch.tensor([[-0.1, -0.2]])), "the sum of a row's probabilities is 1.7"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
