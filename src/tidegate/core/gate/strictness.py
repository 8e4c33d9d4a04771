"""Which of two policies is looser, field by field.

A policy may become stricter at any time; what makes it looser needs signatures and the next window. A change whose
direction nobody can tell counts as looser, so that forgetting one here can't open a way around. The factors of
length and latency are such: a lower one also counts more of the champion's answers, which may let a worse challenger
through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tidegate.core.gate.policy import Policy

Stricter: TypeAlias = Callable[[Any, Any], bool]
"""Whether the second value is no looser than the first; they differ."""


def _lower(old: Any, new: Any) -> bool:
    return new < old


def _higher(old: Any, new: Any) -> bool:
    return new > old


def _lower_or_set(old: Any, new: Any) -> bool:
    """A limit that may be None, which is no limit."""
    return old is None or (new is not None and new < old)


def _to(strict: str) -> Stricter:
    return lambda old, new: new == strict


def _free(old: Any, new: Any) -> bool:
    """Decides nothing about what is promoted."""
    del old, new
    return True


def _smaller_steps(old: Sequence[float], new: Sequence[float]) -> bool:
    """At least as many weights, none of them above the one that it replaces or above the last one."""
    rises = all(b <= a for a, b in zip(old, new, strict=False))
    return len(new) >= len(old) and rises and max(new) <= max(old)


_STRICTER: Mapping[str, Stricter] = {
    "name": _free,
    "ledger.alpha": _lower,
    "ledger.error_rate": _to("fwer"),
    "ledger.looks_per_window": _higher,
    "ledger.looks_per_epoch": _lower,
    "sealed.min_pairs": _higher,
    "sealed.max_pairs": _higher,
    "sealed.max_error_share": _lower,
    "sealed.max_age_days": _lower,
    "non_inferiority.level": _lower,
    "non_inferiority.overall_margin": _lower,
    "non_inferiority.anchor_margin": _lower,
    "non_inferiority.slice_margin": _lower,
    "non_inferiority.min_pairs_per_slice": _lower,
    "guardrails.no_reply_margin": _lower,
    "guardrails.invalid_tool_call_margin": _lower,
    "guardrails.refusal_margin": _lower,
    "guardrails.length_margin": _lower,
    "guardrails.latency_margin": _lower,
    "screen.min_dev_pairs": _higher,
    "screen.dev_rule": _to("above"),
    "screen.max_no_reply_increase": _lower,
    "screen.max_invalid_tool_call_increase": _lower,
    "screen.kl_budget": _lower_or_set,
    "collapse.tasks": _higher,
    "collapse.samples": _higher,
    "collapse.max_pass_at_k_drop": _lower,
    "collapse.min_strategies": _higher,
    "collapse.max_slices_lost": _lower,
    "collapse.min_entropy": _higher,
    "collapse.min_distinct": _higher,
    "canary.weights": _smaller_steps,
    "canary.pairs_per_weight": _higher,
    "canary.horizon_pairs": _lower,
    "canary.margin": _lower,
    "canary.promote_at": _higher,
    "canary.rollback_at": _lower,
    "holdback.share": _higher,
    "holdback.margin": _lower,
    "holdback.alarm_at": _lower,
    "triggers.max_error_ratio": _lower,
    "triggers.min_calls": _lower,
    "triggers.max_disagreement": _lower,
    "triggers.min_audited": _lower,
    "triggers.drift_drop": _lower,
    "triggers.drift_at": _lower,
    "triggers.rollbacks_per_window": _lower,
}


def looser_fields(old: Policy, new: Policy) -> tuple[str, ...]:
    """Fields in which ``new`` is looser than ``old``, each as ``section.field: old -> new``; empty when in none.

    A stage that is left out (``none``) is looser than any rules for it.
    """
    before, after = _leaves(old.values()), _leaves(new.values())
    found: list[str] = []
    for name in sorted({*before, *after}):
        was, is_now = before.get(name), after.get(name)
        if was == is_now or _no_looser(name, before, after):
            continue
        found.append(f"{name}: {was!r} -> {is_now!r}" if name in before else f"{name}: rules -> {is_now!r}")
    return tuple(found)


def _no_looser(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    stage = name.partition(".")[0]
    if before.get(stage) == "none":  # rules where there were none
        return True
    if after.get(stage) == "none":  # told once, for the stage as a whole
        return name != stage
    rule = _STRICTER.get(name)
    return rule is not None and name in before and name in after and rule(before[name], after[name])


def _leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            leaves |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            leaves[name] = value
    return leaves
