"""Asking an adapter: same seeds for every arm, failures attributed, nothing left running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from gate_engine import (
    ExactVerifier,
    Looker,
    ScriptedEngine,
    adapter,
    make_grading,
    make_task,
    make_tasks,
    share,
)
from tidegate.core.chat import ANY_TOOL
from tidegate.core.errors import GateError, StoreError
from tidegate.core.gate.evidence import outcomes_of
from tidegate.core.types import Answer, GenerationRequest, Outcome, Sampling, Task
from tidegate.gate.arms import Arm
from tidegate.gate.asking import (
    ask,
    ask_episodes,
    decoding_from_json,
    decoding_to_json,
    sealed_sample,
    seeded,
    unique,
)
from tidegate.gate.evaluate import Grading, call_seed, evaluate, evaluate_episodes
from tidegate.ports.signals import Judgement
from tidegate.signals.verifiers import gym

SAMPLING = seeded(Sampling(temperature=0.7), "seed")


@pytest.fixture
async def engine() -> ScriptedEngine:
    engine = ScriptedEngine(skill={"a": 0.5, None: 0.0})
    await engine.load(adapter("a"))
    return engine


async def run(engine: ScriptedEngine, tasks: list[Task], grading: Grading | None = None) -> list[Answer]:
    return await evaluate(engine, "a", adapter("a").sha256, tasks, sampling=SAMPLING, grading=grading or make_grading())


async def test_answers_come_in_the_order_of_the_tasks(engine: ScriptedEngine) -> None:
    tasks = make_tasks(30)
    answers = await run(engine, tasks)
    assert [answer.task_id for answer in answers] == [task.id for task in tasks]
    assert [answer.passed for answer in answers] == [share("difficulty", task.id) < 0.5 for task in tasks]
    first = answers[0]
    assert (first.adapter_sha256, first.tokens, first.error) == (adapter("a").sha256, 2, None)
    assert first.seed == call_seed("seed", "t0000", 0)
    assert first.score == float(first.passed)
    assert first.seconds > 0


async def test_the_calls_and_the_judgement_behind_an_answer_are_at_hand(engine: ScriptedEngine) -> None:
    engine.skill["a"] = 1.0
    task = make_task("one", with_tools=True)
    (episode,) = await evaluate_episodes(
        engine, "a", adapter("a").sha256, [task], sampling=SAMPLING, grading=make_grading()
    )
    first, second = episode.calls
    assert (first.messages, first.prompt_token_ids, first.choice.token_ids) == (task.messages, (1, 2), (4,))
    assert second.messages[: len(task.messages)] == task.messages
    assert [message["role"] for message in second.messages[1:]] == ["assistant", "tool"]
    assert [call.sampling.seed for call in episode.calls] == [call_seed("seed", "one", number) for number in (0, 1)]
    assert (second.choice.token_ids, second.choice.logprobs) == ((5, 6), (-0.1, -0.2))
    assert episode.judgement == Judgement(outcome=Outcome.PASS, score=1.0, detail="")
    assert (episode.answer.passed, episode.answer.tokens) == (True, 3)


async def test_an_episode_that_was_cut_short_has_no_judgement(engine: ScriptedEngine) -> None:
    engine.faults["a", "one"] = "error"
    tasks = [make_task("one"), make_task("two", reference="raise")]
    arm = Arm.of(adapter("a"), base_sha256="b" * 64)
    grading, kept = make_grading(), list[Answer]()

    async def keep(answer: Answer) -> None:
        kept.append(answer)

    episodes = await ask_episodes(engine, arm, tasks, sampling=SAMPLING, grading=grading, keep=keep, sample=4)
    assert {name: episode.judgement for name, episode in episodes.items()} == {"one": None, "two": None}
    assert [len(episodes[name].calls) for name in ("one", "two")] == [0, 1]
    assert [answer.task_id for answer in kept] == ["two"]
    assert {episode.answer.sample for episode in episodes.values()} == {4}


async def test_every_arm_gets_the_same_prompts_seeds_and_decoding(engine: ScriptedEngine) -> None:
    tasks = [make_task("one", with_tools=True), make_task("two")]
    await run(engine, tasks)
    ours = {(r.request_id.split("-", 2)[2]): r for r in engine.requests}
    engine.requests.clear()
    await evaluate(engine, None, "b" * 64, tasks, sampling=SAMPLING, grading=make_grading())
    theirs = {(r.request_id.split("-", 2)[2]): r for r in engine.requests}
    assert set(ours) == {"one-0", "one-1", "two-0"} == set(theirs)
    for name, request in ours.items():
        other = theirs[name]
        assert (request.messages, request.tools, request.sampling) == (other.messages, other.tools, other.sampling)
        assert request.sampling.temperature == 0.7
    assert len({r.sampling.seed for r in ours.values()}) == 3


async def test_an_answer_is_held_to_its_tasks_schema_and_to_no_other(engine: ScriptedEngine) -> None:
    tasks = [replace(make_task("one"), json_schema='{"type":"object"}'), make_task("two")]
    sampling = seeded(Sampling(json_schema='{"enum":[1]}'), "seed")
    await evaluate(engine, None, "b" * 64, tasks, sampling=sampling, grading=make_grading())
    assert {r.request_id.split("-", 2)[2]: r.sampling.json_schema for r in engine.requests} == {
        "one-0": '{"type":"object"}',
        "two-0": None,
    }


async def test_only_the_first_answer_must_call_what_its_task_asks_for(engine: ScriptedEngine) -> None:
    tasks = [replace(make_task("one", with_tools=True), tool_choice="look"), make_task("two", with_tools=True)]
    sampling = seeded(Sampling(tool_choice=ANY_TOOL, parallel_tool_calls=False), "seed")
    await evaluate(engine, None, "b" * 64, tasks, sampling=sampling, grading=make_grading())
    assert {r.request_id.split("-", 2)[2]: r.sampling.tool_choice for r in engine.requests} == {
        "one-0": "look",
        "one-1": None,
        "two-0": None,
        "two-1": None,
    }
    assert not any(r.sampling.parallel_tool_calls for r in engine.requests)


def test_a_record_of_the_settings_holds_what_is_unusual() -> None:
    for parallel in (True, False):
        decoding = Sampling(temperature=0.5, stop=("x",), parallel_tool_calls=parallel)
        kept = decoding_to_json(replace(decoding, tool_choice="f", seed=3))
        assert ("parallel_tool_calls" in kept) is not parallel  # earlier records do not have it
        assert decoding_from_json(kept) == decoding


async def test_tools_are_executed_and_the_answer_after_them_is_judged(engine: ScriptedEngine) -> None:
    engine.skill["a"] = 1.0
    (answer,) = await run(engine, [make_task("one", with_tools=True)])
    assert answer.passed
    assert answer.tokens == 3
    assert engine.requests[1].messages[-1]["content"] == "look {}"


async def test_no_more_than_the_allowed_episodes_are_in_flight(engine: ScriptedEngine) -> None:
    running = 0
    most = 0

    class Counting(ExactVerifier):
        def judge(self, task: Task, transcript: object) -> object:  # type: ignore[override]
            nonlocal running
            running -= 1
            return super().judge(task, transcript)  # type: ignore[arg-type]

    def count(request: GenerationRequest) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)

    engine.before = count
    await run(engine, make_tasks(30), make_grading(concurrency=4, verifiers={"exact": Counting()}))
    assert 1 < most <= 4


async def test_engine_errors_timeouts_and_cut_streams_are_failed_answers(engine: ScriptedEngine) -> None:
    engine.skill["a"] = 1.0
    engine.faults = {("a", "t0000"): "error", ("a", "t0001"): "hang", ("a", "t0002"): "cut"}
    answers = await run(engine, make_tasks(4), make_grading(timeout_s=0.3))
    assert [answer.error for answer in answers] == [
        "engine: the engine broke",
        "timeout: no answer within 0.3 s",
        f"engine: the engine ended request 'gate-{adapter('a').sha256[:8]}-t0002-0' without finishing its answer",
        None,
    ]
    assert [answer.passed for answer in answers] == [False, False, False, True]
    assert [answer.cut_short for answer in answers] == [True, True, True, False]
    assert not any(answer.no_reply for answer in answers)
    assert engine.cancelled == 1


async def test_an_environment_that_raises_is_no_fault_of_the_model(engine: ScriptedEngine) -> None:
    looker = Looker()
    looker.broken = True
    (answer,) = await run(engine, [make_task("one", with_tools=True)], make_grading(environments={"looker": looker}))
    assert answer.error is not None
    assert answer.error.startswith("environment: looker raised OSError")
    assert answer.cut_short


async def test_a_verifier_that_raises_fails_the_answer_and_one_without_a_verdict_cuts_it_short(
    engine: ScriptedEngine,
) -> None:
    verifier = ExactVerifier()
    released = threading.Event()
    verifier.hanging.append(released)
    tasks = [make_task(name, reference=name) for name in ("raise", "marked", "hang", "missing", "right")]
    try:
        answers = await run(engine, tasks, make_grading(timeout_s=0.3, verifiers={"exact": verifier}))
    finally:
        released.set()
    assert [answer.error for answer in answers] == [
        "verifier: exact raised ZeroDivisionError('odd input')",
        "verifier: exact says 'verifier_error: odd input'",
        "no verdict: exact gave none within 0.3 s",
        'no verdict: exact raised ConfigError("the scorer\'s package is not installed")',
        None,
    ]
    assert [answer.tokens for answer in answers] == [2] * 5
    assert not any(answer.passed for answer in answers[:4])
    assert [answer.cut_short for answer in answers] == [False, False, True, True, False]
    outcomes = outcomes_of(answers, graded=[False] * 5)
    assert outcomes.engine_error.tolist() == [False, False, True, True, False]
    assert outcomes.verifier_error.tolist() == [True, True, False, False, False]
    assert outcomes.tokens.tolist() == [2, 2, 0, 0, 2]


async def test_a_verifiers_own_timeout_is_no_verdict(engine: ScriptedEngine) -> None:
    class Slow(ExactVerifier):
        def judge(self, task: Task, transcript: object) -> Judgement:
            raise TimeoutError("the sandbox did not start")

    (answer,) = await run(engine, [make_task("one")], make_grading(verifiers={"exact": Slow()}))
    assert answer.error == "no verdict: exact raised TimeoutError('the sandbox did not start')"
    assert answer.cut_short


async def test_a_scorer_that_raises_within_reasoning_gym_is_counted(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
        raise KeyError(dataset)

    monkeypatch.setattr(gym, "_scorer", scorer)
    task = replace(make_task("one"), verifier="reasoning_gym", reference={"dataset": "d", "entry": {"answer": "1"}})
    (answer,) = await run(engine, [task], make_grading(verifiers={"reasoning_gym": gym.ReasoningGym()}))
    assert outcomes_of([answer], graded=[False]).verifier_error.tolist() == [True]
    assert not answer.cut_short


async def test_verifiers_that_hang_hold_up_nobody_else(engine: ScriptedEngine) -> None:
    """More of them than slots, and a default executor of one thread: the others are judged all the same."""
    engine.skill["a"] = 1.0
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    verifier = ExactVerifier()
    released = threading.Event()
    verifier.hanging.extend([released] * 3)
    tasks = [*(make_task(f"h{number}", reference="hang") for number in range(3)), make_task("fine")]
    try:
        grading = make_grading(timeout_s=0.3, concurrency=1, verifiers={"exact": verifier})
        answers = await run(engine, tasks, grading)
        assert await asyncio.to_thread(lambda: "free") == "free"
    finally:
        released.set()
    assert [answer.passed for answer in answers] == [False, False, False, True]


async def test_silence_fails_even_where_the_verifier_would_pass_it(engine: ScriptedEngine) -> None:
    engine.faults = {("a", "quiet"): "silence", ("a", "garbled"): "bad_call"}
    tasks = [make_task("quiet", reference="anything"), make_task("garbled", reference="anything")]
    quiet, garbled = await run(engine, tasks)
    assert (quiet.passed, quiet.score, quiet.no_reply, quiet.invalid_tool_call) == (False, 0.0, True, False)
    assert (garbled.passed, garbled.no_reply, garbled.invalid_tool_call) == (True, False, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verifier": "other"}, "needs the verifier 'other'; registered: \\['exact'\\]"),
        ({"environment": "moon"}, "needs the environment 'moon'; registered: \\['looker'\\]"),
    ],
)
async def test_nothing_starts_when_a_task_cannot_be_graded(
    engine: ScriptedEngine, change: dict[str, str], words: str
) -> None:
    with pytest.raises(GateError, match=words):
        await run(engine, [make_task("one"), replace(make_task("two"), **change)])
    assert engine.requests == []


async def test_a_failure_to_keep_an_answer_ends_the_evaluation_as_itself(engine: ScriptedEngine) -> None:
    async def on_answer(answer: Answer) -> None:
        raise StoreError(f"disk full at {answer.task_id}")

    with pytest.raises(StoreError, match="disk full"):
        await evaluate(engine, "a", "x", make_tasks(5), sampling=SAMPLING, grading=make_grading(), on_answer=on_answer)


async def test_what_an_engine_cut_short_is_asked_once_more(engine: ScriptedEngine) -> None:
    engine.skill["a"] = 1.0
    engine.faults = {("a", "t0000"): "once", ("a", "t0001"): "error"}
    kept: list[str] = []

    async def keep(answer: Answer) -> None:
        kept.append(answer.task_id)

    answers = await ask(
        engine,
        Arm.of(adapter("a"), base_sha256="b" * 64),
        make_tasks(3),
        sampling=SAMPLING,
        grading=make_grading(),
        keep=keep,
    )
    assert {task_id: answer.passed for task_id, answer in answers.items()} == {
        "t0000": True,
        "t0001": False,
        "t0002": True,
    }
    assert sorted(kept) == ["t0000", "t0002"]
    assert len(engine.requests) == 5


def test_seeds_are_fixed_small_and_distinct() -> None:
    seeds = {call_seed("e", f"t{i}", call) for i in range(500) for call in range(3)}
    assert len(seeds) == 1500
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert call_seed("e", "t", 0) == call_seed("e", "t", 0) != call_seed("f", "t", 0)


def test_the_sample_takes_one_task_a_user_and_none_twice() -> None:
    offered = [(f"u{i % 7}", make_task(f"t{i:02}")) for i in range(40)]
    offered += [("u9", make_task("t01")), ("u10", make_task("used"))]
    sample = sealed_sample(offered, used={"used", "t00"}, salt="s", limit=100)
    by_task = {task.id: user for user, task in offered if user != "u9"}
    users = [by_task[task.id] for task in sample]
    assert sorted(set(users)) == sorted(users)
    assert len(sample) in (7, 8)  # u9 offers only a task that u1 may have been taken for
    assert not {"used", "t00"} & {task.id for task in sample}
    assert [task.id for task in sample] == sorted(task.id for task in sample)
    assert sealed_sample(list(reversed(offered)), used={"used", "t00"}, salt="s", limit=100) == sample


def test_the_sample_depends_on_the_salt_and_keeps_the_limit() -> None:
    offered = [(f"u{i}", make_task(f"t{i:02}")) for i in range(40)]
    samples = {tuple(t.id for t in sealed_sample(offered, used=(), salt=s, limit=10)) for s in "abcdef"}
    assert len(samples) > 1
    assert all(len(sample) == 10 for sample in samples)


def test_decoding_survives_a_record() -> None:
    sampling = Sampling(temperature=0.3, top_p=0.9, top_k=5, stop=("a", "b"), max_tokens=7, frequency_penalty=0.5)
    assert decoding_from_json(decoding_to_json(sampling)) == sampling
    assert "seed" not in decoding_to_json(sampling)


def test_duplicates_are_asked_once() -> None:
    assert [task.id for task in unique([make_task("b"), make_task("a"), make_task("b")])] == ["a", "b"]
