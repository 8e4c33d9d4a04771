"""The gate over real stores: epochs open, are reused and close; looks are spent once; arms are what they claim."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gate_engine import (
    BASE,
    ExactVerifier,
    GateWorld,
    Looker,
    adapter,
    make_candidate,
    make_grading,
    make_policy,
    make_task,
    make_tasks,
    sealed_traffic,
    share,
)
from tidegate.core.audit import next_record
from tidegate.core.errors import AdapterError, AuditError, GateError
from tidegate.core.gate import (
    Abstain,
    Promote,
    Refuse,
    Reply,
    ScreenAbstained,
    ScreenFailed,
    ScreenPassed,
    describe,
    gate_state,
    reasons_of,
    verify_audit,
)
from tidegate.core.gate.live_state import QUARANTINE
from tidegate.core.gate.policy import CollapseRules
from tidegate.core.statistics import betting_p_value
from tidegate.core.types import (
    AdapterRef,
    Answer,
    AuditRecord,
    Choice,
    GenerationRequest,
    JsonObject,
    Outcome,
    Sampling,
    Task,
)
from tidegate.gate import Arm, KeyPair, verify_certificate
from tidegate.gate.evaluate import Call
from tidegate.gate.screening import MAX_KL_CALLS, measured_calls
from tidegate.ports.signals import Judgement


@pytest.fixture
def world(tmp_path: Path) -> GateWorld:
    return GateWorld(key=KeyPair.load_or_create(tmp_path / "gate.pem"))


def nobody_asked(task: Task) -> bool:
    del task
    return False


def decisions(world: GateWorld) -> list[Any]:
    return [record for record in world.audit.read() if record.kind == "decision"]


async def test_a_better_challenger_gets_a_certificate_for_its_recorded_decision(world: GateWorld) -> None:
    result = await world.certify("good", 0.8, sealed_traffic(100))
    assert result.reply is Reply.PROMOTE
    assert isinstance(result.decision, Promote)
    certificate = verify_certificate(
        result.certificate, world.key.public_key, adapter_sha256=adapter("good").sha256, base_sha256=BASE
    )
    assert certificate.kind == "gate"
    assert certificate.decision_hash == result.record.hash == decisions(world)[-1].hash
    assert certificate.policy_hash == world.policy.hash
    assert certificate.issued_at == result.record.time
    assert verify_audit(world.audit.read()).promotions == 1


@pytest.mark.parametrize(("name", "skill"), [("degraded", 0.1), ("equal", 0.4)])
async def test_an_equal_or_worse_challenger_is_refused_without_a_certificate(
    world: GateWorld, name: str, skill: float
) -> None:
    result = await world.certify(name, skill, sealed_traffic(100))
    assert result.reply is Reply.REJECT
    assert isinstance(result.decision, Refuse)
    assert result.certificate is None


async def test_the_champion_itself_is_never_promoted(world: GateWorld) -> None:
    result = await world.certify("champion", 0.4, sealed_traffic(100))
    assert (result.decision.measured.wins, result.decision.measured.losses) == (0, 0)
    assert result.reply is Reply.REJECT


async def test_a_refusal_says_one_constant_word(world: GateWorld) -> None:
    worse, equal = [await world.certify(name, skill, sealed_traffic(100)) for name, skill in (("a", 0.1), ("b", 0.4))]
    assert worse.reply == equal.reply == "reject"
    assert describe(worse.decision) != describe(equal.decision)


async def test_too_few_sealed_tasks_abstain_and_cost_nothing(world: GateWorld) -> None:
    result = await world.certify("good", 0.8, sealed_traffic(39))
    assert result.decision == Abstain(missing=("39 of 40 pairs",))
    assert result.reply is Reply.ABSTAIN
    assert world.engine.requests == []
    assert world.sealed.used_task_ids() == frozenset()
    state = gate_state(world.audit.read())
    assert (state.window, state.epochs) == (None, ())
    again = await world.certify("good", 0.8, sealed_traffic(39))
    assert again.record == result.record
    assert (await world.certify("good", 0.8, sealed_traffic(40))).reply is Reply.PROMOTE


async def test_challengers_share_an_epoch_until_its_looks_are_used_up(world: GateWorld) -> None:
    for number in range(3):
        result = await world.certify(f"c{number}", 0.4, sealed_traffic(200))
        assert (result.record.body["epoch"], result.record.body["epoch_look"]) == ("epoch-1", number + 1)
    result = await world.certify("c3", 0.4, sealed_traffic(200))
    assert (result.record.body["epoch"], result.record.body["epoch_look"]) == ("epoch-2", 1)
    assert result.record.body["look"] == 4
    first, second = ({t.id for t in world.sealed.epoch_tasks(f"epoch-{k}")} for k in (1, 2))
    assert len(first) == len(second) == 60
    assert not first & second
    assert verify_audit(world.audit.read()).decisions == 4


async def test_a_promotion_closes_the_epoch_and_a_new_one_needs_fresh_tasks(world: GateWorld) -> None:
    await world.certify("good", 0.8, sealed_traffic(60))
    result = await world.certify("better", 0.95, sealed_traffic(60))
    assert result.decision == Abstain(missing=("0 of 40 pairs",))
    result = await world.certify("better", 0.95, [*sealed_traffic(60), *sealed_traffic(45, "u")])
    assert result.record.body["epoch"] == "epoch-2"
    assert result.record.body["measured"]["pairs"] == 45
    assert result.record.body["level"] == pytest.approx(0.04)


async def test_a_user_gives_one_task_to_an_epoch(world: GateWorld) -> None:
    crowd = [(f"user-{number % 39}", task) for number, task in enumerate(make_tasks(200))]
    assert (await world.certify("good", 0.8, crowd)).decision == Abstain(missing=("39 of 40 pairs",))


async def test_champion_and_anchor_answers_are_reused_within_an_epoch(world: GateWorld) -> None:
    await world.certify("a", 0.4, sealed_traffic(60))
    assert len(world.engine.requests) == 180
    world.engine.requests.clear()
    await world.certify("b", 0.4, sealed_traffic(60))
    assert {request.adapter for request in world.engine.requests} == {"b"}
    assert len(world.engine.requests) == 60
    assert world.progress[-1] == ("challenger", 60, 60)


async def test_decoding_is_fixed_when_an_epoch_opens(world: GateWorld) -> None:
    await world.certify("a", 0.4, sealed_traffic(60))
    candidate, arm = world.challenger("b", 0.4)
    world.engine.requests.clear()
    await world.gate().certify_candidate(
        candidate,
        challenger=arm,
        champion=world.champion,
        anchor=world.anchor,
        tasks=sealed_traffic(60),
        asked_in_the_open=nobody_asked,
        decoding=Sampling(temperature=0.1),
    )
    settings = {(r.sampling.temperature, r.sampling.n, r.sampling.stop) for r in world.engine.requests}
    assert settings == {(0.9, 1, ("END",))}
    assert len({r.sampling.seed for r in world.engine.requests}) == 60


def newer(verifier: ExactVerifier) -> ExactVerifier:
    verifier.version = "2"
    return verifier


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_calls": 1}, r"max_calls was 3, is 1\. "),
        ({"timeout_s": 60.0}, r"timeout_s was 30\.0, is 60\.0\. "),
        ({"verifiers": {"exact": newer(ExactVerifier())}}, r"verifiers was {'exact': '1'}, is {'exact': '2'}\. "),
        (
            {"max_calls": 1, "timeout_s": 60.0},
            r"max_calls was 3, is 1; timeout_s was 30\.0, is 60\.0\. .*min_pairs is above the 45 tasks of epoch-1",
        ),
    ],
)
async def test_an_epoch_is_graded_in_one_way(world: GateWorld, change: dict[str, Any], words: str) -> None:
    await world.certify("a", 0.4, sealed_traffic(45))
    before = list(world.audit.read())
    graded, world.grading = world.grading, make_grading(**change)
    world.engine.requests.clear()
    with pytest.raises(GateError, match=f"epoch-1 opened with another grading: {words}"):
        await world.certify("b", 0.8, sealed_traffic(45))
    assert list(world.audit.read()) == before
    assert world.engine.requests == []
    world.policy = make_policy(sealed__min_pairs=46)
    later = [*sealed_traffic(45), *sealed_traffic(50, "u")]
    assert (await world.certify("b", 0.4, later)).record.body["epoch"] == "epoch-2"
    assert verify_audit(world.audit.read()).decisions == 2
    world.grading = graded
    with pytest.raises(GateError, match="epoch-2 opened with another grading"):
        await world.certify("c", 0.4, later)


class Grader(ExactVerifier):
    """Grades by a number that the task and the answer fix; never passes."""

    graded = True

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        right = super().judge(task, transcript).score
        return Judgement(outcome=Outcome.FAIL, score=0.1 + 0.2 * share("grade", task.id) + 0.5 * right, detail="")


async def test_whether_rewards_are_graded_is_fixed_when_the_epoch_opens(world: GateWorld) -> None:
    world.grading = make_grading(verifiers={"exact": Grader()})
    await world.certify("slight", 0.42, sealed_traffic(60))
    opened, body = (next(r for r in world.audit.read() if r.kind == kind).body for kind in ("epoch_opened", "decision"))
    assert opened["grading"]["graded"] == ["exact"]
    assert body["measured"]["test"] == "betting test"
    ours, theirs = (np.array(body["outcomes"][arm]["rewards"]) for arm in ("challenger", "champion"))
    assert body["measured"]["p"] == pytest.approx(betting_p_value(ours - theirs))
    assert 0.01 < body["measured"]["p"] < 0.99
    assert body["measured"]["bounds"][0]["difference"] == pytest.approx(np.mean(ours - theirs))
    assert (await world.certify("good", 0.8, sealed_traffic(60))).reply is Reply.PROMOTE
    assert verify_audit(world.audit.read()).promotions == 1


async def test_which_test_applies_cannot_change_within_an_epoch(world: GateWorld) -> None:
    await world.certify("a", 0.4, sealed_traffic(60))
    world.grading = make_grading(verifiers={"exact": Grader()})
    with pytest.raises(GateError, match=r"epoch-1 opened with another grading: graded was \[\], is \['exact'\]"):
        await world.certify("b", 0.8, sealed_traffic(60))


async def test_only_a_verifier_that_grades_has_its_scores_compared(world: GateWorld) -> None:
    class Near(Grader):
        graded = False

    world.grading = make_grading(verifiers={"exact": Near()})
    result = await world.certify("good", 0.8, sealed_traffic(60))
    assert isinstance(result.decision, Refuse)
    assert result.record.body["measured"]["test"] == "sign test"
    assert "rewards" not in result.record.body["outcomes"]["challenger"]


async def test_refusals_length_and_pace_of_the_answers_reach_the_record(world: GateWorld) -> None:
    world.engine.faults = {("good", f"s{number:04}"): "refusal" for number in range(60)}
    result = await world.certify("good", 0.8, sealed_traffic(60))
    outcomes = result.record.body["outcomes"]
    assert outcomes["challenger"]["refused"] == list(range(60))
    assert outcomes["challenger"]["tokens"] == [2] * 60
    assert outcomes["champion"]["refused"] == []
    assert any("guardrail 'no refusals'" in reason for reason in result.decision.reasons)
    kept = world.sealed.answers("epoch-1", adapter("good").sha256)["s0000"]
    assert (kept.text, kept.tools) == ("I'm sorry, but I can't help with that.", ())
    assert kept.surprisal == pytest.approx(0.3)


COLLAPSE = CollapseRules(
    tasks=20,
    samples=4,
    max_pass_at_k_drop=0.02,
    min_strategies=0.8,
    max_slices_lost=0.05,
    min_entropy=0.5,
    min_distinct=0.9,
)


async def test_further_answers_are_asked_of_a_challenger_that_would_be_promoted(world: GateWorld) -> None:
    world.policy = make_policy(collapse=COLLAPSE)
    result = await world.certify("good", 0.8, sealed_traffic(60))
    assert result.reply is Reply.PROMOTE
    assert describe(result.decision).endswith("no alarm of 6 against collapse")
    body = result.record.body
    assert body["not_measured"] == ["canary"]
    alarms = {alarm["name"]: alarm for alarm in body["measured"]["alarms"]}
    assert alarms["pass@4"]["tasks"] == 20 == len(body["samples"]["tasks"])
    assert set(body["samples"]["tasks"]) <= set(body["outcomes"]["tasks"])
    assert not any(alarm["fires"] for alarm in alarms.values())
    assert len(world.engine.requests) == 180 + 2 * 3 * 20  # the first sample is the answer that was asked for anyway
    assert verify_audit(world.audit.read()).promotions == 1


async def test_samples_have_the_same_seeds_in_both_arms_and_different_ones_among_them(world: GateWorld) -> None:
    world.policy = make_policy(collapse=COLLAPSE)
    result = await world.certify("good", 0.8, sealed_traffic(60))
    task = result.record.body["samples"]["tasks"][0]
    seeds = {
        arm: [r.sampling.seed for r in world.engine.requests if r.adapter == arm and f"-{task}-" in r.request_id]
        for arm in ("good", None)
    }
    assert sorted(seeds["good"]) == sorted(seeds[None])
    assert len(set(seeds["good"])) == 4
    kept = [world.sealed.answers("epoch-1", BASE, sample=number)[task] for number in range(4)]
    assert sorted(answer.seed for answer in kept) == sorted(seeds[None])


async def test_a_challenger_that_is_refused_anyway_is_asked_nothing_more(world: GateWorld) -> None:
    world.policy = make_policy(collapse=COLLAPSE)
    result = await world.certify("bad", 0.1, sealed_traffic(60))
    assert result.reply is Reply.REJECT
    assert len(world.engine.requests) == 180
    assert (result.record.body["samples"], result.record.body["not_measured"]) == (None, ["canary", "collapse"])
    assert verify_audit(world.audit.read()).decisions == 1


async def test_progress_does_not_tell_which_test_a_challenger_failed(tmp_path: Path) -> None:
    told: list[list[tuple[str, int, int]]] = []
    for name, skill in (("bad", 0.1), ("narrow", 0.8), ("good", 0.8)):
        world = GateWorld(key=KeyPair.load_or_create(tmp_path / f"{name}.pem"), policy=make_policy(collapse=COLLAPSE))
        world.engine.entropy["narrow"] = 0.1
        result = await world.certify(name, skill, sealed_traffic(60))
        assert (result.reply is Reply.PROMOTE) is (name == "good")
        assert (result.record.body["samples"] is None) is (name == "bad")
        told.append(world.progress)
    assert told[0] == told[1] == told[2]
    assert {arm for arm, _, _ in told[0]} == {"challenger", "champion", "anchor"}


async def test_the_anchor_is_sampled_once_an_epoch(world: GateWorld) -> None:
    world.policy = make_policy(collapse=COLLAPSE)
    world.engine.entropy["narrow"] = 0.1
    first = await world.certify("narrow", 0.8, sealed_traffic(60))
    assert first.reply is Reply.REJECT
    world.engine.requests.clear()
    assert (await world.certify("good", 0.8, sealed_traffic(60))).reply is Reply.PROMOTE
    assert {request.adapter for request in world.engine.requests} == {"good"}
    assert len(world.engine.requests) == 60 + 3 * 20


async def test_a_narrow_challenger_is_refused_with_its_numbers(world: GateWorld) -> None:
    world.policy = make_policy(collapse=COLLAPSE)
    world.engine.entropy["narrow"] = 0.1
    result = await world.certify("narrow", 0.8, sealed_traffic(60))
    assert isinstance(result.decision, Refuse)
    assert describe(result.decision) == (
        "refuse: collapse: token entropy (nats) 0.015, the anchor's 0.15 over 20 tasks; "
        "at least 0.5 of the anchor's is accepted (p = 0.0005 <= 0.0083)"
    )
    assert verify_audit(world.audit.read()).decisions == 1


async def test_samples_cut_short_abstain_and_are_asked_again(world: GateWorld) -> None:
    world.policy = make_policy(collapse=COLLAPSE)

    def break_down(request: GenerationRequest) -> None:
        if len(world.engine.requests) > 250:
            world.engine.faults[None, str(request.messages[0]["content"]).removeprefix("task ")] = "error"

    world.engine.before = break_down
    result = await world.certify("good", 0.8, sealed_traffic(60))
    assert isinstance(result.decision, Abstain)
    assert "further answers of the anchor ended in engine errors" in describe(result.decision)
    assert gate_state(world.audit.read()).window is None
    world.engine.before = lambda request: None
    world.engine.faults.clear()
    assert (await world.certify("good", 0.8, sealed_traffic(60))).reply is Reply.PROMOTE
    assert verify_audit(world.audit.read()).decisions == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda samples: samples | {"tasks": samples["tasks"][::-1]},
            "samples are not 4 answers to each of the 20 tasks",
        ),
        (lambda samples: samples | {"per_task": 5}, "samples are not 4 answers"),
        (lambda samples: samples | {"challenger": samples["anchor"]}, "field 'measured' holds"),
        (lambda samples: None, "field 'decision' holds 'promote'; recomputing gives 'abstain'"),
    ],
)
async def test_forged_samples_are_found(world: GateWorld, change: Callable[[Any], Any], words: str) -> None:
    world.policy = make_policy(collapse=COLLAPSE)
    await world.certify("good", 0.8, sealed_traffic(60))
    *before, last = list(world.audit.read())
    body = dict(last.body) | {"samples": change(last.body["samples"])}
    forged = next_record(before[-1], kind=last.kind, body=body, time=last.time)
    with pytest.raises(AuditError, match=words):
        verify_audit([*before, forged])


async def test_samples_where_the_policy_asks_for_none_are_found(world: GateWorld) -> None:
    await world.certify("good", 0.8, sealed_traffic(60))
    *before, last = list(world.audit.read())
    columns = {name: [] for name in ("passed", "cut_short", "tokens", "surprisal", "strategies", "distinct", "vendi")}
    nothing = {"tasks": [], "per_task": 4, "challenger": columns, "anchor": columns}
    forged = next_record(before[-1], kind=last.kind, body=dict(last.body) | {"samples": nothing}, time=last.time)
    with pytest.raises(AuditError, match="samples were recorded where the policy or the epoch asks for none"):
        verify_audit([*before, forged])


async def test_what_no_task_uses_may_change_within_an_epoch(world: GateWorld) -> None:
    await world.certify("a", 0.4, sealed_traffic(60))
    more = {"exact": ExactVerifier(), "other": newer(ExactVerifier())}
    world.grading = make_grading(verifiers=more, environments={}, concurrency=2)
    assert (await world.certify("b", 0.4, sealed_traffic(60))).record.body["epoch_look"] == 2


async def test_the_tools_of_an_environment_belong_to_the_grading(world: GateWorld) -> None:
    traffic = [(f"user-{number}", make_task(f"w{number:03}", with_tools=True)) for number in range(45)]
    await world.certify("a", 0.4, traffic)

    class OtherLooker(Looker):
        tools = ({"type": "function", "function": {"name": "peek"}},)

    world.grading = make_grading(environments={"looker": OtherLooker()})
    with pytest.raises(GateError, match=r"environments was \{'looker': "):
        await world.certify("b", 0.4, traffic)


async def test_a_look_stands_however_often_it_is_asked_for(world: GateWorld) -> None:
    promoted = await world.certify("good", 0.8, sealed_traffic(200))
    refused = await world.certify("bad", 0.1, sealed_traffic(200))
    world.engine.requests.clear()
    length = len(list(world.audit.read()))
    assert await world.certify("good", 0.8, sealed_traffic(200)) == promoted
    assert await world.certify("bad", 0.1, sealed_traffic(200)) == refused
    assert world.engine.requests == []
    assert len(list(world.audit.read())) == length


async def test_another_policy_or_champion_is_another_look(world: GateWorld) -> None:
    first = await world.certify("good", 0.45, sealed_traffic(200))
    world.policy = make_policy(name="other")
    second = await world.certify("good", 0.45, sealed_traffic(200))
    assert second.record.seq > first.record.seq
    world.champion = Arm.of(None, base_sha256=BASE)
    third = await world.certify("good", 0.45, sealed_traffic(200))
    assert third.record.body["champion_sha256"] == BASE
    assert verify_audit(world.audit.read()).decisions == 3


async def test_engine_errors_abstain_and_are_asked_again_next_time(world: GateWorld) -> None:
    for number in range(4):
        world.engine.faults["good", f"s{number:04}"] = "error"
    result = await world.certify("good", 0.8, sealed_traffic(60))
    assert isinstance(result.decision, Abstain)
    assert "4 of 60 answers of the challenger" in describe(result.decision)
    assert result.record.body["errors"]["challenger"] == {"engine": 4, "verifier": 0}
    assert gate_state(world.audit.read()).window is None
    assert (await world.certify("good", 0.8, sealed_traffic(60))).record == result.record
    world.engine.faults.clear()
    world.engine.requests.clear()
    result = await world.certify("good", 0.8, sealed_traffic(60))
    assert result.reply is Reply.PROMOTE
    assert len(world.engine.requests) == 4
    assert verify_audit(world.audit.read()).decisions == 2


async def test_verifier_errors_are_counted(world: GateWorld) -> None:
    traffic = sealed_traffic(59)
    traffic.append(("odd", make_task("odd", reference="raise")))
    result = await world.certify("good", 0.8, traffic)
    assert result.record.body["errors"] == {
        arm: {"engine": 0, "verifier": 1} for arm in ("challenger", "champion", "anchor")
    }
    assert result.reply is Reply.PROMOTE


async def test_a_verifier_too_slow_for_the_champion_alone_wins_nothing(world: GateWorld) -> None:
    """Load while one arm is graded is not that arm's failure: it is asked again, and too much of it abstains."""
    loaded = True

    class Loaded(ExactVerifier):
        def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
            nonlocal loaded
            if world.progress and world.progress[-1] == ("challenger", 60, 60) and loaded:
                raise TimeoutError("too much else to do")
            return super().judge(task, transcript)

    world.grading = make_grading(verifiers={"exact": Loaded()}, concurrency=1)
    world.progress.clear()
    result = await world.certify("good", 0.8, sealed_traffic(60))
    assert isinstance(result.decision, Abstain)
    assert "60 of 60 answers of the champion" in describe(result.decision)
    assert world.sealed.answers("epoch-1", adapter("champion").sha256) == {}
    loaded = False
    assert (await world.certify("good", 0.8, sealed_traffic(60))).reply is Reply.PROMOTE


