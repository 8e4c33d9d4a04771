"""What a gate policy holds. :mod:`tidegate.gate.policy` reads and checks the file; ranges stand here.

Every field is part of the policy's hash, and the hash is part of every decision and certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from tidegate.core.hashing import content_hash
from tidegate.core.statistics import ErrorRate

Share = Annotated[float, Ge(0.0), Lt(1.0)]
Margin = Annotated[float, Gt(0.0), Lt(1.0)]
Count = Annotated[int, Ge(1)]

_STRICT: Mapping[str, Any] = {"extra": "forbid", "strict": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRules:
    """Error control: bound ``alpha`` over each window of looks, and looks at one sealed set."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    alpha: Annotated[float, Gt(0.0), Lt(1.0)]
    error_rate: ErrorRate
    looks_per_window: Count
    looks_per_epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedRules:
    """Size of a sealed set in tasks, and the share of engine errors above which nothing is concluded."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    min_pairs: Count
    max_pairs: Count
    max_error_share: Share

    def __post_init__(self) -> None:
        """A set can't be smaller than what a decision needs."""
        if self.max_pairs < self.min_pairs:
            raise ValueError(f"max_pairs = {self.max_pairs!r} is below min_pairs = {self.min_pairs!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonInferiorityRules:
    """Largest tolerated losses, as differences of success rates, tested one-sided at ``level``."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    level: Annotated[float, Gt(0.0), Lt(0.5)]
    overall_margin: Margin
    anchor_margin: Margin
    slice_margin: Margin
    min_pairs_per_slice: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailRules:
    """Largest tolerated increases of the rates of bad behaviour, tested one-sided at the same level."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    no_reply_margin: Margin
    invalid_tool_call_margin: Margin


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenRules:
    """The free look at the dev set: it saves looks at sealed sets and controls no error rate.

    ``dev_rule``: the challenger must pass more dev tasks than the champion (``above``) or as many
    (``not_below``). ``kl_budget`` in nats per token; None: not checked, and reported as not measured.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    min_dev_pairs: Count
    dev_rule: Literal["above", "not_below"]
    max_no_reply_increase: Share
    max_invalid_tool_call_increase: Share
    kl_budget: Annotated[float, Gt(0.0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that decides whether a challenger is promoted.

    ``decoding``: ``traffic`` evaluates with the sampling settings that the traffic uses. ``canary``: ``none``
    publishes a certified challenger to all traffic at once; a weakening that the file must spell out.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    format: Literal[1]
    name: str
    decoding: Literal["traffic"]
    canary: Literal["none"]
    ledger: LedgerRules
    sealed: SealedRules
    non_inferiority: NonInferiorityRules
    guardrails: GuardrailRules
    screen: ScreenRules

    def values(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @property
    def hash(self) -> str:
        """SHA-256 (64 hex digits) over the values of every field."""
        return content_hash(self.values())


def policy_from_values(values: Mapping[str, Any]) -> Policy:
    """The policy that a record carries, without range checks: they were made when the file was read.

    Raises:
        KeyError, TypeError, ValueError: a section or field is missing, unknown or impossible.
    """
    known: dict[str, Any] = dict(values)
    for name, section in _SECTIONS.items():
        known[name] = section(**known[name])
    return Policy(**known)


_SECTIONS: Mapping[str, Callable[..., Any]] = {
    "ledger": LedgerRules,
    "sealed": SealedRules,
    "non_inferiority": NonInferiorityRules,
    "guardrails": GuardrailRules,
    "screen": ScreenRules,
}
