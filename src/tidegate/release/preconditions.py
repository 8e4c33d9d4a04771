"""What has to hold before a release is served, and where the aliases point once it is."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.core.errors import ConflictError
from tidegate.core.types import Candidate, CandidateState, Release
from tidegate.release.router import CANARY, CHAMPION, PREVIOUS

BARE_BASE = "base"
"""What a candidate was judged against when no adapter was served yet."""


def as_champion(
    release: Release, old: Release, aliases: Mapping[str, str], old_state: CandidateState
) -> dict[str, str]:
    """Where aliases point once ``release`` is the champion; that of the canary stays with it while there is none.

    What was rolled back is no previous champion that anything falls back to: there is none then, and the alias names
    the champion.
    """
    good = old_state is not CandidateState.ROLLED_BACK
    targets = {CHAMPION: release.id, PREVIOUS: old.id if good else release.id}
    return {**targets, CANARY: release.id} if aliases.get(CANARY) == old.id else targets


def require_state(candidate: Candidate, *accepted: CandidateState) -> None:
    if candidate.state not in accepted:
        raise ConflictError(
            f"candidate {candidate.id!r} is {candidate.state.value!r}; accepted: "
            f"{', '.join(repr(state.value) for state in accepted)}. 'tidegate candidates list' shows the states"
        )


def require_judged_against(candidate: Candidate, champion: Release, against: str) -> None:
    served = champion.adapter_sha256 or BARE_BASE
    if served != against:
        raise ConflictError(
            f"candidate {candidate.id!r} was judged against {against[:12]!r}, but the champion {champion.id!r} "
            f"is {served[:12]!r}; have it judged again with 'tidegate cycle run --candidate DIRECTORY'"
        )