async def test_two_certifications_at_once_take_two_looks(world: GateWorld) -> None:
    gate = world.gate()

    async def certify(name: str) -> Any:
        candidate, arm = world.challenger(name, 0.4)
        return await gate.certify_candidate(
            candidate,
            challenger=arm,
            champion=world.champion,
            anchor=world.anchor,
            tasks=sealed_traffic(60),
            asked_in_the_open=nobody_asked,
            decoding=Sampling(),
        )

    results = await asyncio.gather(certify("a"), certify("b"))
    assert sorted(result.record.body["epoch_look"] for result in results) == [1, 2]
    assert verify_audit(world.audit.read()).decisions == 2


class Meanwhile:
    """An audit log onto which ``write`` puts something at its next reads, just after the reader saw the rest."""

    def __init__(self, inner: Any, write: Callable[[Any], object], *, reads: Collection[int]) -> None:
        self.inner, self.write, self.reads, self.number = inner, write, reads, 0

    def append(self, kind: str, body: JsonObject, **options: Any) -> AuditRecord:
        return self.inner.append(kind, body, **options)

    def read(self, *, after_seq: int = 0) -> Iterator[AuditRecord]:
        found = list(self.inner.read(after_seq=after_seq))
        self.number += 1
        if self.number in self.reads:
            self.write(self.inner)
        return iter(found)


