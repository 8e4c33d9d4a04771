"""What a gate policy holds. :mod:`tidegate.gate.policy` reads and checks the file; ranges stand here.

Every field is part of the policy's hash, and the hash is part of every decision and certificate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from tidegate.core.hashing import canonical_json, content_hash
from tidegate.core.statistics import ErrorRate

Share = Annotated[float, Ge(0.0), Lt(1.0)]
Margin = Annotated[float, Gt(0.0), Lt(1.0)]
Count = Annotated[int, Ge(1), Le(10**9)]  # more can be neither asked nor waited for, and still divides a float
Factor = Annotated[float, Gt(1.0)]
Bet = Annotated[float, Gt(0.0), Lt(1.0)]

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
    """Size of a sealed set in tasks, the share of engine errors above which nothing is concluded, and its age.

    Traffic drifts: a set that is older than ``max_age_days`` is closed and a new one opened.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    min_pairs: Count
    max_pairs: Count
    max_error_share: Share
    max_age_days: Annotated[float, Gt(0.0)]

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
    """Largest tolerated increases of the rates of bad behaviour, tested one-sided at the same level.

    On a task an arm is *overlong* when it uses more than ``length_factor`` times the other arm's tokens without a
    higher reward, and *slow* when it takes more than ``latency_factor`` times the other arm's seconds a token.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    no_reply_margin: Margin
    invalid_tool_call_margin: Margin
    refusal_margin: Margin
    length_factor: Factor
    length_margin: Margin
    latency_factor: Factor
    latency_margin: Margin


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenRules:
    """The free look at the dev set: it saves looks at sealed sets and controls no error rate.

    ``dev_rule``: the challenger must pass more dev tasks than the champion (``above``) or as many
    (``not_below``). ``kl_budget`` in nats per token to the anchor; None: neither measured nor checked.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    min_dev_pairs: Count
    dev_rule: Literal["above", "not_below"]
    max_no_reply_increase: Share
    max_invalid_tool_call_increase: Share
    kl_budget: Annotated[float, Gt(0.0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapseRules:
    """How narrow a challenger may be beside the anchor, over ``tasks`` sealed tasks answered ``samples`` times each.

    ``max_pass_at_k_drop``: largest drop of pass@``samples``. ``min_strategies``: least ratio of the effective
    numbers of strategies. ``max_slices_lost``: largest share of the anchor's slices with a success that have none
    now. ``min_entropy``: least ratio of the mean token entropies. ``min_distinct``: least ratio of the shares of
    distinct n-grams, and of the Vendi scores.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    tasks: Count
    samples: Annotated[int, Ge(2), Le(10**9)]
    max_pass_at_k_drop: Margin
    min_strategies: Share
    max_slices_lost: Share
    min_entropy: Share
    min_distinct: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRules:
    """A certified challenger on live traffic before it is the champion.

    ``weights``: shares of users, rising, each held for ``pairs_per_weight`` pairs. Promoted when the evidence
    against a loss of ``margin`` reaches ``promote_at``, rolled back when that for a loss reaches ``rollback_at``,
    given up as inconclusive after ``horizon_pairs``.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    weights: tuple[Share, ...]
    pairs_per_weight: Count
    horizon_pairs: Count
    margin: Margin
    bets: tuple[Bet, ...]
    promote_at: Factor
    rollback_at: Factor

    def __post_init__(self) -> None:
        """Weights rise, and there is something to bet."""
        if not self.weights or list(self.weights) != sorted(set(self.weights)) or self.weights[0] <= 0.0:
            raise ValueError(f"weights = {list(self.weights)!r}; rising shares above 0 are accepted")
        if not self.bets:
            raise ValueError("bets = []; at least one number in (0, 1) is accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldbackRules:
    """A share of users stays on the previous champion and shows when the present one turns bad.

    ``share`` of users, drawn anew every ``period_days``; an alarm is raised at ``alarm_at`` against a loss of more
    than ``margin``.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    share: Margin
    period_days: Annotated[float, Gt(0.0)]
    margin: Margin
    bets: tuple[Bet, ...]
    alarm_at: Factor

    def __post_init__(self) -> None:
        """There is something to bet."""
        if not self.bets:
            raise ValueError("bets = []; at least one number in (0, 1) is accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerRules:
    """What else takes a release back or stops learning.

    More than ``max_error_ratio`` times the control's error rate, judged from ``min_calls`` calls of each arm on; a
    verifier with which people disagree on more than ``max_disagreement`` of at least ``min_audited`` audited answers;
    a fall of both arms by ``drift_drop`` below the rate before, at evidence ``drift_at``; ``rollbacks_per_window``
    rollbacks in one window of looks.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    max_error_ratio: Factor
    min_calls: Count
    max_disagreement: Share
    min_audited: Count
    drift_drop: Margin
    drift_at: Factor
    rollbacks_per_window: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that decides whether a challenger is promoted, and whether it stays.

    ``decoding``: ``traffic`` evaluates with the sampling settings that the traffic uses. ``none`` instead of rules
    leaves a stage out; a weakening that the file must spell out: without ``canary`` a certified challenger goes to
    all traffic at once, without ``holdback`` nothing shows that a champion turned bad, without ``collapse`` nothing
    shows that it became narrow.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    format: Literal[1]
    name: str
    decoding: Literal["traffic"]
    canary: Literal["none"] | CanaryRules
    holdback: Literal["none"] | HoldbackRules
    collapse: Literal["none"] | CollapseRules
    ledger: LedgerRules
    sealed: SealedRules
    non_inferiority: NonInferiorityRules
    guardrails: GuardrailRules
    screen: ScreenRules
    triggers: TriggerRules

    def values(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return json.loads(canonical_json(asdict(self)))

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
        if known[name] != "none":
            fields = {key: tuple(value) if isinstance(value, list) else value for key, value in known[name].items()}
            known[name] = section(**fields)
    return Policy(**known)


_SECTIONS: Mapping[str, Callable[..., Any]] = {
    "ledger": LedgerRules,
    "sealed": SealedRules,
    "non_inferiority": NonInferiorityRules,
    "guardrails": GuardrailRules,
    "screen": ScreenRules,
    "triggers": TriggerRules,
    "canary": CanaryRules,
    "holdback": HoldbackRules,
    "collapse": CollapseRules,
}
