"""The step that asks the champion again: what it asks, what it keeps, what it leaves out and counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_world import UNTIL, RolloutWorld, as_text, asked, prompt_text, sum_task
from tidegate.core.chat import render_tool_call
from tidegate.core.errors import ConfigError, EngineError
from tidegate.core.types import Answer, GenerationRequest, Outcome, Split
from tidegate.curation import Rollouts, read_batch, read_rollouts
from tidegate.cycle.machine import CycleOutcome, Step, StepResult
from tidegate.cycle.rollouts import REMEDIES, fault_in
from tidegate.gate.evaluate import Evaluated
from tidegate.signals.environments import Calculator

CALCULATOR = Calculator.tools


def question(request: GenerationRequest) -> str:
    return str(request.messages[0]["content"])


def right(request: GenerationRequest) -> str:
    match = re.search(r"number (\d+)", question(request))
    assert match
    return f"It is {int(match[1]) + 1}."


def lucky(request: GenerationRequest) -> str:
    """Right for every second seed, in words that differ from seed to seed."""
    seed = request.sampling.seed or 0
    return f"Draw {seed}: {right(request)}" if seed % 2 else "no idea"


def hinted(request: GenerationRequest) -> bool:
    return "Hint: " in question(request)


@pytest.fixture
def world(tmp_path: Path) -> RolloutWorld:
    world = RolloutWorld(tmp_path)
    for number in range(4):
        world.record(asked(sum_task(number), user=f"u{number}"))
    world.engine.say = lucky
    return world


def rollouts_in(world: RolloutWorld, result: StepResult) -> Rollouts:
    return read_rollouts(world.root / "rollouts" / str(result.output["path"]))


async def test_without_samples_nothing_is_asked(world: RolloutWorld) -> None:
    world.rollouts = {}
    result = await world.run(Step.EXPLORE)
    assert (result.output, result.ends, result.reasons) == ({"rollouts": "none"}, None, ())
    assert (world.opened, (world.root / "rollouts").exists()) == (0, False)


async def test_a_cycle_that_was_opened_before_there_were_rollouts_goes_on(world: RolloutWorld) -> None:
    world.rollouts = {}
    config = {name: value for name, value in world.config.items() if name != "rollouts"}
    from tidegate.cycle.steps import cycle_steps

    result = await cycle_steps(world.stages())[Step.EXPLORE](config, {}, lambda detail: None)
    assert result.output == {"rollouts": "none"}


async def test_a_proposed_adapter_is_not_explored(world: RolloutWorld) -> None:
    result = await world.run(Step.EXPLORE, proposed="a" * 64)
    assert (result.output, world.opened) == ({"proposed": "a" * 64}, 0)


async def test_answers_are_recorded_token_exact_as_those_of_the_tasks_user(world: RolloutWorld) -> None:
    world.engine.answers_as = "fake-0/2"
    result = await world.run(Step.EXPLORE)
    rollouts = rollouts_in(world, result)
    assert len({episode.id for episode in rollouts.episodes}) == len(rollouts.episodes) == 12
    for item in rollouts.judged:
        (call,) = item.episode.interactions
        assert call.task is not None
        assert item.episode.user_key == call.user_key == f"u{call.task.id[-1]}"
        assert (call.split, call.main_line, call.consent, call.created_at) == (Split.TRAIN, True, True, UNTIL)
        assert (call.release_id, call.engine_replica) == ("smol-r0", "fake-0/2")
        assert as_text(call.prompt_token_ids) == prompt_text(call.task.messages)
        choice = call.choices[0]
        assert as_text(choice.token_ids) == choice.text + "</>"
        assert len(choice.logprobs) == len(choice.token_ids)
        passed = "It is" in choice.text
        assert (item.verdict.outcome, item.verdict.score) == (Outcome.PASS if passed else Outcome.FAIL, float(passed))
        assert (item.verdict.episode_id, item.verdict.verifier) == (item.episode.id, "numeric_answer")
    # A group is the answers to one prompt, and curation knows it by the prompt's tokens.
    prompts = Counter(call.prompt_token_ids for episode in rollouts.episodes for call in episode.interactions)
    assert sorted(prompts.values()) == [3, 3, 3, 3]


async def test_every_sample_has_seeds_of_its_own_and_nothing_filters(world: RolloutWorld) -> None:
    world.rollouts = {"samples": 3, "temperature": 0.9, "rationalize": False}
    await world.run(Step.EXPLORE)
    settings = [request.sampling for request in world.engine.requests]
    assert len({sampling.seed for sampling in settings}) == len(settings) == 12
    assert {(s.temperature, s.top_p, s.top_k, s.max_tokens, s.n) for s in settings} == {(0.9, 1.0, 0, 64, 1)}


async def test_the_same_seed_gives_the_same_rollouts(world: RolloutWorld, tmp_path: Path) -> None:
    first = await world.run(Step.EXPLORE)
    again = await world.run(Step.EXPLORE)
    assert first == again
    assert first.output["rollouts_hash"] == "278b6c2d9a75b1734e55e17ee65d778ab4a136bbc7c4a393488389eedbfc828d"
    world.seed += 1
    assert (await world.run(Step.EXPLORE)).output["rollouts_hash"] != first.output["rollouts_hash"]
    assert [path.name for path in (tmp_path / "rollouts").glob(".*")] == []


async def test_tasks_that_were_solved_rarely_come_first(world: RolloutWorld) -> None:
    world.record(asked(sum_task(7), user="always"), passed=True)
    world.record(asked(sum_task(8), user="never", name="a"))
    world.record(asked(sum_task(8), user="never", name="b"))
    world.rollouts = {"samples": 1, "max_tasks": 5}
    result = await world.run(Step.EXPLORE)
    tasks = [episode.task.id for episode in rollouts_in(world, result).episodes if episode.task]
    assert tasks[0] == "task-8"
    assert sorted(tasks[1:]) == ["task-0", "task-1", "task-2", "task-3"]
    assert result.output["counts"]["tasks"] == {"asked": 5, "task_cap": 1}


async def test_what_may_not_be_asked_is_left_out_and_counted(world: RolloutWorld) -> None:
    world.engine.say = right
    world.record(asked(None, user="chat"), passed=None)
    world.record(asked(sum_task(10), user="private", consent=False))
    world.record(asked(sum_task(11), user="dev-too"))
    world.record(asked(sum_task(11), user="dev", split=Split.DEV))
    world.record(asked(sum_task(12), user="dev-only", split=Split.DEV))
    world.record(asked(sum_task(13, verifier="gut"), user="gut"))
    world.record(asked(sum_task(14, environment="moon"), user="moon"))
    world.record(asked(sum_task(15, reference="many"), user="bad"))
    world.record(asked(sum_task(16), user="later", created_at=UNTIL + 1.0))
    result = await world.run(Step.EXPLORE)
    assert result.output["counts"]["tasks"] == {
        "asked": 4, "asked_by_dev": 1, "bad_reference": 1, "no_consent": 1, "no_task": 1,
        "unknown_environment": 1, "unknown_verifier": 1,
    }  # fmt: skip
    told = {question(request) for request in world.engine.requests}
    assert told == {f"number {number} plus one" for number in range(4)}


async def test_of_the_right_answers_so_many_are_kept_and_copies_go_first(world: RolloutWorld) -> None:
    def say(request: GenerationRequest) -> str:
        task = int(question(request).split()[1])
        return right(request) if task == 0 else f"Draw {request.sampling.seed}: {right(request)}"

    world.engine.say = say
    world.rollouts = {"samples": 5, "keep_per_task": 2}
    result = await world.run(Step.EXPLORE)
    assert result.output["counts"]["answers"] == {"answered": 20, "asked": 20, "pass": 8, "passed": 20, "surplus": 12}
    rollouts = rollouts_in(world, result)
    kept = Counter(episode.task.id for episode in rollouts.episodes if episode.task)
    assert kept == {f"task-{number}": 2 for number in range(4)}
    items = Counter(item["reason"] for item in rollouts.manifest["items"])
    assert items == {"pass": 8, "surplus": 12}


@pytest.mark.parametrize(("objective", "kept"), [("sft", 2), ("grpo", 5), ("dpo", 5)])
async def test_objectives_that_compare_answers_get_every_right_one(
    world: RolloutWorld, objective: str, kept: int
) -> None:
    """Leaving out right answers alone would lower the mean that every answer of a group is held against."""
    world.engine.say = lambda request: f"Draw {request.sampling.seed}: {right(request)}"
    world.rollouts = {"samples": 5, "keep_per_task": 2}
    config = {"training": {**world.config["training"], "objective": objective}}
    result = await world.run(Step.EXPLORE, **config)
    assert result.output["counts"]["answers"]["pass"] == 4 * kept
    assert result.output["counts"]["answers"].get("surplus", 0) == 4 * (5 - kept)


async def test_an_answer_that_a_fault_cut_short_is_left_out_and_counted(world: RolloutWorld) -> None:
    broken: set[int | None] = set()

    def say(request: GenerationRequest) -> str:
        if question(request).startswith("number 2") and not broken - {request.sampling.seed}:
            broken.add(request.sampling.seed)
            raise EngineError("the engine broke")
        return right(request)

    world.engine.say = say
    result = await world.run(Step.EXPLORE)
    counts = {"answered": 11, "asked": 12, "engine_error": 1, "pass": 11, "passed": 11}
    assert result.output["counts"]["answers"] == counts
    assert result.ends is None
    assert all(item.verdict.outcome is Outcome.PASS for item in rollouts_in(world, result).judged)


async def test_an_engine_that_gives_no_log_probabilities_is_told_as_what_it_is(world: RolloutWorld) -> None:
    def say(request: GenerationRequest) -> str:
        if question(request).startswith("number 2"):
            raise EngineError("the engine broke")
        return right(request)

    world.engine.say = say
    world.engine.without_logprobs = True
    result = await world.run(Step.EXPLORE)
    (reason,) = result.reasons
    assert "cut short" not in reason
    assert "(no_token_ids 9, engine_error 3)" in reason
    assert reason.endswith(
        "most often the engine gave no token ids or log-probabilities to train on: take one that gives both, or set "
        "rollouts.samples = 0"
    )


def test_every_fault_has_a_remedy() -> None:
    answer = Answer(
        task_id="t", adapter_sha256="a", seed=0, passed=False, score=0.0, no_reply=True, invalid_tool_call=False,
        refused=False, tokens=0, seconds=0.0, text="", tools=(), surprisal=None,
    )  # fmt: skip
    errors = (
        "engine: gone",
        "environment: broke",
        "timeout: no answer within 1 s",
        "no verdict: numeric took too long",
    )
    found = [fault_in(Evaluated(answer=replace(answer, error=error), calls=(), judgement=None)) for error in errors]
    assert found == ["engine_error", "environment_error", "timeout", "no_verdict"]
    assert set(REMEDIES) == {*found, "no_token_ids"}


async def test_too_many_faults_end_the_cycle_without_a_conclusion(world: RolloutWorld) -> None:
    def say(request: GenerationRequest) -> str:
        if question(request).startswith("number 2"):
            raise EngineError("the engine broke")
        return right(request)

    world.engine.say = say
    result = await world.run(Step.EXPLORE)
    assert result.ends is CycleOutcome.ABSTAINED
    (reason,) = result.reasons
    assert reason == (
        "3 of 12 answers of the champion say nothing of it or can't be trained on, more than rollouts.max_error_share "
        "= 0.2 accepts (engine_error 3); most often the engine failed: mend what its log names, and run the cycle again"
    )
    assert result.output["counts"]["answers"] == {"answered": 9, "asked": 12, "engine_error": 3, "pass": 9, "passed": 9}
    assert not (world.root / "rollouts").exists()
    world.rollouts = {"samples": 3, "max_error_share": 0.25}
    assert (await world.run(Step.EXPLORE)).ends is None


async def test_an_engine_without_log_probabilities_gives_nothing_to_train_on(world: RolloutWorld) -> None:
    world.engine.without_logprobs = True
    result = await world.run(Step.EXPLORE)
    assert result.ends is CycleOutcome.ABSTAINED
    assert result.output["counts"]["answers"] == {"answered": 0, "asked": 12, "no_token_ids": 12, "passed": 0}


async def test_empty_answers_and_broken_calls_are_failures_as_in_traffic(world: RolloutWorld) -> None:
    def say(request: GenerationRequest) -> str:
        broken = {"0": "", "1": "It is 2. <tool_call>{</tool_call>"}
        return broken.get(question(request).split()[1], right(request))

    world.engine.say = say
    world.rollouts = {"samples": 1, "rationalize": False}
    result = await world.run(Step.EXPLORE)
    details = {
        item.episode.task.id: item.verdict.detail for item in rollouts_in(world, result).judged if item.episode.task
    }
    assert details == {"task-0": "no_reply", "task-1": "invalid_tool_call", "task-2": "right", "task-3": "right"}


async def test_what_nobody_solved_is_rationalized_and_trains_without_its_hint(world: RolloutWorld) -> None:
    def say(request: GenerationRequest) -> str:
        return right(request) if hinted(request) or question(request).startswith("number 3") else "no idea"

    world.engine.say = say
    world.record(asked(sum_task(1), user="clever"), passed=True)
    result = await world.run(Step.EXPLORE)
    assert result.output["counts"]["hints"] == {"rationalized": 2}
    assert result.reasons == ("4 tasks asked 3 times: 12 of 12 answered, 3 passed; 2 of 2 unsolved tasks rationalized",)
    rollouts = rollouts_in(world, result)
    assert {item.user_key for item in rollouts.rationalized} == {"u0", "u2"}
    for item in rollouts.rationalized:
        example = item.example
        number = int(item.user_key[1:])
        prompt = prompt_text(sum_task(number).messages)
        assert as_text(example.token_ids) == f"{prompt}It is {number + 1}.</>"
        assert example.loss_mask == (0,) * len(prompt) + (1,) * (len(example.token_ids) - len(prompt))
        assert (example.source, example.reward, example.logprobs, example.group) == ("rationalized", 1.0, (), None)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("As the hint says, it is {right}.", "hint_leaked"),
        ("Hint: the right\nanswer: {right}", "hint_leaked"),
        ("It is {wrong}.", "wrong"),
        ("", "wrong"),
    ],
)
async def test_a_hinted_answer_that_may_not_train_is_counted(world: RolloutWorld, answer: str, reason: str) -> None:
    def say(request: GenerationRequest) -> str:
        number = int(question(request).split()[1])
        return answer.format(right=number + 1, wrong=number) if hinted(request) else "no idea"

    world.engine.say = say
    result = await world.run(Step.EXPLORE)
    assert result.output["counts"]["hints"] == {reason: 4}
    assert rollouts_in(world, result).rationalized == ()


async def test_hints_that_cannot_be_given_and_faults_behind_them_are_counted(world: RolloutWorld) -> None:
    def say(request: GenerationRequest) -> str:
        if hinted(request):
            raise EngineError("the engine broke")
        return "no idea"

    world.engine.say = say
    long = sum_task(5, id="long", verifier="exact_text", reference="x" * 501)
    silent = sum_task(6, id="silent", messages=({"role": "system", "content": "Say 7."},))
    world.record(asked(long, user="long"))
    world.record(asked(silent, user="silent"))
    result = await world.run(Step.EXPLORE)
    assert result.output["counts"]["hints"] == {"engine_error": 4, "no_hint": 2}
    assert result.ends is None


async def test_several_calls_become_one_episode_and_one_rationalized_sequence(world: RolloutWorld) -> None:
    task = sum_task(9, tools=CALCULATOR, environment="calculator", reference=34)
    world.store = type(world.store)()
    world.record(asked(task, user="agent"))
    call = {"function": {"name": "calculator", "arguments": json.dumps({"expression": "20 + 14"})}}

    def say(request: GenerationRequest) -> str:
        if not hinted(request):
            return "no idea"
        return "It is 34" if request.messages[-1]["role"] == "tool" else render_tool_call(call)

    world.engine.say = say
    result = await world.run(Step.EXPLORE)
    (item,) = rollouts_in(world, result).rationalized
    text = as_text(item.example.token_ids)
    prompt = prompt_text(task.messages, task.tools)
    assert text == f"{prompt}{render_tool_call(call)}</><tool>34</><assistant>It is 34</>"
    trained = "".join(c for c, mask in zip(text, item.example.loss_mask, strict=True) if mask)
    assert trained == f"{render_tool_call(call)}</>It is 34</>"

    world.engine.say = lambda request: "It is 34" if request.messages[-1]["role"] == "tool" else render_tool_call(call)
    world.engine.requests.clear()
    judged = rollouts_in(world, await world.run(Step.EXPLORE)).judged
    assert [len(item.episode.interactions) for item in judged] == [2, 2, 2]
    first, second = judged[0].episode.interactions
    assert as_text(second.prompt_token_ids).startswith(as_text(first.prompt_token_ids + first.choices[0].token_ids))


async def test_calls_that_do_not_continue_each_other_are_not_rationalized(world: RolloutWorld) -> None:
    task = sum_task(9, tools=CALCULATOR, environment="calculator", reference=34)
    world.store = type(world.store)()
    world.record(asked(task, user="agent"))

    def say(request: GenerationRequest) -> str:
        if not hinted(request):
            return "no idea"
        if request.messages[-1]["role"] == "tool":
            return "It is 34"
        return '<tool_call>{"arguments": {"expression": "20+14"}, "name": "calculator"}</tool_call>'  # spelt otherwise

    world.engine.say = say
    result = await world.run(Step.EXPLORE)
    assert result.output["counts"]["hints"] == {"not_one_sequence": 1}


async def test_curation_takes_rollouts_and_rationalized_answers_in(world: RolloutWorld) -> None:
    def say(request: GenerationRequest) -> str:
        number = question(request).split()[1]
        return f"Draw {request.sampling.seed}: {right(request)}" if hinted(request) or number == "3" else "no idea"

    world.engine.say = say
    explored = await world.run(Step.EXPLORE)
    curated = await world.run(Step.CURATE, {Step.EXPLORE: explored.output})
    batch = read_batch(world.root / "batches" / str(curated.output["path"]))
    sources = Counter(example.source for example in batch.examples)
    assert sources == {"episode": 3, "rationalized": 3}
    assert (batch.fresh, curated.ends) == (3, None)
    reasons = Counter(item["reason"] for item in batch.manifest["items"])
    assert reasons == {"kept": 6, "below_threshold": 9 + 4}  # rollouts, and the traffic
    assert not [example for example in batch.examples if "Hint" in as_text(example.token_ids)]


async def test_a_users_cap_holds_for_rollouts_and_rationalized_answers_together(world: RolloutWorld) -> None:
    world.store = type(world.store)()
    for number in range(4):
        world.record(asked(sum_task(number), user="u"))

    def say(request: GenerationRequest) -> str:
        number = int(question(request).split()[1])
        return f"Draw {request.sampling.seed}: {right(request)}" if hinted(request) or number < 2 else "no idea"

    world.engine.say = say
    world.curation = {"min_fresh": 1, "max_per_user": 5}
    explored = await world.run(Step.EXPLORE)
    curated = await world.run(Step.CURATE, {Step.EXPLORE: explored.output})
    assert curated.output["examples"] == 5
    assert curated.output["counts"]["user_cap"] == 6 + 2 - 5


async def test_rollouts_that_were_changed_or_removed_are_not_curated(world: RolloutWorld) -> None:
    explored = await world.run(Step.EXPLORE)
    path = world.root / "rollouts" / str(explored.output["path"]) / "episodes.jsonl"
    path.write_bytes(path.read_bytes().replace(b"It is 1", b"It is 7"))
    with pytest.raises(ConfigError, match="were changed"):
        await world.run(Step.CURATE, {Step.EXPLORE: explored.output})
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        await world.run(Step.CURATE, {Step.EXPLORE: explored.output})


async def test_without_any_task_nothing_is_asked_and_the_counts_say_so(world: RolloutWorld) -> None:
    world.store = type(world.store)()
    world.record(asked(None), passed=None)
    result = await world.run(Step.EXPLORE)
    assert world.engine.requests == []
    assert result.output["counts"] == {
        "tasks": {"asked": 0, "no_task": 1}, "answers": {"answered": 0, "asked": 0, "passed": 0}, "hints": {},
    }  # fmt: skip
    assert rollouts_in(world, result).judged == ()


async def test_progress_is_told_as_the_gate_tells_it(world: RolloutWorld) -> None:
    from tidegate.cycle.steps import cycle_steps

    told: list[Any] = []
    world.rollouts = {"samples": 2}
    await cycle_steps(world.stages())[Step.EXPLORE](world.config, {}, told.append)
    assert told[0] == {"arm": "champion", "done": 1, "of": 8}
    assert told[7] == {"arm": "champion", "done": 8, "of": 8}