@pytest.mark.parametrize("read", [1, 2, 3])
async def test_a_look_during_which_another_process_decided_is_not_recorded(
    world: GateWorld, tmp_path: Path, read: int
) -> None:
    """At the first read no epoch was open, at the second one is about to be, at the third the decision is."""
    other = GateWorld(key=world.key)
    await other.certify("a", 0.4, sealed_traffic(45))
    decided = list(other.audit.read())
    inner = world.audit

    def decide_elsewhere(log: Any) -> None:
        for record in decided[len(list(log.read())) :]:
            log.append(record.kind, record.body, time=record.time)

    world.audit = Meanwhile(inner, decide_elsewhere, reads=[read])
    with pytest.raises(GateError, match="another process decided meanwhile, or opened an epoch; nothing is promoted"):
        await world.certify("good", 0.8, sealed_traffic(45))
    assert [record.body for record in inner.read()] == [record.body for record in decided]
    assert verify_audit(inner.read()).decisions == 1
    world.audit = inner
    result = await world.certify("good", 0.8, sealed_traffic(45))
    assert (result.reply, result.record.body["epoch_look"]) == (Reply.PROMOTE, 2)
    assert verify_audit(inner.read()).decisions == 2


async def test_records_that_decide_nothing_may_come_between(world: GateWorld) -> None:
    inner = world.audit

    def note(log: Any) -> None:
        batch = f"{len(list(log.read())):064}"  # what live traffic shows moves the state and is another matter
        log.append(QUARANTINE, {"manifest_hash": batch}, time=1.0)

    world.audit = Meanwhile(inner, note, reads=[1, 2, 3, 5, 6])
    assert (await world.certify("good", 0.8, sealed_traffic(45))).reply is Reply.PROMOTE
    kinds = [record.kind for record in inner.read()]
    assert kinds == [*[QUARANTINE] * 3, "epoch_opened", *[QUARANTINE] * 2, "decision"]
    assert verify_audit(inner.read()).promotions == 1


