"""How much of the engine a release in the shadow may use."""

from __future__ import annotations

from pydantic import Field

from tidegate.config.fields import Positive, Section


class ShadowSettings(Section):
    """What a release in the shadow may take of the engine; which one it is, and for which share of the calls, a person
    says with 'tidegate releases shadow'."""

    max_calls: Positive = Field(
        default=4, description="Most calls that the shadow answers at once; one that comes on top is dropped."
    )
    max_beside: int = Field(
        default=8,
        ge=0,
        description="Most choices of users in flight beside which the shadow answers: while there are more it begins "
        "nothing, and what it has begun is broken off.",
    )
