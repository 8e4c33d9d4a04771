"""Life of a candidate: which state may follow which. Pure; the stores call it inside their transactions.

    proposed ──> screened ──> certified ──> canary ──> champion ──> retired
        │            │            │  └────────────────────^  │         │
        └────────────┴────────────┴──> rejected, quarantined │         └──> champion (released again)
                                       canary, champion ──> rolled_back ──> champion, quarantined

``rejected`` and ``quarantined`` are final: the same weights may come back only as a new candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tidegate.core.errors import ConflictError
from tidegate.core.types import CandidateState

_S = CandidateState

MOVES: Mapping[CandidateState, frozenset[CandidateState]] = MappingProxyType(
    {
        _S.PROPOSED: frozenset({_S.SCREENED, _S.REJECTED, _S.QUARANTINED}),
        _S.SCREENED: frozenset({_S.CERTIFIED, _S.REJECTED, _S.QUARANTINED}),
        _S.CERTIFIED: frozenset({_S.CANARY, _S.CHAMPION, _S.REJECTED, _S.QUARANTINED}),
        _S.CANARY: frozenset({_S.CHAMPION, _S.REJECTED, _S.ROLLED_BACK, _S.QUARANTINED}),
        _S.CHAMPION: frozenset({_S.RETIRED, _S.ROLLED_BACK}),
        _S.RETIRED: frozenset({_S.CHAMPION}),
        _S.ROLLED_BACK: frozenset({_S.CHAMPION, _S.QUARANTINED}),
        _S.REJECTED: frozenset(),
        _S.QUARANTINED: frozenset(),
    }
)


def transition(state: CandidateState, to: CandidateState) -> CandidateState:
    """The state after a legal move.

    Args:
        state: where the candidate is.
        to: where it shall go. Staying is no move; callers that resume handle it themselves.

    Returns:
        ``to``.

    Raises:
        ConflictError: the move is not legal; the message lists those that are.
    """
    legal = MOVES[state]
    if to not in legal:
        accepted = ", ".join(repr(str(s)) for s in sorted(legal)) if legal else "nothing; that state is final"
        raise ConflictError(
            f"a candidate that is {str(state)!r} cannot become {str(to)!r}; accepted: {accepted}; "
            "propose the weights as a new candidate to have them judged again"
        )
    return to