async def test_a_log_that_never_rests_ends_the_look(world: GateWorld) -> None:
    await world.certify("a", 0.4, sealed_traffic(45))
    inner = world.audit
    world.audit = Meanwhile(inner, lambda log: log.append("note", {}, time=1.0), reads=range(100))
    with pytest.raises(GateError, match="moved on in each of 3 attempts"):
        await world.certify("good", 0.8, sealed_traffic(45))
    assert len(decisions(world)) == 1


async def test_an_epoch_too_small_for_a_stricter_policy_is_left_behind(world: GateWorld) -> None:
    await world.certify("a", 0.4, sealed_traffic(45))
    world.policy = make_policy(sealed__min_pairs=50)
    result = await world.certify("b", 0.4, sealed_traffic(90))
    assert result.decision == Abstain(missing=("45 of 50 pairs",))
    result = await world.certify("b", 0.4, sealed_traffic(95))
    assert result.record.body["epoch"] == "epoch-2"
    assert result.record.body["measured"]["pairs"] == 50


async def test_a_half_opened_epoch_that_grew_too_small_is_left_behind(world: GateWorld) -> None:
    tasks = [task for _, task in sealed_traffic(45)]
    world.sealed.open_epoch("epoch-1", tasks, "c", 1.0)
    world.policy = make_policy(sealed__min_pairs=50)
    result = await world.certify("b", 0.4, sealed_traffic(95))
    assert result.decision == Abstain(missing=("45 of 50 pairs",))
    assert (await world.certify("b", 0.4, sealed_traffic(95))).record.body["epoch"] == "epoch-2"
    assert verify_audit(world.audit.read()).decisions == 2


