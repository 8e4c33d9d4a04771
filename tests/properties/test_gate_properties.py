"""Laws of the decision: order does not matter, missing data never helps, an equal pair is never promoted."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gate_engine import make_policy
from tidegate.core.gate import Abstain, ArmOutcome, Evidence, Pair, Promote, certify
from tidegate.core.gate.certify import slices
from tidegate.core.gate.evidence import decode_pairs, encode_pairs
from tidegate.core.statistics import Ledger

POLICY = make_policy(
    sealed__min_pairs=10,
    sealed__max_error_share=0.5,
    non_inferiority__slice_margin=0.6,
    non_inferiority__overall_margin=0.3,
)
LEDGER = Ledger(alpha=0.3, looks=1)


def outcome(rng: random.Random, skill: float) -> ArmOutcome:
    flags = ("no_reply", "invalid_tool_call", "engine_error", "verifier_error")
    return ArmOutcome(passed=rng.random() < skill, **{flag: rng.random() < 0.04 for flag in flags})


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    """Outcomes of a challenger that is often good enough to be promoted."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    size, better = draw(st.integers(10, 60)), draw(st.floats(0.3, 1.0))
    pairs = [
        Pair(
            task_id=f"t{number:03}",
            kind=rng.choice("abc"),
            challenger=outcome(rng, better),
            champion=outcome(rng, 0.4),
            anchor=outcome(rng, 0.3),
        )
        for number in range(size)
    ]
    return Evidence(pairs=tuple(pairs), available=size)


def test_the_evidence_leads_to_every_decision() -> None:
    seen: set[str] = set()

    @settings(derandomize=True, database=None)
    @given(evidences())
    def look(evidence: Evidence) -> None:
        seen.add(type(certify(evidence, POLICY, LEDGER)).__name__)

    look()
    assert seen >= {"Promote", "Refuse"}


@given(evidences(), st.randoms(use_true_random=False))
def test_the_order_of_pairs_does_not_matter(evidence: Evidence, rng: random.Random) -> None:
    shuffled = list(evidence.pairs)
    rng.shuffle(shuffled)
    assert certify(replace(evidence, pairs=tuple(shuffled)), POLICY, LEDGER) == certify(evidence, POLICY, LEDGER)


@given(evidences(), st.data())
def test_an_engine_error_never_turns_a_refusal_into_a_promotion(evidence: Evidence, data: st.DataObject) -> None:
    before = certify(evidence, POLICY, LEDGER)
    index = data.draw(st.integers(0, len(evidence.pairs) - 1))
    arm = data.draw(st.sampled_from(["challenger", "champion", "anchor"]))
    cut = ArmOutcome(passed=False, engine_error=True)
    pairs = list(evidence.pairs)
    pairs[index] = replace(pairs[index], **{arm: cut})
    after = certify(replace(evidence, pairs=tuple(pairs)), POLICY, LEDGER)
    if isinstance(after, Promote):
        assert isinstance(before, Promote | Abstain)


@given(evidences())
def test_an_equal_pair_is_never_promoted(evidence: Evidence) -> None:
    pairs = tuple(replace(pair, champion=pair.challenger) for pair in evidence.pairs)
    assert not isinstance(certify(replace(evidence, pairs=pairs), POLICY, LEDGER), Promote)


@given(evidences())
def test_a_promotion_means_that_every_condition_holds(evidence: Evidence) -> None:
    decision = certify(evidence, POLICY, LEDGER)
    if isinstance(decision, Promote):
        assert decision.measured.p <= LEDGER.level
        assert all(bound.lower > -bound.margin for bound in decision.measured.bounds)


@given(evidences())
def test_evidence_survives_a_record(evidence: Evidence) -> None:
    assert decode_pairs(encode_pairs(evidence.pairs)) == evidence.pairs


@given(evidences(), st.integers(1, 30))
def test_slices_hold_every_pair_once(evidence: Evidence, min_pairs: int) -> None:
    found = slices(evidence.pairs, min_pairs)
    assert sorted(pair.task_id for members in found.values() for pair in members) == [
        pair.task_id for pair in evidence.pairs
    ]
    assert all(len(members) >= min_pairs for members in found.values()) or len(found) == 1
