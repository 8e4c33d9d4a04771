"""Decisions of the canary and the steady state, as records: each trigger, and what must not trigger anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from live_log import CANARY, HOLDBACK, LiveLog, live_policy
from tidegate.core.audit import next_record
from tidegate.core.errors import AuditError
from tidegate.core.gate.live_assignment import LiveArm
from tidegate.core.gate.live_records import is_silent
from tidegate.core.gate.live_state import DAY_S, LiveUnit
from tidegate.core.gate.state import gate_state
from tidegate.core.gate.verify import verify_audit
from tidegate.core.types import AuditRecord

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "gate_vectors.json").read_text())


@pytest.fixture
def canary() -> LiveLog:
    log = LiveLog()
    log.start()
    return log


@pytest.fixture
def steady() -> LiveLog:
    log = LiveLog(kind="steady")
    log.start()
    return log


def test_a_look_records_the_golden_evidence(canary: LiveLog) -> None:
    golden = VECTORS["canary"]
    body = canary.pairs([max(d, 0) for d in golden["d"]], [max(-d, 0) for d in golden["d"]])
    assert (body["k_plus"], body["k_minus"]) == pytest.approx((golden["k_plus"], golden["k_minus"]), rel=1e-6)
    assert (body["decision"], body["pairs"]) == ("continue", len(golden["d"]))


def test_a_better_canary_is_promoted_and_the_numbers_say_why(canary: LiveLog) -> None:
    body = canary.pairs([1.0] * 12, [0.0] * 12)
    assert body["decision"] == "promote"
    assert "12 pairs" in body["reasons"][0]
    assert ">= 20" in body["reasons"][0]
    assert canary.state.live.running is None
    assert canary.trial.decision == "promote"


def test_a_worse_canary_is_rolled_back_by_trigger_1(canary: LiveLog) -> None:
    body = canary.pairs([0.0] * 12, [1.0] * 12)
    assert (body["decision"], body["trigger"]) == ("roll_back", 1)


def test_an_equal_canary_ends_inconclusive_at_its_horizon() -> None:
    log = LiveLog(policy=live_policy(canary=replace(CANARY, horizon_pairs=40)))
    log.start()
    assert log.pairs([1.0, 0.0] * 19, [1.0, 0.0] * 19)["decision"] == "continue"
    body = log.pairs([1.0] * 2, [1.0] * 2)
    assert (body["decision"], body["trigger"]) == ("inconclusive", None)
    assert body["reasons"][0].startswith("inconclusive")


def test_surplus_units_wait_and_keep_their_place(canary: LiveLog) -> None:
    assert canary.look(canary.units([1.0, 0.0, 1.0], []))["waiting"] == {"subject": 3, "control": 0}
    body = canary.look(canary.units([], [0.0, 0.0]))
    assert (body["pairs"], body["waiting"]) == (2, {"subject": 1, "control": 0})
    assert canary.trial.differences.tolist() == [1.0, 0.0]


def test_late_units_never_give_a_pair_that_was_looked_at_other_partners(canary: LiveLog) -> None:
    canary.look([["a", "subject", 1.0, 500.0], ["b", "control", 0.0, 501.0]])
    before = canary.trial.differences.tolist()
    canary.look([["c", "subject", 0.0, 100.0], ["d", "control", 1.0, 99.0]])
    assert canary.trial.differences.tolist()[: len(before)] == before


def test_the_weight_rises_with_pairs_and_never_falls(canary: LiveLog) -> None:
    shares = [canary.pairs([1.0, 0.0] * 5, [1.0, 0.0] * 5)["share"] for _ in range(6)]
    assert shares == [0.1, 0.3, 0.3, 0.5, 0.5, 0.5]
    assert [stage.share for stage in canary.trial.stages] == [0.1, 0.3, 0.5]


@pytest.mark.parametrize(
    "units",
    [
        [["a", "subject", 1.0, 1.0], ["a", "control", 1.0, 1.0]],
        [["known", "subject", 1.0, 1.0]],
        [["a", "nobody", 1.0, 1.0]],
        [["a", "subject", 1.5, 1.0]],
    ],
)
def test_malformed_units_are_refused(canary: LiveLog, units: list[list[Any]]) -> None:
    canary.look([["known", "control", 1.0, 1.0]])
    with pytest.raises(ValueError, match=r"two units|not a valid LiveArm|not in \[0, 1\]"):
        canary.look(units)


def test_a_unit_with_an_outcome_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not in"):
        LiveUnit(user="u", arm=LiveArm.SUBJECT, outcome=float("nan"), time=0.0)


def test_a_look_at_a_trial_that_ended_or_never_began_is_refused(canary: LiveLog) -> None:
    canary.pairs([1.0] * 12, [0.0] * 12)
    with pytest.raises(ValueError, match="does not run"):
        canary.look()
    other = LiveLog(kind="steady", audit=canary.audit)
    with pytest.raises(ValueError, match="does not run"):
        other.look()


def test_personal_data_and_wrong_prompts_roll_back_at_once(canary: LiveLog) -> None:
    body = canary.pairs([1.0] * 12, [0.0] * 12, leaks=[["IBAN", "e1"]], prompts=[["sum", False], ["name", True]])
    assert (body["decision"], body["trigger"]) == ("roll_back", 2)
    assert "IBAN" in body["reasons"][0]
    assert "'sum'" in body["reasons"][1]


def test_prompts_without_an_answer_hold_back_a_promotion(canary: LiveLog) -> None:
    waiting = canary.pairs([1.0] * 12, [0.0] * 12, open_prompts=1, prompts=[["sum", True]])
    assert waiting["decision"] == "continue"
    assert "1 canary prompts have no answer yet" in waiting["reasons"][1]
    assert canary.trial.prompts_right == {"sum"}
    assert canary.look(prompts=[["name", True]])["decision"] == "promote"


def calls(subject: tuple[int, int], control: tuple[int, int]) -> dict[str, Any]:
    return {"calls": {"subject": list(subject), "control": list(control)}}


def test_many_more_failed_calls_than_the_controls_roll_back(canary: LiveLog) -> None:
    body = canary.look(**calls((100, 30), (100, 1)))
    assert (body["decision"], body["trigger"]) == ("roll_back", 2)
    assert "30 users" in body["reasons"][0]


@pytest.mark.parametrize(
    ("subject", "control"),
    [((19, 19), (300, 0)), ((100, 4), (100, 1)), ((100, 40), (100, 20)), ((0, 0), (300, 0))],
)
def test_few_calls_and_chance_roll_nothing_back(
    canary: LiveLog, subject: tuple[int, int], control: tuple[int, int]
) -> None:
    assert canary.look(**calls(subject, control))["decision"] == "continue"


def test_calls_of_one_arm_wait_for_the_others(canary: LiveLog) -> None:
    canary.look(**calls((100, 30), (0, 0)))
    assert canary.trial.error_logs == (0.0, 0.0, 0.0, 0.0)
    assert canary.look(**calls((0, 0), (100, 1)))["decision"] == "roll_back"


@pytest.mark.parametrize("kind", ["canary", "steady"])
def test_both_arms_falling_together_freeze_learning_and_roll_nothing_back(kind: str) -> None:
    log = LiveLog(kind=kind)
    log.start(reference=(90.0, 100))
    decisions = [log.pairs([0.0, 1.0, 0.0], [0.0, 1.0, 0.0])["decision"] for _ in range(20)]
    first = decisions.index("freeze")
    assert decisions[:first] == ["continue"] * first
    assert decisions[first + 1 :] == ["continue"] * (19 - first)  # said once
    assert log.trial.drifted
    assert log.state.live.running is log.trial or log.state.live.running == log.trial


def test_one_arm_falling_alone_is_no_drift() -> None:
    log = LiveLog()
    log.start(reference=(90.0, 100))
    decisions = [log.pairs([0.0] * 3, [1.0] * 3)["decision"] for _ in range(4)]
    assert decisions[-1] == "roll_back"
    assert "freeze" not in decisions


@pytest.mark.parametrize("reference", [None, (20.0, 20), (10.0, 100), (0.0, 100)])
def test_without_a_known_rate_before_there_is_no_drift(reference: tuple[float, int] | None) -> None:
    log = LiveLog()
    log.start(reference=reference)
    body = log.pairs([0.0] * 50, [0.0] * 50)
    assert (body["decision"], body["drift"]) == ("continue", None)


def test_drift_stops_widening() -> None:
    log = LiveLog()
    log.start(reference=(99.0, 100))
    assert log.pairs([0.0] * 25, [0.0] * 25)["decision"] == "freeze"
    assert log.pairs([0.0] * 25, [0.0] * 25)["share"] == 0.1


def test_the_second_rollback_of_a_window_is_repeated(canary: LiveLog) -> None:
    first = canary.pairs([0.0] * 12, [1.0] * 12)
    canary.start(trial="trial-2")
    second = canary.pairs([0.0] * 12, [1.0] * 12)
    assert [(body["rollbacks"], body["repeated"]) for body in (first, second)] == [(1, False), (2, True)]
    assert "two people sign" in second["reasons"][-1]


def test_another_champion_interrupts_a_trial(canary: LiveLog) -> None:
    body = canary.pairs([1.0] * 12, [0.0] * 12, interruption="the champion changed")
    assert (body["decision"], body["reasons"]) == ("inconclusive", ["the champion changed"])


def test_two_trials_do_not_run_at_once(canary: LiveLog) -> None:
    canary.start(trial="trial-2")
    with pytest.raises(AuditError, match="'trial-2' starts while 'trial-1' runs"):
        _ = canary.state


def test_the_detector_alarms_when_the_champion_turned_bad(steady: LiveLog) -> None:
    assert steady.pairs([1.0, 0.0] * 20, [1.0, 0.0] * 20)["decision"] == "continue"
    body = steady.pairs([0.0] * 30, [1.0] * 30)
    assert (body["decision"], body["trigger"]) == ("roll_back", 1)
    assert "70 pairs" in body["reasons"][0]


def test_the_recorded_detector_is_the_golden_one() -> None:
    golden = VECTORS["e_detector_one_bet"]
    log = LiveLog(kind="steady", policy=live_policy(holdback=replace(HOLDBACK, bets=(golden["g"],))))
    log.start()
    values = [log.pairs([max(d, 0)], [max(-d, 0)])["detector"] for d in golden["d"]]
    assert values == pytest.approx(golden["m"], rel=1e-5)


def test_a_new_period_draws_anew_and_keeps_the_detector(steady: LiveLog) -> None:
    first = steady.pairs([1.0] * 20, [0.0] * 22)
    draw = steady.trial.draw
    steady.now += DAY_S
    body = steady.look([["user-1", "control", 1.0, steady.now]])  # the same user gives one unit to each period
    assert (body["period"], body["pairs"]) == (1, first["pairs"])
    assert steady.trial.draw != draw
    assert body["waiting"] == {"subject": 0, "control": 1}  # the two that waited are gone with their period
    assert body["detector"] == first["detector"]
    assert steady.trial.reference == (20.0, 42)


def test_a_clock_that_steps_back_opens_no_earlier_period(steady: LiveLog) -> None:
    steady.now += DAY_S
    steady.look()
    steady.now -= DAY_S
    assert steady.look()["period"] == 1


def test_a_look_without_news_is_silent(canary: LiveLog) -> None:
    trial = canary.trial
    assert is_silent(trial, canary.look())
    assert not is_silent(trial, canary.look(canary.units([1.0], [])))
    assert not is_silent(trial, canary.look(**calls((1, 0), (0, 0))))
    assert not is_silent(trial, canary.look(prompts=[["sum", True]]))


def _rewritten(records: list[AuditRecord], seq: int, **changes: Any) -> list[AuditRecord]:
    """The log with one body changed and every hash computed again."""
    made: list[AuditRecord] = []
    for record in records:
        body = {**record.body, **changes} if record.seq == seq else record.body
        made.append(next_record(made[-1] if made else None, kind=record.kind, body=body, time=record.time))
    return made


@pytest.mark.parametrize("kind", ["canary", "steady"])
def test_every_look_recomputes_and_an_edit_is_found(kind: str) -> None:
    log = LiveLog(kind=kind)
    log.start(reference=(60.0, 100))
    for _ in range(3):
        log.pairs([1.0, 0.0, 0.5], [0.0, 0.0, 1.0], **calls((30, 2), (40, 1)))
    log.pairs([0.0] * 40, [1.0] * 40)
    records = list(log.audit.read())
    assert verify_audit(records).recomputed == {f"{kind}_look": 4}
    assert gate_state(records).live.trial == log.trial
    evidence = "k_minus" if kind == "canary" else "detector"
    for seq, field, value in ((2, "units", []), (3, evidence, 0.5), (5, "decision", "continue"), (5, "reasons", [])):
        with pytest.raises(AuditError, match=r"audit record \d"):
            verify_audit(_rewritten(records, seq, **{field: value}))


def falling(kind: str = "canary") -> LiveLog:
    """Both arms fell: a look decided to freeze learning, and nobody recorded that yet."""
    log = LiveLog(kind=kind)
    log.start(reference=(100.0, 100))
    assert log.pairs([0.0] * 25, [0.0] * 25)["decision"] == "freeze"
    return log


def test_one_persons_freeze_does_not_answer_what_a_trigger_asked_for() -> None:
    log = falling()
    log.audit.append("freeze", {"reason": "an operator", "trigger": None}, time=log.now)
    assert log.state.live.freeze_due is not None
    log.audit.append("freeze", {"reason": "drift", "trigger": 4}, time=log.now)
    frozen = log.state.controls.frozen
    assert (log.state.live.freeze_due, frozen is not None and frozen.trigger) == (None, 4)


def test_a_freeze_that_is_due_holds_before_it_is_recorded() -> None:
    log = falling()
    assert log.pairs([1.0] * 40, [0.0] * 40)["decision"] == "continue"
    assert "learning is frozen" in log.trial.reason


def test_nothing_is_promoted_before_the_review_that_a_broken_glass_asks_for() -> None:
    log = LiveLog()
    log.start()
    person = {"public_key": "k", "name": "Ada", "statements": [{"signer": "k"}]}
    log.audit.append("person_trusted", person, time=log.now)
    glass = {"adapter_sha256": "9" * 64, "expires_at": log.now + 1.0, "statements": [{"signer": "k"}]}
    log.audit.append("break_glass", glass, time=log.now)
    assert log.pairs([1.0] * 40, [0.0] * 40)["decision"] == "continue"
    log.audit.append("anchor_signed", {"release": "m-r1", "statements": [{"signer": "k"}]}, time=log.now)
    assert log.look()["decision"] == "promote"