async def test_tasks_exchanged_in_the_sealed_store_stop_the_gate(world: GateWorld) -> None:
    await world.certify("a", 0.4, sealed_traffic(60))
    easy = [make_task(f"e{number}") for number in range(60)]
    world.sealed = type(world.sealed)()
    world.sealed.open_epoch("epoch-1", easy, "c", 1.0)
    with pytest.raises(AuditError, match="the 60 tasks answered are not those of an open epoch"):
        await world.certify("b", 0.8, sealed_traffic(60))
    assert len(decisions(world)) == 1


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        (Arm.of(adapter("other"), base_sha256=BASE), "the challenger offered for it is"),
        (Arm(adapter=None, sha256=adapter("good").sha256), "the challenger offered for it is"),
    ],
)
async def test_only_the_candidates_own_adapter_is_judged(world: GateWorld, arm: Arm, words: str) -> None:
    candidate, _ = world.challenger("good", 0.8)
    with pytest.raises(GateError, match=words):
        await world.gate().screen_candidate(
            candidate,
            challenger=arm,
            champion=world.champion,
            anchor=world.anchor,
            dev=make_tasks(20),
            decoding=Sampling(),
        )


async def test_a_candidate_of_another_base_is_not_judged(world: GateWorld) -> None:
    candidate = replace(make_candidate(adapter("good")), base_sha256="f" * 64)
    with pytest.raises(GateError, match="was trained over base 'ffff"):
        await world.gate().certify_candidate(
            candidate,
            challenger=Arm.of(adapter("good"), base_sha256=BASE),
            champion=world.champion,
            anchor=world.anchor,
            tasks=sealed_traffic(60),
            asked_in_the_open=nobody_asked,
            decoding=Sampling(),
        )


