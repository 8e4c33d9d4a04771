"""Why the gate decided as it did about a candidate, for a person: what was measured and what would have passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.app.operations import existing
from tidegate.app.stores import open_stores
from tidegate.config import Settings
from tidegate.core.errors import NotFoundError
from tidegate.core.gate.state import DECISION, SCREEN
from tidegate.core.statistics import exact_pairs, sign_test
from tidegate.core.types import AuditRecord, JsonObject

_POWER = 0.8


def explain(settings: Settings, candidate_id: str) -> list[JsonObject]:
    """Every screen and decision about a candidate, oldest first.

    Raises:
        NotFoundError: the gate never looked at it.
    """
    with open_stores(existing(settings)) as stores:
        records = [
            record
            for record in stores.audit.read()
            if record.kind in (SCREEN, DECISION) and record.body["candidate"] == candidate_id
        ]
        known = sorted(candidate.id for candidate in stores.releases.list_candidates())
    if not records:
        raise NotFoundError(f"the gate never looked at candidate {candidate_id!r}; candidates: {known!r}")
    return [_screened(record) if record.kind == SCREEN else decided(record) for record in records]


def _screened(record: AuditRecord) -> JsonObject:
    body = record.body
    kl, budget = body["kl"], body["policy"]["screen"].get("kl_budget")
    return {
        "audit_seq": record.seq,
        "stage": "screen",
        "decision": body["decision"],
        "reasons": body["reasons"],
        "dev_success": f"{body['challenger_passed']} against {body['champion_passed']} of {body['pairs']}",
        "kl_to_anchor": None
        if kl is None
        else f"{kl['nats_per_token']:.3g} nats per token over {kl['tokens']} tokens, at most {budget:.3g}",
        "not_measured": body["not_measured"],
    }


def decided(record: AuditRecord) -> JsonObject:
    """A decision in words: each condition with what was measured, its bound, and what would have passed."""
    body = record.body
    result: dict[str, Any] = {
        "audit_seq": record.seq,
        "stage": "certify",
        "decision": body["decision"],
        "reasons": body["reasons"],
        "look": f"{body['look']} of window {body['window']}, {body['promotions']} promotions before it",
        "not_measured": body["not_measured"],
    }
    measured = body["measured"]
    if measured is None:
        return {**result, "conditions": []}
    conditions = [_superiority(body, measured), *map(_bound, measured["bounds"]), *map(_alarm, measured["alarms"])]
    return {**result, "conditions": conditions}


def _superiority(body: JsonObject, measured: Mapping[str, Any]) -> JsonObject:
    wins, losses, pairs = measured["wins"], measured["losses"], measured["pairs"]
    holds = measured["p"] <= body["level"]
    condition: dict[str, Any] = {
        "condition": "better than the champion",
        "measured": f"{wins} wins, {losses} losses over {pairs} pairs: {measured['test']} p = {measured['p']:.3g}",
        "bound": f"p <= {body['level']:.3g}",
        "holds": holds,
    }
    if not holds and measured["test"] == "sign test":  # graded gains have sizes, which counts don't tell
        needed = wins_needed(losses, level=body["level"], pairs=pairs)
        discordance, gain = (wins + losses) / pairs, (wins - losses) / pairs
        if needed is None:
            condition["would_have_passed"] = f"nothing over {pairs} pairs with {losses} losses"
        else:
            condition["would_have_passed"] = f"{needed} wins with {losses} losses"
        if 0.0 < gain <= discordance:
            more = exact_pairs(discordance, gain, body["level"], _POWER)
            condition["pairs_for_this_gain"] = f"{more} pairs show {gain:+.1%} with power {_POWER:g}"
    return condition


def _bound(bound: Mapping[str, Any]) -> JsonObject:
    condition = {
        "condition": f"not worse: {bound['name']}",
        "measured": f"{bound['difference']:+.1%} over {bound['pairs']} pairs, at least {bound['lower']:+.1%}",
        "bound": f"above {-bound['margin']:+.1%}",
        "holds": bound["holds"],
    }
    if not bound["holds"]:
        condition["would_have_passed"] = f"a lower bound {-bound['margin'] - bound['lower']:.1%} higher"
    return condition


def _alarm(alarm: Mapping[str, Any]) -> JsonObject:
    return {
        "condition": f"no narrower than the anchor: {alarm['name']}",
        "measured": f"{alarm['challenger']:.3g}, the anchor's {alarm['anchor']:.3g}, over {alarm['tasks']} tasks: "
        f"p = {alarm['p']:.2g}",
        "bound": f"{alarm['limit']}, or p > {alarm['level']:.2g}",
        "holds": not alarm["fires"],
    }


def wins_needed(losses: int, *, level: float, pairs: int) -> int | None:
    """Fewest wins that the sign test takes for superiority at ``level`` beside ``losses``; None if pairs run out."""
    candidates: Sequence[int] = range(losses, pairs - losses + 1)
    return next((wins for wins in candidates if sign_test(wins, losses) <= level), None)
