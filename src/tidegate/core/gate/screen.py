"""The free look at the dev set: rejects what is plainly not worth a look at a sealed set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tidegate.core.gate.certify import engine_error_excess
from tidegate.core.gate.decisions import ScreenAbstained, ScreenFailed, ScreenPassed, ScreenResult
from tidegate.core.gate.evidence import Pairs
from tidegate.core.gate.policy import Policy
from tidegate.core.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKl:
    """Divergence of a challenger from the reference on its own answers, >= 0, and how much it was measured on."""

    nats_per_token: float
    tokens: int
    calls: int
    reference_sha256: str

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: JsonObject) -> ReferenceKl:
        """What :meth:`to_json` wrote.

        Raises:
            TypeError, ValueError: it is malformed.
        """
        kl = cls(**values)
        if not (kl.nats_per_token >= 0.0 and kl.tokens >= kl.calls >= 1):
            raise ValueError(f"kl {dict(values)!r}: a divergence >= 0 over at least one token of each call is expected")
        return kl


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenEvidence:
    """What the screen looks at.

    ``logit_difference``: largest difference of next-token logits between challenger and champion, from the
    engine's probe, None without a prompt to compare on. ``canary_prompts``: fixed prompts by id, True where the
    challenger answered as it must. ``kl``: to the reference, None when it was not measured.
    """

    challenger_sha256: str
    champion_sha256: str
    logit_difference: float | None
    pairs: Pairs
    canary_prompts: tuple[tuple[str, bool], ...] = ()
    kl: ReferenceKl | None = None


def screen(evidence: ScreenEvidence, policy: Policy) -> ScreenResult:
    """Decide whether a challenger may be certified. Spends no alpha, so it may be asked as often as wished.

    Certain faults (unchanged weights, a wrong canary prompt, KL over budget) fail at once. Rates are compared
    only on enough dev tasks; with too few the result is an abstention, because a comparison of a handful
    would reject by chance as often as not.
    """
    faults = _identity_faults(evidence) + _canary_faults(evidence) + _kl_faults(evidence, policy)
    if faults:
        return ScreenFailed(reasons=faults)
    missing = _missing(evidence, policy)
    if missing:
        return ScreenAbstained(missing=missing)
    faults = _rate_faults(evidence.pairs, policy)
    if faults:
        return ScreenFailed(reasons=faults)
    passed, opponent = dev_successes(evidence.pairs)
    kl = "KL not measured" if evidence.kl is None else f"KL {_nats(evidence.kl)}"
    prompts = f"{len(evidence.canary_prompts)} canary prompts right" if evidence.canary_prompts else "no canary prompts"
    dev = f"dev success {passed} against the champion's {opponent} of {len(evidence.pairs)}"
    return ScreenPassed(reasons=(dev, prompts, kl))


def _identity_faults(evidence: ScreenEvidence) -> tuple[str, ...]:
    if evidence.challenger_sha256 == evidence.champion_sha256:
        return (f"the adapter's content hash {evidence.challenger_sha256[:8]} is the champion's: nothing changed",)
    if evidence.logit_difference is not None and evidence.logit_difference <= 0.0:
        return ("the adapter's logits equal the champion's: training changed nothing that is computed",)
    return ()


def _canary_faults(evidence: ScreenEvidence) -> tuple[str, ...]:
    wrong = [name for name, right in evidence.canary_prompts if not right]
    return (f"canary prompts answered wrongly: {', '.join(wrong)}",) if wrong else ()


def _kl_faults(evidence: ScreenEvidence, policy: Policy) -> tuple[str, ...]:
    budget = policy.screen.kl_budget
    if budget is None or evidence.kl is None or evidence.kl.nats_per_token <= budget:
        return ()
    return (f"KL to the reference is {_nats(evidence.kl)} > budget {budget:.3g}",)


def _nats(kl: ReferenceKl) -> str:
    return f"{kl.nats_per_token:.3g} nats per token over {kl.tokens} tokens"


def _missing(evidence: ScreenEvidence, policy: Policy) -> tuple[str, ...]:
    rules = policy.screen
    if len(evidence.pairs) < rules.min_dev_pairs:
        return (f"{len(evidence.pairs)} of {rules.min_dev_pairs} dev tasks",)
    missing = engine_error_excess(evidence.pairs, policy.sealed.max_error_share)
    if rules.kl_budget is not None and evidence.kl is None:
        missing += (f"KL to the reference was not measured and the policy holds it to {rules.kl_budget:.3g}",)
    return missing


def _rate_faults(pairs: Pairs, policy: Policy) -> tuple[str, ...]:
    rules = policy.screen
    faults: list[str] = []
    passed, opponent = dev_successes(pairs)
    if passed < opponent or (passed == opponent and rules.dev_rule == "above"):
        wanted = "more than" if rules.dev_rule == "above" else "at least"
        faults.append(f"dev success {passed} of {len(pairs)}; {wanted} the champion's {opponent} is needed")
    for words, limit, fault in (
        ("answers without a reply", rules.max_no_reply_increase, "no_reply"),
        ("answers with an invalid tool call", rules.max_invalid_tool_call_increase, "invalid_tool_call"),
    ):
        ours, theirs = (int(np.count_nonzero(getattr(arm, fault))) for arm in (pairs.challenger, pairs.champion))
        if ours - theirs > limit * len(pairs):
            faults.append(f"{ours} {words} of {len(pairs)}, the champion {theirs}: up by more than {limit:.0%}")
    return tuple(faults)


def dev_successes(pairs: Pairs) -> tuple[int, int]:
    """Dev tasks that challenger and champion are taken to have passed."""
    return int(np.count_nonzero(pairs.challenger.won)), int(np.count_nonzero(pairs.champion.held))