async def test_a_name_that_the_engine_holds_with_other_content_stops_the_gate(world: GateWorld) -> None:
    world.engine.loaded["champion"] = AdapterRef(name="champion", path=Path("/x"), sha256="e" * 64)
    with pytest.raises(GateError, match="the engine holds 'eeee"):
        await world.certify("good", 0.8, sealed_traffic(60))
    assert "good" not in world.engine.loaded
    assert decisions(world) == []


async def test_an_adapter_that_cannot_be_loaded_stops_the_gate(world: GateWorld) -> None:
    del world.engine.skill["champion"]
    with pytest.raises(AdapterError, match="'champion' is damaged"):
        await world.certify("good", 0.8, sealed_traffic(60))
    assert world.engine.loaded == {}


async def test_what_was_loaded_before_stays_loaded(world: GateWorld) -> None:
    await world.engine.load(adapter("champion"))
    await world.certify("good", 0.8, sealed_traffic(60))
    assert set(world.engine.loaded) == {"champion"}
    assert world.engine.log == ["load champion", "load good", "unload good"]


async def test_a_task_that_cannot_be_graded_stops_the_gate_before_an_epoch_opens(world: GateWorld) -> None:
    traffic = [(user, replace(task, verifier="gone")) for user, task in sealed_traffic(60)]
    with pytest.raises(GateError, match="needs the verifier 'gone'"):
        await world.certify("good", 0.8, traffic)
    assert world.sealed.used_task_ids() == frozenset()


