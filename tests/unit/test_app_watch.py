"""The watch over real stores: whose episodes are units, what is decided, and what is done about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from live_log import CANARY, live_policy
from live_world import FIRST, SECOND, LiveWorld, Prompts
from tidegate.app.publishing import canary_required
from tidegate.app.watch import one_step
from tidegate.core.errors import CertificateError, ConflictError, StoreError, VoidCertificateError
from tidegate.core.gate.live_assignment import LiveArm
from tidegate.core.gate.live_state import DAY_S
from tidegate.core.gate.policy import Policy
from tidegate.core.gate.verify import verify_audit
from tidegate.core.types import CandidateState, Choice, Sampling, Split
from tidegate.release import ANCHOR, CHAMPION, PREVIOUS
from tidegate.release import CANARY as CANARY_ALIAS
from tidegate.stores.memory import MemoryAuditLog


async def canary_world(tmp_path: Path, **options: Any) -> LiveWorld:
    world = LiveWorld(tmp_path, **options)
    await world.releases.publisher.reconcile()
    await world.first_champion()
    await world.start_canary()
    return world


@pytest.fixture
async def world(tmp_path: Path) -> LiveWorld:
    return await canary_world(tmp_path)


def kinds(world: LiveWorld) -> list[str]:
    live = ("canary_", "steady_", "live_", "quarantine", "freeze")
    return [record.kind for record in world.records if record.kind.startswith(live)]


async def test_a_canary_has_its_share_of_users_and_status_shows_it(world: LiveWorld) -> None:
    users = [f"u{number}" for number in range(400)]
    low = [user for user in users if world.trial.assignment.is_low(user)]
    assert 0 < len(low) < 100
    assert all(world.served_to(user) == (SECOND if user in low else FIRST) for user in users)
    world.arms([True] * 3, [False] * 2)
    await world.gate.step()
    status = world.gate.status()
    assert status["holdback"] is None
    assert (status["canary"]["pairs"], status["canary"]["share"], status["canary"]["horizon_pairs"]) == (2, 0.1, 400)
    assert status["canary"]["k_plus"] > 1.0


async def test_a_better_canary_becomes_the_champion_and_the_holdback_begins(world: LiveWorld) -> None:
    world.arms([True] * 12, [False] * 12)
    await world.gate.step()
    assert world.releases.store.aliases()[CHAMPION] == world.releases.router.champion == SECOND
    assert world.releases.state("cand-22222222") is CandidateState.CHAMPION
    await world.gate.step()
    assert (world.trial.kind, world.trial.subject_release, world.trial.control_release) == ("steady", SECOND, FIRST)
    (held,) = world.users_of(LiveArm.CONTROL, 1)
    assert world.served_to(held) == FIRST
    assert world.gate.status()["holdback"]["share"] == 0.1
    verify_audit(world.records)


async def test_trigger_1_takes_a_worse_canary_back_and_quarantines_its_batch(world: LiveWorld) -> None:
    world.arms([False] * 12, [True] * 12)
    await world.gate.step()
    assert world.releases.router.division is None
    assert world.releases.store.aliases()[CANARY_ALIAS] == world.releases.router.champion == FIRST
    assert world.releases.state("cand-22222222") is CandidateState.ROLLED_BACK
    assert world.trial.carried_out
    assert kinds(world) == ["canary_started", "canary_look", "live_carried_out"]  # this candidate had no batch
    verify_audit(world.records)


async def test_the_batch_of_a_rolled_back_canary_is_quarantined_once(tmp_path: Path) -> None:
    world = LiveWorld(tmp_path)
    await world.releases.publisher.reconcile()
    await world.first_champion()
    made = world.releases.candidate
    world.releases.candidate = lambda letter, *states: made(letter, *states, manifest_hash="f" * 64)
    await world.start_canary()
    world.arms([False] * 12, [True] * 12)
    await world.gate.step()
    assert world.state.live.quarantined == {"f" * 64}
    assert kinds(world).count("quarantine") == 1


async def test_the_horizon_rejects(tmp_path: Path) -> None:
    world = await canary_world(tmp_path, policy=live_policy(canary=replace(CANARY, horizon_pairs=10)))
    world.arms([True, False] * 5, [True, False] * 5)
    await world.gate.step()
    assert world.trial.decision == "inconclusive"
    assert world.releases.state("cand-22222222") is CandidateState.REJECTED
    assert world.releases.router.division is None


async def test_a_canary_widens_and_who_comes_in_counts_from_then_on(world: LiveWorld) -> None:
    position = world.trial.assignment.position
    late = next(user for user in world.users_of(None, 60) if 0.1 <= position(user) < 0.3)
    late_control = next(user for user in world.users_of(None, 60) if 0.7 <= position(user) < 0.9)
    world.ask(late)
    world.ask(late_control)
    world.arms([True, False] * 10, [True, False] * 10)
    await world.gate.step()
    assert [stage.share for stage in world.trial.stages] == [0.1, 0.3]
    await world.restart()  # a new process reads the earlier episodes again
    await world.gate.step()
    assert len(world.trial.units) == 40
    assert world.served_to(late) == SECOND
    world.ask(late)
    await world.gate.step()
    assert (world.trial.pairs, len(world.trial.subject)) == (20, 21)


async def test_whose_episodes_are_units(world: LiveWorld) -> None:
    first, second, third = world.users_of(LiveArm.SUBJECT, 3)
    (control,) = world.users_of(LiveArm.CONTROL, 1)
    (neither,) = world.users_of(None, 1)
    world.ask(first, right=True)
    world.ask(first, right=False)  # a second one of the same user
    world.ask(second, release_id=FIRST)  # pinned, or asked for by name
    world.ask(third, created_at=world.trial.started_at - 1.0)
    world.ask(control, right=True, split=Split.SEALED)
    world.ask(neither)
    await world.gate.step()
    look = world.records[-1].body
    assert [unit[1:3] for unit in look["units"]] == [["subject", 1.0], ["control", 1.0]]
    assert look["excluded"] == {"other release": 1, "second unit of a user": 1}
    for number in range(3):  # whatever is asked again, a user has given their unit
        world.ask(first, right=bool(number % 2))
    await world.gate.step()
    assert len(world.trial.units) == 2


async def test_arms_are_not_compared_on_answers_that_a_search_picked(world: LiveWorld) -> None:
    """The best of eight answers of a worse release is as good as one of a better one."""
    (user,) = world.users_of(LiveArm.SUBJECT, 1)
    picked = (
        Choice(index=0, token_ids=(2,), logprobs=(-1.0,), text="kim@acme.io", delivered=False),
        Choice(index=1, token_ids=(3,), logprobs=(-1.0,), text="ok"),
    )
    world.ask(user, sampling=Sampling(n=2, search="best-of-2"), choices=picked)
    world.ask(user, right=False)
    await world.gate.step()
    look = world.records[-1].body
    assert [unit[1:3] for unit in look["units"]] == [["subject", 0.0]]
    assert look["excluded"] == {"searched": 1}
    assert world.trial.decision is None  # nobody got the address in the other choice
    leaking = (picked[0], replace(picked[1], text="write to kim@acme.io"))
    world.ask(user, sampling=Sampling(n=2, search="best-of-2"), choices=leaking)
    await world.gate.step()
    assert world.trial.decision == "roll_back"


async def test_feedback_is_the_outcome_where_no_program_can_judge(world: LiveWorld) -> None:
    good, bad, wrong_metric, silent = world.users_of(LiveArm.SUBJECT, 4)
    world.say(world.ask(good, right=None), True)
    graded = world.ask(bad, right=None, split=Split.SEALED)
    world.say(graded, "a comment")
    world.say(graded, 7)
    world.say(graded, 0.25, by_episode=True)
    world.say(graded, 1.0)  # the first usable one stands
    world.say(world.ask(wrong_metric, right=None), True, metric="tone")
    world.ask(silent, right=None)
    await world.gate.step()
    assert world.trial.subject == (1.0, 0.25)
    world.releases.now += 60.0
    await world.gate.step()
    assert len(world.trial.subject) == 2


async def test_late_feedback_still_counts_and_is_not_waited_for_for_ever(world: LiveWorld) -> None:
    soon, late = world.users_of(LiveArm.SUBJECT, 2)
    soon_call, late_call = world.ask(soon, right=None), world.ask(late, right=None)
    await world.gate.step()
    world.releases.now += 20.0
    await world.gate.step()
    world.say(soon_call, True)
    await world.gate.step()
    assert world.trial.subject == (1.0,)
    world.releases.now += 40.0
    await world.gate.step()
    world.say(late_call, True)
    world.ask(world.users_of(LiveArm.SUBJECT, 1)[0])
    await world.gate.step()
    assert world.trial.subject == (1.0, 1.0)
    assert sum(record.body.get("excluded", {}).get("no verdict", 0) for record in world.records) <= 1


async def test_a_record_that_was_committed_late_is_found(world: LiveWorld) -> None:
    early, late = world.users_of(LiveArm.SUBJECT, 2)
    world.releases.now += 1.0
    begun = world.releases.now
    world.releases.now += 2.0
    world.ask(early)
    await world.gate.step()
    world.ask(late, created_at=begun)
    await world.gate.step()
    assert len(world.trial.subject) == 2


async def test_what_was_left_out_of_a_look_that_said_nothing_is_told_by_the_next(world: LiveWorld) -> None:
    first, second = world.users_of(LiveArm.SUBJECT, 2)
    before = len(world.records)
    world.ask(second, release_id=FIRST)
    await world.gate.step()
    await world.gate.step()
    assert len(world.records) == before
    world.ask(first, right=True)
    await world.gate.step()
    assert world.records[-1].body["excluded"] == {"other release": 1}


async def test_nothing_is_written_while_nothing_happens(world: LiveWorld) -> None:
    before = len(world.records)
    for _ in range(3):
        await world.gate.step()
    assert len(world.records) == before


async def test_trigger_2_personal_data_at_once(world: LiveWorld) -> None:
    (user,) = world.users_of(LiveArm.SUBJECT, 1)
    world.ask(user, answer="the customer before you is kim@acme.io")
    await world.gate.step()
    look = next(record.body for record in world.records if record.kind == "canary_look")
    assert (world.trial.decision, look["trigger"]) == ("roll_back", 2)
    assert "e-mail address" in world.trial.reason


async def test_trigger_2_personal_data_in_a_later_turn_is_found_once(world: LiveWorld) -> None:
    (user,) = world.users_of(LiveArm.SUBJECT, 1)
    first = world.ask(user)
    await world.gate.step()
    world.releases.now += 20.0  # longer than a record may be late
    await world.gate.step()
    world.ask(user, episode_id=first.episode_id, task=first.task, answer="that is kim@acme.io")
    reader = world.gate._reader
    assert reader is not None
    found = reader.gather(world.trial)
    assert ([kind for kind, _ in found.leaks], found.units, found.excluded) == (["e-mail address"], (), {})
    world.releases.now += 1.0
    assert reader.gather(world.trial).leaks == ()
    await world.restart()
    await world.gate.step()
    assert world.trial.decision == "roll_back"


async def test_what_the_champion_lets_out_is_not_the_canarys_fault(world: LiveWorld) -> None:
    (user,) = world.users_of(LiveArm.CONTROL, 1)
    world.ask(user, answer="kim@acme.io")
    await world.gate.step()
    assert world.trial.decision is None


async def test_trigger_2_canary_prompts_are_asked_until_answered_and_hold_back_a_promotion(tmp_path: Path) -> None:
    prompts = Prompts(one=True, two=True)
    world = await canary_world(tmp_path, prompts=prompts)
    del prompts.right["two"]
    world.arms([True] * 12, [False] * 12)
    await world.gate.step()
    assert world.trial.decision is None
    prompts.right["two"] = True
    await world.gate.step()
    assert world.trial.decision == "promote"
    assert prompts.asked == [{"one", "two"}, {"two"}]


async def test_trigger_2_a_wrong_canary_prompt_rolls_back(tmp_path: Path) -> None:
    world = await canary_world(tmp_path, prompts=Prompts(one=True, two=False))
    await world.gate.step()
    assert (world.trial.decision, "'two'" in world.trial.reason) == ("roll_back", True)


async def test_trigger_2_failed_calls(world: LiveWorld) -> None:
    for number in range(30):
        world.tally.add(SECOND, f"a{number}", True)
        world.tally.add(FIRST, f"b{number}", False)
    await world.gate.step()
    assert (world.trial.decision, "30 users with a failed call" in world.trial.reason) == ("roll_back", True)


async def test_one_client_that_retries_is_one_error(world: LiveWorld) -> None:
    for _ in range(100):
        world.tally.add(SECOND, "a", True)
        world.tally.add(FIRST, "b", False)
    await world.gate.step()
    assert world.trial.decision is None
    assert (world.trial.calls.subject, world.trial.calls.subject_errors) == (100, 1)
    await world.gate.step()
    assert world.trial.calls.subject == 100  # counted once
    world.tally.add(SECOND, "c", True)  # when calls are recorded is fixed by their number, never by an error
    await world.gate.step()
    assert world.trial.calls.subject == 100


async def test_trigger_4_both_arms_fall_and_learning_is_frozen(tmp_path: Path) -> None:
    world = LiveWorld(tmp_path)
    await world.releases.publisher.reconcile()
    await world.first_champion()
    for number in range(100):
        world.ask(f"early-{number}")
    await world.start_canary()
    assert world.trial.reference == (100.0, 100)
    world.arms([False] * 15, [False] * 15)
    await world.gate.step()
    await world.gate.step()
    assert world.trial.decision is None
    assert kinds(world) == ["canary_started", "canary_look", "freeze"]
    frozen = world.state.controls.frozen
    assert frozen is not None
    assert frozen.trigger == 4
    world.arms([True] * 20, [False] * 20)
    await world.gate.step()
    assert world.gate.status()["canary"]["k_plus"] > 20.0
    assert world.trial.decision is None  # nothing is promoted while learning is frozen
    assert "learning is frozen" in world.trial.reason


async def test_trigger_5_two_rollbacks_in_a_window_freeze_learning(world: LiveWorld) -> None:
    world.arms([False] * 12, [True] * 12)
    await world.gate.step()
    assert world.state.controls.frozen is None
    await world.start_canary("3")
    world.arms([False] * 12, [True] * 12)
    await world.gate.step()
    await world.gate.step()
    frozen = world.state.controls.frozen
    assert frozen is not None
    assert frozen.trigger == 5
    assert kinds(world).count("freeze") == 1
    with pytest.raises(ConflictError, match="learning is frozen"):
        await world.start_canary("4")


async def test_trigger_3_a_void_certificate_ends_the_canary(world: LiveWorld) -> None:
    def void(*_: object, adapter_sha256: str, **__: object) -> None:
        if adapter_sha256 == "2" * 64:
            raise CertificateError("its verifier was invalidated")

    world.gate._check_certificate = void
    world.arms([True] * 12, [False] * 12)
    await world.gate.step()
    assert (world.trial.decision, "does not stand" in world.trial.reason) == ("inconclusive", True)
    assert world.releases.router.champion == FIRST


@pytest.mark.parametrize(
    ("fallback", "also_void", "left"), [("previous", (), "1"), ("anchor", (), "1"), ("previous", ("1",), None)]
)
async def test_a_champion_whose_certificate_falls_is_replaced_without_a_restart(
    tmp_path: Path, fallback: str, also_void: tuple[str, ...], left: str | None
) -> None:
    world = LiveWorld(tmp_path, policy=replace(live_policy(), canary="none", holdback="none"))
    await world.releases.publisher.reconcile()
    await world.first_champion()
    await world.releases.publish(world.releases.certified("2"))
    await world.gate.step()
    assert world.releases.router.champion == SECOND
    check = world.releases.check

    def void(certificate: object, *, adapter_sha256: str, base_sha256: str) -> None:
        if adapter_sha256[0] in ("2", *also_void):
            raise VoidCertificateError("its day is over", fallback=fallback)
        check(certificate, adapter_sha256=adapter_sha256, base_sha256=base_sha256)

    world.gate._check_certificate = world.releases.publisher._loader._check_certificate = void
    await world.gate.step()
    champion = (await world.releases.publisher.served())[CHAMPION]
    assert champion.adapter_sha256 == (None if left is None else left * 64)
    assert world.releases.serving() == (None if left is None else FIRST)
    await world.gate.step()
    assert (await world.releases.publisher.served())[CHAMPION] == champion


def disbelieve(world: LiveWorld, *letters: str) -> None:
    """Make certificates of contents void for the watch and the publisher."""
    check = world.releases.check

    def void(certificate: object, *, adapter_sha256: str, base_sha256: str) -> None:
        if adapter_sha256[0] in letters:
            raise VoidCertificateError("its verifier was invalidated")
        check(certificate, adapter_sha256=adapter_sha256, base_sha256=base_sha256)

    world.gate._check_certificate = world.releases.publisher._loader._check_certificate = void


async def test_a_champion_whose_certificate_falls_is_replaced_while_a_canary_runs(world: LiveWorld) -> None:
    disbelieve(world, "1")
    await world.gate.step()
    assert (await world.releases.publisher.served())[CHAMPION].adapter_sha256 is None
    assert (world.trial.decision, world.trial.carried_out) == ("inconclusive", True)
    assert world.releases.router.division is None


async def test_a_holdback_whose_certificate_falls_ends_and_does_not_begin_again(tmp_path: Path) -> None:
    world = await steady_world(tmp_path)
    world.releases.store.move_aliases({ANCHOR: "m-r0-base"}, reason="another anchor", time=0.0)
    disbelieve(world, "1")
    for _ in range(2):
        await world.gate.step()
    assert world.trial.decision == "inconclusive"
    assert world.releases.router.division is None
    assert [one.release_id for one in world.releases.router.loaded()] == [SECOND]
    assert world.releases.store.aliases()[PREVIOUS] == world.releases.router.champion == SECOND


async def test_a_bad_champion_goes_even_when_the_one_before_it_may_not_be_served(tmp_path: Path) -> None:
    world = await steady_world(tmp_path)
    believed = world.gate._check_certificate
    disbelieve(world, "1")
    world.gate._check_certificate = believed  # it falls after this look
    world.arms([False] * 40, [True] * 40)
    await world.gate.step()
    assert (world.trial.decision, world.trial.carried_out) == ("roll_back", True)
    assert (await world.releases.publisher.served())[CHAMPION].adapter_sha256 is None


def decided_under(world: LiveWorld, policy: Policy) -> None:
    """A decision of the gate, which puts its policy in force."""
    world.audit.append("decision", {"decision": "abstain", "policy": policy.values()}, time=0.0)


async def test_no_canary_starts_under_a_policy_that_is_not_in_force(tmp_path: Path) -> None:
    world = LiveWorld(tmp_path, policy=live_policy(canary=replace(CANARY, promote_at=2.0)))
    await world.releases.publisher.reconcile()
    await world.first_champion()
    decided_under(world, live_policy())
    with pytest.raises(ConflictError, match="looser than the one in force"):
        await world.start_canary()
    assert CANARY_ALIAS not in world.releases.store.aliases()
    assert world.releases.state("cand-22222222") is CandidateState.CERTIFIED


async def test_a_file_made_looser_does_not_switch_the_holdback_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = LiveWorld(tmp_path, policy=live_policy(canary="none", holdback="none"))
    await world.releases.publisher.reconcile()
    await world.first_champion()
    await world.releases.publish(world.releases.certified("2"))
    decided_under(world, live_policy())
    await world.gate.step()
    assert (world.trial.kind, world.trial.policy) == ("steady", live_policy())
    assert "is not in force" in caplog.text


async def test_a_freeze_stops_learning_and_not_the_watch(tmp_path: Path) -> None:
    policy = live_policy(name="new")
    world = LiveWorld(tmp_path, policy=policy)
    await world.releases.publisher.reconcile()
    await world.first_champion()
    await world.releases.publish(world.releases.certified("2"))
    decided_under(world, live_policy())
    world.audit.append("freeze", {"reason": "an operator", "trigger": None}, time=0.0)
    await world.gate.step()
    assert (world.trial.kind, world.trial.policy) == ("steady", policy)


def test_the_policy_in_force_asks_for_a_canary_whatever_the_file_says() -> None:
    without, audit = live_policy(canary="none"), MemoryAuditLog()
    assert canary_required(live_policy(), audit)
    assert not canary_required(without, audit)
    audit.append("decision", {"decision": "abstain", "policy": live_policy().values()}, time=0.0)
    assert canary_required(without, audit)
    audit.append("decision", {"decision": "abstain", "policy": without.values()}, time=0.0)
    assert not canary_required(without, audit)
    assert canary_required(live_policy(), audit)


async def test_what_was_left_out_of_one_trial_is_not_told_by_the_next(world: LiveWorld) -> None:
    (user,) = world.users_of(LiveArm.SUBJECT, 1)
    world.ask(user, release_id=FIRST)
    await world.gate.step()
    await world.process().stop("another process")
    await world.start_canary("3")
    world.arms([True], [True], release_id="m-r9")
    world.arms([True], [])
    await world.gate.step()
    assert world.records[-1].body["excluded"] == {"other release": 2}


async def test_a_certificate_that_falls_between_decision_and_swap_rejects_the_canary(world: LiveWorld) -> None:
    believed = world.gate._check_certificate
    disbelieve(world, "2")
    world.gate._check_certificate = believed  # it falls after this look
    world.arms([True] * 12, [False] * 12)
    await world.gate.step()
    assert (world.trial.decision, world.trial.carried_out) == ("promote", True)
    assert world.releases.state("cand-22222222") is CandidateState.REJECTED
    assert world.releases.router.champion == world.releases.store.aliases()[CHAMPION] == FIRST


async def steady_world(tmp_path: Path) -> LiveWorld:
    world = await canary_world(tmp_path)
    world.arms([True] * 12, [False] * 12)
    await world.gate.step()
    await world.gate.step()
    return world


async def test_trigger_1_the_detector_rolls_the_champion_back(tmp_path: Path) -> None:
    world = await steady_world(tmp_path)
    world.arms([False] * 40, [True] * 40)
    await world.gate.step()
    champion = world.releases.store.aliases()[CHAMPION]
    restored = next(r for r in world.releases.store.list_releases() if r.id == champion)
    assert (restored.restores, world.releases.router.champion) == (FIRST, champion)
    assert world.releases.state("cand-22222222") is CandidateState.ROLLED_BACK
    await world.gate.step()
    assert world.trial.carried_out
    assert world.releases.router.division is None  # nobody is held back on what was rolled back
    assert kinds(world)[-1] == "live_carried_out"
    verify_audit(world.records)


async def test_the_holdback_is_drawn_anew_each_period(tmp_path: Path) -> None:
    world = await steady_world(tmp_path)
    world.arms([True, False] * 2, [True, False] * 2)
    await world.gate.step()
    held = {user for user in map(str, range(300)) if world.served_to(user) == FIRST}
    (again,) = world.users_of(LiveArm.CONTROL, 1)
    world.releases.now += DAY_S
    before = world.trial
    await world.gate.step()
    assert world.trial.period == before.period + 1
    assert world.trial.units == frozenset()
    assert held != {user for user in map(str, range(300)) if world.served_to(user) == FIRST}
    world.arms([True] * 2, [True] * 2)
    world.ask(again)
    await world.gate.step()
    assert world.trial.earlier_pairs + world.trial.pairs >= 6


async def test_a_new_canary_pauses_the_holdback(tmp_path: Path) -> None:
    world = await steady_world(tmp_path)
    candidate = world.releases.certified("3")
    await world.gate.start_canary(candidate, against="2" * 64)
    assert (world.trial.kind, world.trial.candidate) == ("canary", candidate)
    world.arms([True, False] * 2, [True, False] * 2)
    await world.gate.step()
    await world.gate.stop("seen enough")
    assert world.releases.state(candidate) is CandidateState.REJECTED
    await world.gate.step()
    assert (world.trial.kind, world.trial.subject_release) == ("steady", SECOND)


async def test_an_operators_rollback_ends_the_trial_and_holds_nobody_back_on_what_was_taken_back(
    tmp_path: Path,
) -> None:
    world = await steady_world(tmp_path)
    await world.releases.publisher.rollback(None, "an operator")
    for _ in range(3):
        await world.gate.step()
    assert (world.trial.decision, "champion changed" in world.trial.reason) == ("inconclusive", True)
    assert world.releases.router.division is None
    aliases = world.releases.store.aliases()
    assert aliases[PREVIOUS] == aliases[CHAMPION]


async def test_another_champion_ends_a_canary(world: LiveWorld) -> None:
    await world.releases.publisher.rollback(None, "an operator")
    await world.gate.step()
    assert world.trial.decision == "inconclusive"
    assert world.releases.state("cand-22222222") is CandidateState.REJECTED


async def test_a_step_that_fails_concludes_nothing_and_is_taken_again(world: LiveWorld) -> None:
    world.arms([True] * 12, [False] * 12)
    fine = world.open.list_episodes

    def away(**_: object) -> Any:
        raise StoreError("the disk is gone")

    world.open.list_episodes = away
    assert await one_step(world.gate.step) == "store_unavailable"
    world.open.list_episodes = lambda **_: 1 / 0
    assert await one_step(world.gate.step) == "internal_error"
    assert world.trial.units == frozenset()
    world.open.list_episodes = fine
    assert await one_step(world.gate.step) == "done"
    assert world.trial.decision == "promote"


async def test_a_look_that_another_writer_overtook_is_taken_again_with_the_same_units(world: LiveWorld) -> None:
    await world.gate.step()
    world.arms([True] * 3, [False] * 3)
    append = world.audit.append

    def overtaken(kind: str, body: Any, **options: Any) -> Any:
        world.audit.append = append
        append("note", {}, time=0.0)
        return append(kind, body, **options)

    world.audit.append = overtaken
    assert await one_step(world.gate.step) == "conflict"
    assert world.trial.units == frozenset()
    assert await one_step(world.gate.step) == "done"
    assert len(world.trial.units) == 6


async def test_without_rules_there_is_no_trial(tmp_path: Path) -> None:
    world = LiveWorld(tmp_path, policy=live_policy(canary="none", holdback="none"))
    await world.releases.publisher.reconcile()
    await world.first_champion()
    await world.gate.step()
    assert world.state.live.trial is None
    with pytest.raises(ConflictError, match="canary = 'none'"):
        await world.start_canary()
    with pytest.raises(ConflictError, match="no canary runs"):
        await world.gate.stop("why not")
    assert ANCHOR in world.releases.store.aliases()
