"""Laws of the decision: order does not matter, missing data never helps, an equal pair is never promoted."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gate_engine import Pair, Row, columns_of, make_policy
from tidegate.core.gate import Abstain, Evidence, Promote, certify
from tidegate.core.gate.certify import slices
from tidegate.core.gate.evidence import decode_pairs, encode_pairs
from tidegate.core.hashing import canonical_json
from tidegate.core.statistics import Ledger

POLICY = make_policy(
    sealed__min_pairs=10,
    sealed__max_error_share=0.5,
    non_inferiority__slice_margin=0.6,
    non_inferiority__overall_margin=0.3,
)
LEDGER = Ledger(alpha=0.3, looks=1)


def outcome(rng: random.Random, skill: float) -> Row:
    flags = ("no_reply", "invalid_tool_call", "refused", "engine_error", "verifier_error")
    return Row(
        passed=rng.random() < skill,
        reward=min(rng.random() + skill / 2, 1.0),
        tokens=rng.randint(1, 14),
        milliseconds=rng.randint(80, 200),
        **{flag: rng.random() < 0.04 for flag in flags},
    )


def evidence_of(pairs: Sequence[Pair], *, graded: bool = False) -> Evidence:
    return Evidence(pairs=columns_of(pairs), available=len(pairs), graded=graded, seed=7)


@st.composite
def outcomes(draw: st.DrawFn) -> list[Pair]:
    """Outcomes of a challenger that is often good enough to be promoted."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    size, better = draw(st.integers(10, 60)), draw(st.floats(0.3, 1.0))
    return [
        Pair(
            task_id=f"t{number:03}",
            kind=rng.choice("abc"),
            challenger=outcome(rng, better),
            champion=outcome(rng, 0.4),
            anchor=outcome(rng, 0.3),
        )
        for number in range(size)
    ]


@pytest.mark.parametrize("graded", [False, True])
def test_the_evidence_leads_to_every_decision(graded: bool) -> None:
    seen: set[str] = set()

    @settings(derandomize=True, database=None)
    @given(outcomes())
    def look(pairs: list[Pair]) -> None:
        seen.add(type(certify(evidence_of(pairs, graded=graded), POLICY, LEDGER)).__name__)

    look()
    assert seen >= {"Promote", "Refuse"}


@given(outcomes(), st.randoms(use_true_random=False))
def test_the_order_of_pairs_does_not_matter(pairs: list[Pair], rng: random.Random) -> None:
    shuffled = list(pairs)
    rng.shuffle(shuffled)
    assert certify(evidence_of(shuffled), POLICY, LEDGER) == certify(evidence_of(pairs), POLICY, LEDGER)


@given(outcomes(), st.booleans(), st.data())
def test_an_engine_error_never_turns_a_refusal_into_a_promotion(
    pairs: list[Pair], graded: bool, data: st.DataObject
) -> None:
    before = certify(evidence_of(pairs, graded=graded), POLICY, LEDGER)
    index = data.draw(st.integers(0, len(pairs) - 1))
    arm = data.draw(st.sampled_from(["challenger", "champion", "anchor"]))
    cut = Row(passed=False, engine_error=True, tokens=0, milliseconds=0)
    changed = list(pairs)
    changed[index] = replace(pairs[index], **{arm: cut})
    after = certify(evidence_of(changed, graded=graded), POLICY, LEDGER)
    if isinstance(after, Promote):
        assert isinstance(before, Promote | Abstain)


@given(outcomes(), st.booleans())
def test_an_equal_pair_is_never_promoted(pairs: list[Pair], graded: bool) -> None:
    equal = [replace(pair, champion=pair.challenger) for pair in pairs]
    assert not isinstance(certify(evidence_of(equal, graded=graded), POLICY, LEDGER), Promote)


@given(outcomes(), st.booleans())
def test_a_promotion_means_that_every_condition_holds(pairs: list[Pair], graded: bool) -> None:
    decision = certify(evidence_of(pairs, graded=graded), POLICY, LEDGER)
    if isinstance(decision, Promote):
        assert decision.measured.p <= LEDGER.level
        assert all(bound.lower > -bound.margin for bound in decision.measured.bounds)


@given(outcomes(), st.booleans())
def test_evidence_survives_a_record(pairs: list[Pair], with_anchor: bool) -> None:
    given_pairs = columns_of(pairs if with_anchor else [replace(pair, anchor=None) for pair in pairs])
    text = canonical_json(encode_pairs(given_pairs))
    found = decode_pairs(json.loads(text))
    assert (found.task_ids, found.kinds, found.kind.tolist()) == (
        given_pairs.task_ids,
        given_pairs.kinds,
        given_pairs.kind.tolist(),
    )
    assert (found.anchor is None) == (not with_anchor)
    for name in ("challenger", "champion", "anchor")[: 3 if with_anchor else 2]:
        ours, theirs = getattr(given_pairs, name), getattr(found, name)
        for column in fields(ours):
            wanted, got = getattr(ours, column.name), getattr(theirs, column.name)
            assert wanted.dtype == got.dtype, column.name
            assert wanted.tolist() == got.tolist(), column.name


@given(outcomes())
def test_whole_rewards_decide_like_passes_but_for_the_test(pairs: list[Pair]) -> None:
    """Rewards of 0 and 1 give the same bounds, and a p that is never below the exact one.

    For given discordant pairs the betting test's evidence K grows with the wins, so P(as many wins) = P(as much
    evidence) <= 1 / K by Markov's inequality.
    """
    whole = [
        replace(pair, **{arm: replace(getattr(pair, arm), reward=None) for arm in ("challenger", "champion", "anchor")})
        for pair in pairs
    ]
    binary, graded = (certify(evidence_of(whole, graded=graded), POLICY, LEDGER) for graded in (False, True))
    if isinstance(binary, Abstain) or isinstance(graded, Abstain):
        assert binary == graded
        return
    assert graded.measured.bounds == binary.measured.bounds
    assert graded.measured.p >= binary.measured.p * (1 - 1e-9)


@given(outcomes(), st.integers(1, 30))
def test_slices_hold_every_pair_once(pairs: list[Pair], min_pairs: int) -> None:
    found = slices(columns_of(pairs), min_pairs)
    assert np.array_equal(sum(members.astype(int) for members in found.values()), np.ones(len(pairs)))
    assert all(members.sum() >= min_pairs for members in found.values()) or len(found) == 1