async def test_a_screen_passes_and_is_recorded(world: GateWorld) -> None:
    screened = await world.screen(
        "good", 0.8, make_tasks(30, "d"), canary_prompts=[make_task("hello", reference="anything")]
    )
    assert isinstance(screened.result, ScreenPassed)
    body = screened.record.body
    assert body["canary_prompts"] == [["hello", True]]
    assert body["not_measured"] == ["kl"]
    assert [r.sampling.temperature for r in world.engine.requests if "hello" in r.request_id] == [0.0]
    assert verify_audit(world.audit.read()).screens == 1


# The challenger gives its own tokens a log-probability of -0.1, so that k3 at a reference of -0.4 is
# exp(-0.3) - 1 + 0.3.
K3 = math.exp(-0.3) - 1 + 0.3


async def test_the_divergence_from_the_anchor_is_measured_on_the_challengers_own_answers(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=0.05)
    world.engine.logprob = {"good": -0.1, None: -0.4, "champion": -9.0}
    body = (await world.screen("good", 0.8, make_tasks(30, "d"))).record.body
    assert body["kl"] == {
        "nats_per_token": pytest.approx(K3, rel=1e-12),
        "tokens": 60,
        "calls": 30,
        "reference_sha256": world.anchor.sha256,
    }
    assert body["not_measured"] == ["canary prompts"]
    assert set(world.engine.scored) == {("good", (1, 2, 5, 6), 2), (None, (1, 2, 5, 6), 2)}
    assert any(words == "KL 0.0408 nats per token over 60 tokens" for words in body["reasons"])
    assert verify_audit(world.audit.read()).screens == 1


async def test_a_challenger_beyond_its_kl_budget_fails(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=0.04)
    world.engine.logprob = {None: -0.4}
    result = (await world.screen("good", 0.8, make_tasks(30, "d"))).result
    assert isinstance(result, ScreenFailed)
    assert result.reasons == ("KL to the reference is 0.0408 nats per token over 60 tokens > budget 0.04",)
    assert verify_audit(world.audit.read()).screens == 1


async def test_at_most_so_many_calls_are_measured(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=0.04)
    tasks = [make_task(f"d{n:03}", with_tools=True) for n in range(40)]
    body = (await world.screen("good", 0.8, tasks)).record.body
    assert (body["kl"]["calls"], body["kl"]["tokens"]) == (
        MAX_KL_CALLS,
        40 * 1 + 24 * 2,
    )  # each task's first call first
    assert len(world.engine.scored) == 2 * MAX_KL_CALLS


async def test_without_a_budget_no_divergence_is_measured(world: GateWorld) -> None:
    body = (await world.screen("good", 0.8, make_tasks(30, "d"))).record.body
    assert body["kl"] is None
    assert world.engine.scored == []


async def test_an_anchor_is_loaded_to_be_measured_against_and_forgotten_again(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=0.05)
    world.engine.skill["anchor"] = 0.4
    world.anchor = Arm.of(adapter("anchor"), base_sha256=BASE)
    await world.screen("good", 0.8, make_tasks(30, "d"))
    assert ("anchor", (1, 2, 5, 6), 2) in world.engine.scored
    assert world.engine.loaded == {}


async def test_a_divergence_stands_only_for_the_anchor_that_it_was_measured_against(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=0.05)
    first = await world.screen("good", 0.8, make_tasks(30, "d"))
    world.engine.scored.clear()
    assert await world.screen("good", 0.8, make_tasks(30, "d")) == first
    assert world.engine.scored == []
    world.engine.skill["anchor"] = 0.4
    world.anchor = Arm.of(adapter("anchor"), base_sha256=BASE)
    again = await world.screen("good", 0.8, make_tasks(30, "d"))
    assert again.record.body["kl"]["reference_sha256"] == world.anchor.sha256
    assert again.record.seq == first.record.seq + 1


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, math.inf])
async def test_a_divergence_that_is_not_finite_stops_the_gate(world: GateWorld, logprob: float) -> None:
    world.policy = make_policy(screen__kl_budget=0.05)
    world.engine.logprob = {None: logprob}
    with pytest.raises(GateError, match="the divergence of 'good' from 'the base model' over 60 tokens is"):
        await world.screen("good", 0.8, make_tasks(30, "d"))
    assert world.engine.loaded == {}
    assert list(world.audit.read()) == []


async def test_a_challenger_that_is_very_far_off_fails_instead_of_stopping_the_gate(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=1e6)
    world.engine.logprob = {"good": -1e4}
    screened = await world.screen("good", 0.8, make_tasks(30, "d"))
    assert isinstance(screened.result, ScreenFailed)
    assert screened.record.body["kl"]["nats_per_token"] == pytest.approx(math.exp(50.0), rel=1e-9)
    assert verify_audit(world.audit.read()).screens == 1


