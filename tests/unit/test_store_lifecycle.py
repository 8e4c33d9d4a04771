"""The moves of a candidate, all pairs."""

from __future__ import annotations

from itertools import product

import pytest

from tidegate.core.errors import ConflictError
from tidegate.core.lifecycle import transition
from tidegate.core.types import CandidateState

LEGAL = """
proposed: screened rejected quarantined
screened: certified rejected quarantined
certified: canary champion rejected quarantined
canary: champion rejected rolled_back quarantined
champion: retired rolled_back
retired: champion
rolled_back: champion quarantined
rejected:
quarantined:
"""
MOVES = {
    (CandidateState(source), CandidateState(target))
    for source, _, targets in (line.partition(":") for line in LEGAL.split("\n") if line)
    for target in targets.split()
}


@pytest.mark.parametrize(("source", "target"), list(product(CandidateState, repeat=2)))
def test_every_pair(source: CandidateState, target: CandidateState):
    if (source, target) in MOVES:
        assert transition(source, target) is target
    else:
        with pytest.raises(ConflictError, match=f"{source.value!r} cannot become {target.value!r}"):
            transition(source, target)


def test_no_way_to_champion_goes_round_certification():
    for state in CandidateState:
        if (state, CandidateState.CHAMPION) in MOVES:
            assert state in {
                CandidateState.CERTIFIED,
                CandidateState.CANARY,
                CandidateState.RETIRED,
                CandidateState.ROLLED_BACK,
            }


def test_the_message_says_what_is_accepted():
    with pytest.raises(ConflictError, match="accepted: 'quarantined', 'rejected', 'screened'"):
        transition(CandidateState.PROPOSED, CandidateState.CHAMPION)
    with pytest.raises(ConflictError, match="that state is final"):
        transition(CandidateState.REJECTED, CandidateState.PROPOSED)
