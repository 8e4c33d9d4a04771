"""Gaps between two statements of the same tokens, and what is refused and why."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tidegate.core.agreement import (
    MANIFEST_KEY,
    AgreementRecord,
    ScoredSequence,
    Tolerance,
    gap_between,
    objection_to,
    record_in,
)
from tidegate.core.errors import AdapterError

TOLERANCE = Tolerance(max_nats=0.5, mean_nats=0.1)
TRAINED = ((-0.1, -2.0, -0.5, -3.0, -0.2), (-1.0, -0.3, -4.0, -0.7, -2.5))
BASE = ((-1.1, -0.4, -2.5, -1.2, -0.9), (-0.2, -1.6, -2.2, -2.4, -0.8))


def record(base: Sequence[tuple[float, ...]] = BASE) -> AgreementRecord:
    return AgreementRecord(
        dtype="float32",
        sequences=tuple(
            ScoredSequence(token_ids=tuple(range(7)), first=2, logprobs=mine, base_logprobs=theirs)
            for mine, theirs in zip(TRAINED, base, strict=True)
        ),
    )


def moved(by: float) -> list[tuple[float, ...]]:
    """The trained ones, every other token up and every other down."""
    return [tuple(value + by * (-1) ** at for at, value in enumerate(part)) for part in TRAINED]


def test_a_gap_has_all_its_figures() -> None:
    gap = gap_between([(-1.0, -2.0, -3.0)], [(-1.0, -1.5, -3.25)], tolerance=Tolerance(max_nats=0.3, mean_nats=0.1))
    assert (gap.tokens, gap.max, gap.mean, gap.p99) == (3, 0.5, 0.25, 0.5)
    assert gap.above == pytest.approx(1 / 3)
    assert (gap.ratio_low, gap.ratio_high) == pytest.approx((math.exp(-0.25), math.exp(0.5)))


def test_the_99th_percentile_leaves_one_in_a_hundred_out() -> None:
    one, other = [(0.0,) * 200], [(*(0.0,) * 198, 9.0, 9.0)]
    assert gap_between(one, other, tolerance=TOLERANCE).p99 == 0.0
    assert gap_between(one, [(*other[0][1:], 9.0)], tolerance=TOLERANCE).p99 == 9.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_never_agrees(odd: float) -> None:
    for one, other in (((odd,), (-1.0,)), ((-1.0,), (odd,)), ((odd,), (odd,))):
        gap = gap_between([one], [other], tolerance=TOLERANCE)
        assert gap.max == math.inf
        assert not gap.within(TOLERANCE)


@pytest.mark.parametrize(("one", "other"), [([(-1.0,)], [(-1.0, -2.0)]), ([(-1.0,)], []), ([()], [()])])
def test_statements_of_other_tokens_are_refused(one: Any, other: Any) -> None:
    with pytest.raises(ValueError, match=r"against|no token"):
        gap_between(one, other, tolerance=TOLERANCE)


def test_rounding_agrees_and_says_how_far() -> None:
    gap, objection = objection_to(record(), moved(0.05), tolerance=TOLERANCE)
    assert objection is None
    assert (gap.max, gap.mean) == pytest.approx((0.05, 0.05))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (BASE, "answers with the base weights"),
        ([(0.0, *part[:-1]) for part in TRAINED], "for the wrong tokens"),
        ([(*part[1:], 0.0) for part in TRAINED], "for the wrong tokens"),
        ([tuple(value / 0.5 for value in part) for part in TRAINED], r"up to 4 nats, 1\.43 in the mean of 10 tokens"),
        (moved(0.2), r"up to 0\.2 nats, 0\.2 in the mean of 10 tokens; up to 0\.5 and 0\.1 are accepted$"),
        ([tuple(math.nan for _ in part) for part in TRAINED], "inf"),
    ],
)
def test_another_distribution_is_refused_with_its_figures(found: Any, says: str) -> None:
    _, objection = objection_to(record(), found, tolerance=TOLERANCE)
    assert objection is not None
    assert re.search(says, objection), objection


def test_one_token_far_off_is_refused_whatever_the_mean() -> None:
    found = [(*TRAINED[0][:-1], TRAINED[0][-1] - 0.6), TRAINED[1]]
    gap, objection = objection_to(record(), found, tolerance=TOLERANCE)
    assert gap.mean < TOLERANCE.mean_nats
    assert objection is not None


def test_a_base_that_lies_within_the_tolerance_is_not_taken_for_the_adapter() -> None:
    """The adapter changed little: less than what the tolerance lets pass."""
    base = tuple(tuple(value - 0.02 for value in part) for part in TRAINED)
    assert objection_to(record(base), TRAINED, tolerance=TOLERANCE)[1] is None
    gap, objection = objection_to(record(base), base, tolerance=TOLERANCE)
    assert gap.within(TOLERANCE)
    assert "base weights" in str(objection)


def test_noise_larger_than_the_adapter_is_not_taken_for_the_base() -> None:
    base = tuple(tuple(value - 0.001 for value in part) for part in TRAINED)
    assert objection_to(record(base), moved(0.03), tolerance=TOLERANCE)[1] is None


def test_a_record_comes_back_from_a_manifest() -> None:
    assert record_in({MANIFEST_KEY: record().to_json()}, adapter="a") == record()
    assert record_in({"base_sha256": "b" * 64}, adapter="a") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.update(schema="tidegate.agreement/9"),
        lambda values: values.update(sequences=[]),
        lambda values: values.update(sequences=values["sequences"] * 5),
        lambda values: values.pop("dtype"),
        lambda values: values["sequences"][0].update(first=0),
        lambda values: values["sequences"][0].update(first=7),
        lambda values: values["sequences"][0].update(token_ids=list(range(600))),
        lambda values: values["sequences"][0].update(token_ids=[-1] * 7),
        lambda values: values["sequences"][0].update(token_ids=["1"] * 7),
        lambda values: values["sequences"][0]["logprobs"].pop(),
        lambda values: values["sequences"][0].update(logprobs=[math.nan] * 5),
        lambda values: values["sequences"][1].update(base_logprobs=None),
        lambda values: values.update(sequences="text"),
    ],
)
def test_what_is_no_record_is_refused_by_name(damage: Any) -> None:
    values = record().to_json()
    damage(values)
    with pytest.raises(AdapterError, match=r"adapter 'm-r1-aaaaaaaa': 'agreement'.*train it anew"):
        record_in({MANIFEST_KEY: values}, adapter="m-r1-aaaaaaaa")
    with pytest.raises(AdapterError):
        record_in({MANIFEST_KEY: "text"}, adapter="a")


def test_a_part_of_a_record_is_compared_alone() -> None:
    part = replace(record(), sequences=record().sequences[:1])
    gap, objection = objection_to(part, TRAINED[:1], tolerance=TOLERANCE)
    assert (gap.tokens, objection) == (5, None)