async def test_which_calls_are_measured_depends_on_the_candidate_and_takes_every_task_before_a_second_call(
    world: GateWorld,
) -> None:
    def call(task: str, number: int, **sampling: Any) -> Call:
        choice = Choice(index=0, token_ids=(5,), logprobs=(-0.1,), text=task)
        return Call(messages=(), sampling=Sampling(**sampling), prompt_token_ids=(number,), choice=choice)

    made = {f"t{n:03}": [call(f"t{n:03}", 0), call(f"t{n:03}", 1)] for n in range(100)}
    one, other = (measured_calls(made, salt=salt) for salt in ("a" * 64, "b" * 64))
    assert len(one) == len(other) == MAX_KL_CALLS
    assert {c.choice.text for c in one} != {c.choice.text for c in other}
    assert all(c.prompt_token_ids == (0,) for c in one)
    assert measured_calls(made, salt="a" * 64) == one
    few = {"t1": made["t001"], "t2": made["t002"]}
    assert [c.prompt_token_ids for c in measured_calls(few, salt="s")] == [(0,), (0,), (1,), (1,)]
    held = {
        "t1": [call("t1", 0, json_schema="{}"), call("t1", 0, tool_choice="f")],
        "t2": [replace(call("t2", 0), choice=replace(one[0].choice, token_ids=()))],
    }
    assert measured_calls(held, salt="s") == []


async def test_a_policy_with_a_kl_budget_abstains_where_nothing_was_said(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=0.05, sealed__max_error_share=1.0)
    world.engine.faults = {("good", task.id): "error" for task in make_tasks(30, "d")}
    result = (await world.screen("good", 0.8, make_tasks(30, "d"))).result
    assert isinstance(result, ScreenAbstained)
    assert "KL to the reference was not measured" in reasons_of(result)[-1]


async def test_a_falsified_divergence_does_not_verify(world: GateWorld) -> None:
    world.policy = make_policy(screen__kl_budget=0.04)
    world.engine.logprob = {None: -0.4}
    body = dict((await world.screen("good", 0.8, make_tasks(30, "d"))).record.body)
    body["kl"] = {**body["kl"], "nats_per_token": 0.01}
    with pytest.raises(AuditError, match="field 'decision'"):
        verify_audit([next_record(None, kind="screen", body=body, time=1.0)])


async def test_a_screen_stands_until_something_that_it_saw_changes(world: GateWorld) -> None:
    first = await world.screen("good", 0.8, make_tasks(30, "d"))
    world.engine.requests.clear()
    assert await world.screen("good", 0.8, make_tasks(30, "d")) == first
    assert world.engine.requests == []
    assert (await world.screen("good", 0.8, make_tasks(29, "d"))).record.seq == first.record.seq + 1
    assert (await world.screen("other", 0.8, make_tasks(30, "d"))).record.seq == first.record.seq + 2


async def test_a_screen_that_abstained_is_tried_again(world: GateWorld) -> None:
    world.engine.faults = {("good", "d0000"): "error", ("good", "d0001"): "error"}
    screened = await world.screen("good", 0.8, make_tasks(30, "d"))
    assert isinstance(screened.result, ScreenAbstained)
    world.engine.faults.clear()
    assert isinstance((await world.screen("good", 0.8, make_tasks(30, "d"))).result, ScreenPassed)


async def test_a_screen_without_tasks_abstains(world: GateWorld) -> None:
    screened = await world.screen("good", 0.8, [])
    assert isinstance(screened.result, ScreenAbstained)
    assert screened.record.body["logit_difference"] is None


async def test_the_champion_as_its_own_challenger_fails_the_screen_unasked(world: GateWorld) -> None:
    screened = await world.screen("champion", 0.4, make_tasks(30, "d"))
    assert isinstance(screened.result, ScreenFailed)
    assert "nothing changed" in describe(screened.result)
    assert world.engine.requests == []
    assert verify_audit(world.audit.read()).screens == 1


async def test_an_adapter_that_moves_no_logits_fails_the_screen(world: GateWorld) -> None:
    world.engine.differences["idle"] = 0.0
    screened = await world.screen("idle", 0.8, make_tasks(30, "d"))
    assert isinstance(screened.result, ScreenFailed)
    assert "training changed nothing" in describe(screened.result)


async def test_a_probe_that_returns_nonsense_stops_the_screen(world: GateWorld) -> None:
    world.engine.differences["broken"] = math.nan
    with pytest.raises(GateError, match="a logit difference of nan"):
        await world.screen("broken", 0.8, make_tasks(30, "d"))
    assert list(world.audit.read()) == []


async def test_a_screen_asks_no_sealed_store(world: GateWorld) -> None:
    await world.screen("good", 0.8, make_tasks(30, "d"))
    assert world.sealed.used_task_ids() == frozenset()
    assert world.sealed.answers("epoch-1", adapter("good").sha256) == {}


async def test_kept_answers_are_what_the_engine_said(world: GateWorld) -> None:
    await world.certify("good", 0.8, sealed_traffic(60))
    answers = world.sealed.answers("epoch-1", adapter("good").sha256)
    assert len(answers) == 60
    assert all(isinstance(answer, Answer) and answer.error is None for answer in answers.values())
    outcomes = decisions(world)[0].body["outcomes"]
    passed = {outcomes["tasks"][place] for place in outcomes["challenger"]["passed"]}
    assert passed == {task_id for task_id, answer in answers.items() if answer.passed}
