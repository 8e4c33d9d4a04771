"""Continuous batching: who shares a batch changes nothing, and rows come and go at token boundaries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_fixtures import LONGEST, answer, byte_tokenizer, call, endless, lane_of, running, write_tiny_model
from tidegate.core.chat import encode_prompt
from tidegate.core.errors import EngineBusyError, EngineError, RequestError
from tidegate.core.types import ChoiceEnd, FinishReason, GenerationRequest, PromptTokens, TokenDelta
from tidegate.engines.embedded.engine import EmbeddedEngine
from tidegate.engines.embedded.waiting import WaitingRows

SHARED = "You are a calculator. Use the tool for every question and answer in one short line. "


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(model_dir: Path) -> AsyncGenerator[EmbeddedEngine]:
    async with running(model_dir) as started:
        yield started


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the decode thread sets no event of this loop
            await asyncio.sleep(0.002)


def reference(model_dir: Path, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and logprobs by whole forward passes, one a token."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        while len(logprobs) < count and ids[-1] != 2:
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(prompt) :], logprobs


async def test_greedy_answers_equal_whole_forward_passes(engine: EmbeddedEngine, model_dir: Path) -> None:
    prompt, (choice,) = await answer(engine, call("hello", max_tokens=20))
    assert prompt == encode_prompt(byte_tokenizer(), ({"role": "user", "content": "hello"},), ())
    tokens, logprobs = reference(model_dir, prompt, 20)
    assert list(choice.token_ids) == tokens
    assert choice.logprobs == pytest.approx(logprobs, abs=1e-4)


async def test_a_crowd_of_different_lengths_gets_the_answers_that_each_gets_alone(engine: EmbeddedEngine) -> None:
    requests = [
        call("x" * (7 * index % 90) + str(index), max_tokens=5 + 3 * (index % 5), request_id=str(index))
        for index in range(40)  # more than max_batch: some join when others leave
    ]
    alone = [(await answer(engine, request))[1][0] for request in requests[::4]]
    crowd = [result[1][0] for result in await asyncio.gather(*(answer(engine, request) for request in requests))]
    for one, many in zip(alone, crowd[::4], strict=True):
        assert one.token_ids == many.token_ids
        assert one.logprobs == pytest.approx(many.logprobs, abs=1e-4)
    health = await engine.health()
    assert (health.queued, health.running) == (0, 0)


async def test_a_seeded_answer_is_the_same_alone_in_a_crowd_and_in_another_engine(
    engine: EmbeddedEngine, model_dir: Path
) -> None:
    def seeded(seed: int) -> GenerationRequest:
        return call("roll", temperature=1.0, seed=seed, max_tokens=16, request_id=f"s{seed}")

    (_, (alone,)) = await answer(engine, seeded(5))
    noise = [answer(engine, call(f"other {index}", temperature=1.0, max_tokens=20)) for index in range(12)]
    crowd = await asyncio.gather(answer(engine, seeded(5)), answer(engine, seeded(6)), *noise)
    assert crowd[0][1][0].token_ids == alone.token_ids
    assert crowd[1][1][0].token_ids != alone.token_ids
    async with running(model_dir, max_batch=2, prefix_cache_tokens=0) as other:
        assert (await answer(other, seeded(5)))[1][0].token_ids == alone.token_ids


async def test_requests_without_a_seed_differ_and_follow_the_engines_entropy(model_dir: Path) -> None:
    async def drawn(entropy: random.Random | None) -> list[tuple[int, ...]]:
        async with running(model_dir, entropy=entropy) as engine:
            request = call("roll", temperature=1.0, max_tokens=12)
            return [(await answer(engine, request))[1][0].token_ids for _ in range(2)]

    first = await drawn(random.Random(1))
    assert first[0] != first[1]
    assert first == await drawn(random.Random(1))
    assert first != await drawn(None)


async def test_recorded_logprobs_agree_with_a_fresh_forward_pass(engine: EmbeddedEngine) -> None:
    requests = [call(f"q{index}", temperature=1.0, seed=index, max_tokens=15) for index in range(6)]
    for prompt, (choice,) in await asyncio.gather(*(answer(engine, request) for request in requests)):
        fresh = await engine.sequence_logprobs(None, prompt + choice.token_ids)
        assert choice.logprobs == pytest.approx(fresh[len(prompt) - 1 :], abs=1e-3)


async def test_reused_prefixes_change_no_token_and_no_logprob(model_dir: Path) -> None:
    requests = [call(SHARED + f"What is {index}?", max_tokens=10, request_id=str(index)) for index in range(8)]
    async with running(model_dir, prefix_cache_tokens=0) as engine:
        plain = [(await answer(engine, request))[1][0] for request in requests]
        assert lane_of(engine)._store._blocks == {}
    async with running(model_dir) as engine:
        computed = count_tokens(engine)
        reused = [(await answer(engine, request))[1][0] for request in requests]
        one_by_one = sum(computed)
        computed.clear()
        together = [r[1][0] for r in await asyncio.gather(*(answer(engine, request) for request in requests))]
        assert sum(computed) < one_by_one / 2  # whole prompts are known by now
    for one, two, three in zip(plain, reused, together, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
        assert one.logprobs == pytest.approx(three.logprobs, abs=1e-4)


def count_tokens(engine: EmbeddedEngine) -> list[int]:
    """Tokens per forward pass of the base model, padding included."""
    counted: list[int] = []
    lane_of(engine).runner.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: counted.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return counted


async def test_a_crowd_with_one_prefix_computes_it_once(engine: EmbeddedEngine) -> None:
    computed = count_tokens(engine)
    requests = [call(SHARED * 3 + str(index), max_tokens=1, request_id=str(index)) for index in range(16)]
    prompts = [prompt for prompt, _ in await asyncio.gather(*(answer(engine, request) for request in requests))]
    assert sum(computed) < len(prompts[0]) + 16 * 48


async def test_the_second_call_of_an_episode_reuses_the_first(engine: EmbeddedEngine) -> None:
    question: dict[str, Any] = {"role": "user", "content": SHARED * 2}
    first = GenerationRequest(request_id="a", messages=(question,), sampling=call(max_tokens=20).sampling)
    prompt, (choice,) = await answer(engine, first)
    computed = count_tokens(engine)
    messages = (question, {"role": "assistant", "content": choice.text}, {"role": "tool", "content": "4"})
    second, _ = await answer(engine, GenerationRequest(request_id="b", messages=messages, sampling=first.sampling))
    assert computed[0] <= len(second) - len(prompt) + 32


async def test_choices_share_one_prompt_and_have_random_streams_of_their_own(engine: EmbeddedEngine) -> None:
    computed = count_tokens(engine)
    prompt, choices = await answer(engine, call("many", n=5, temperature=1.0, seed=3, max_tokens=8))
    assert computed[0] == len(prompt)
    assert all(tokens <= 5 for tokens in computed[1:])
    assert [choice.index for choice in choices] == [0, 1, 2, 3, 4]
    assert len({choice.token_ids for choice in choices}) == 5
    _, again = await answer(engine, call("many", n=5, temperature=1.0, seed=3, max_tokens=8))
    assert again == choices
    _, (single,) = await answer(engine, call("many", temperature=1.0, seed=3, max_tokens=8))
    assert single.token_ids == choices[0].token_ids


async def test_more_choices_than_slots_are_served_in_turns(model_dir: Path) -> None:
    async with running(model_dir, max_batch=3) as engine:
        _, choices = await answer(engine, call("many", n=8, temperature=1.0, seed=3, max_tokens=6))
    assert len(choices) == 8
    assert all(choice.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) for choice in choices)


async def test_rows_that_memory_has_no_room_for_wait(model_dir: Path) -> None:
    token_bytes = 2 * 2 * (8 + 8) * 4  # layers, heads, key and value dimensions, float32
    async with running(model_dir, slot_bytes=3 * (20 + 20) * token_bytes) as engine:
        rows: list[int] = []
        lane_of(engine).runner.model.register_forward_pre_hook(
            lambda _module, _args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        requests = [call(str(index), max_tokens=20, request_id=str(index)) for index in range(9)]
        answers = await asyncio.gather(*(answer(engine, request) for request in requests))
        assert all(choices[0].token_ids for _, choices in answers)
        assert max(rows) == 3
        _, (alone,) = await answer(engine, call("much longer than the memory " * 10, max_tokens=5))
        assert alone.token_ids


async def test_prompts_longer_than_a_chunk_are_computed_in_parts(engine: EmbeddedEngine, model_dir: Path) -> None:
    running_call = asyncio.create_task(answer(engine, endless(engine, "short")))
    await until(lambda: lane_of(engine).running == 1)
    computed = count_tokens(engine)
    prompt, (choice,) = await answer(engine, call("y" * 700, max_tokens=6))
    assert max(computed) <= 256
    tokens, logprobs = reference(model_dir, prompt, 6)
    assert list(choice.token_ids) == tokens
    assert choice.logprobs == pytest.approx(logprobs, abs=1e-4)
    running_call.cancel()


@pytest.mark.parametrize("long_first", [True, False])
async def test_a_short_prompt_overtakes_a_long_one_and_both_answer_right(
    engine: EmbeddedEngine, model_dir: Path, long_first: bool
) -> None:
    running_call = asyncio.create_task(answer(engine, endless(engine, "short")))
    await until(lambda: lane_of(engine).running == 1)
    lane = lane_of(engine)
    admit, swap = lane._admit, lane._slots.swap
    swaps: list[tuple[int, int]] = []

    def admit_together() -> None:
        if len(lane.waiting) == 3:
            lane.waiting = WaitingRows(sorted(lane.waiting, key=lambda row: row.prompt_length, reverse=long_first))
            admit()

    def recorded(one: int, other: int, length: int) -> None:
        swaps.append((one, other))
        swap(one, other, length)

    lane._admit = admit_together
    lane._slots.swap = recorded
    requests = [call("y" * 700, max_tokens=6), call("z", max_tokens=6, n=2)]
    answers = await asyncio.gather(*(answer(engine, request) for request in requests))
    assert any(one != other for one, other in swaps)
    for prompt, choices in answers:
        tokens, logprobs = reference(model_dir, prompt, 6)
        for choice in choices:
            assert list(choice.token_ids) == tokens[:6]
            assert choice.logprobs == pytest.approx(logprobs, abs=1e-4)
    running_call.cancel()


@pytest.mark.parametrize("seed", range(4))
async def test_siblings_twins_and_long_prompts_in_one_crowd_change_no_answer(model_dir: Path, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [rng.choice("abc") * rng.choice((3, 40, 200, 700)) for _ in range(12)]
    requests = [
        call(rng.choice(prompts), max_tokens=rng.randint(2, 12), n=rng.randint(1, 3), request_id=str(index))
        for index in range(30)
    ]

    async def arriving(engine: EmbeddedEngine, request: GenerationRequest) -> Any:
        await asyncio.sleep(rng.random() * 0.3)
        return await answer(engine, request)

    async with running(model_dir, prefix_cache_tokens=rng.choice((0, 4096))) as engine:
        alone = [await answer(engine, request) for request in requests]
    async with running(model_dir, prefix_cache_tokens=rng.choice((0, 4096))) as engine:
        crowd = await asyncio.gather(*(arriving(engine, request) for request in requests))
    for (_, expected), (_, choices) in zip(alone, crowd, strict=True):
        for one, many in zip(expected, choices, strict=True):
            assert one.token_ids == many.token_ids
            assert one.logprobs == pytest.approx(many.logprobs, abs=1e-4)


async def test_every_token_is_in_one_delta_and_events_come_in_order(engine: EmbeddedEngine) -> None:
    events = [event async for event in engine.generate(call("x", n=2, temperature=1.0, seed=1, top_logprobs=2))]
    assert isinstance(events[0], PromptTokens)
    for index in range(2):
        mine = [e for e in events if isinstance(e, TokenDelta | ChoiceEnd) and e.choice == index]
        assert isinstance(mine[-1], ChoiceEnd)
        deltas = [event for event in mine if isinstance(event, TokenDelta)]
        assert len(deltas) == len(mine) - 1
        for delta in deltas:
            assert len(delta.token_ids) == len(delta.logprobs) == len(delta.token_texts) == len(delta.top_logprobs) == 1
            assert len(delta.top_logprobs[0]) == 2
            assert delta.top_logprobs[0][0][1] >= delta.logprobs[0] - 1e-6


async def test_an_end_token_is_recorded_and_stops(model_dir: Path) -> None:
    async with running(model_dir) as engine:
        for seed in range(60):
            _, (choice,) = await answer(engine, call("end", temperature=1.5, seed=seed, max_tokens=60))
            if choice.finish_reason is FinishReason.STOP:
                break
    assert choice.token_ids[-1] == 2
    assert 2 not in choice.token_ids[:-1]
    assert len(choice.logprobs) == len(choice.token_ids)
    assert "<|im_end|>" not in choice.text


async def test_a_stop_string_ends_the_choice_and_its_tokens_are_recorded(engine: EmbeddedEngine) -> None:
    request = call("stop", temperature=1.0, seed=2, max_tokens=40)
    _, (whole,) = await answer(engine, request)
    mark = whole.text[5:7]
    _, (cut,) = await answer(engine, call("stop", temperature=1.0, seed=2, max_tokens=40, stop=(mark,)))
    assert cut.text == whole.text[: whole.text.index(mark)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.text) < len(cut.token_ids) < len(whole.token_ids)


async def test_max_tokens_is_clipped_to_the_context_and_longer_prompts_are_refused(model_dir: Path) -> None:
    async with running(model_dir, max_context=64) as engine:
        prompt, (choice,) = await answer(engine, call("abc", max_tokens=500, temperature=1.0, seed=1))
        assert len(prompt) + len(choice.token_ids) <= 64
        with pytest.raises(RequestError, match=r"has \d+ tokens, .* may have 64"):
            await answer(engine, call("z" * 80))


async def test_closing_the_iterator_frees_the_row(engine: EmbeddedEngine) -> None:
    stream = engine.generate(endless(engine, "long"))
    async for event in stream:
        if isinstance(event, TokenDelta):
            break
    assert lane_of(engine).running == 1
    await stream.aclose()
    await until(lambda: not lane_of(engine).has_work)
    assert lane_of(engine)._slots.size_bytes == 0


async def test_a_cancelled_task_frees_its_rows_whether_they_run_or_wait(model_dir: Path) -> None:
    async with running(model_dir, max_batch=1) as engine:
        tasks = [asyncio.create_task(answer(engine, endless(engine, str(index)))) for index in range(3)]
        await until(lambda: lane_of(engine).running == 1 and len(lane_of(engine).waiting) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not lane_of(engine).has_work)
        assert (await answer(engine, call("after", max_tokens=2)))[1][0].token_ids


async def test_a_choice_that_shares_its_prompt_survives_the_others_cancellation(engine: EmbeddedEngine) -> None:
    request = call("w" * 1500, max_tokens=4)
    first = asyncio.create_task(answer(engine, request))
    second = asyncio.create_task(answer(engine, request))
    await until(lambda: lane_of(engine).has_work)
    first.cancel()
    assert len((await second)[1][0].token_ids) >= 1


async def test_a_full_queue_refuses_at_once(model_dir: Path) -> None:
    async with running(model_dir, max_batch=1, max_queue=2) as engine:
        streams = [engine.generate(endless(engine, str(index))) for index in range(3)]
        await anext(streams[0])
        await until(lambda: lane_of(engine).running == 1)
        for stream in streams[1:]:
            await anext(stream)
        with pytest.raises(EngineBusyError, match=r"2 choices wait .*max_queue = 2"):
            await answer(engine, call("late"))
        health = await engine.health()
        assert (health.ready, health.queued, health.running) == (True, 2, 1)
        with pytest.raises(RequestError, match="n = 3 exceeds"):
            await answer(engine, call("wide", n=3))
        for stream in streams:
            await stream.aclose()


async def test_an_exception_in_a_step_fails_its_batch_and_the_engine_goes_on(
    engine: EmbeddedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> None:
        handle.remove()
        raise RuntimeError("the model broke")

    stream = engine.generate(endless(engine, "victim"))
    await anext(stream)
    handle = lane_of(engine).runner.model.register_forward_pre_hook(explode)
    with pytest.raises(EngineError, match="the model broke"):
        async for _ in stream:
            pass
    assert "the model broke" in (await engine.health()).detail
    assert "RuntimeError: the model broke" in caplog.text
    assert "Traceback" in caplog.text
    assert (await engine.health()).ready
    assert len((await answer(engine, call("next", max_tokens=3)))[1][0].token_ids) >= 1


async def test_rows_that_could_not_join_fail_and_rows_that_were_passed_over_wait_on(engine: EmbeddedEngine) -> None:
    lane = lane_of(engine)
    reserve, admit = lane._slots.reserve, lane._admit

    def admit_together() -> None:
        if lane._rows or len(lane.waiting) == 3:
            lane.waiting = WaitingRows(sorted(lane.waiting, key=lambda row: row.call.request.request_id))
            admit()

    def without_memory(rows: int, columns: int) -> None:
        if rows == 2:
            lane._slots.reserve, lane._admit = reserve, admit
            raise RuntimeError("not enough memory for two rows")
        reserve(rows, columns)

    lane._slots.reserve, lane._admit = without_memory, admit_together
    requests = [
        call(SHARED * 3 + "first", request_id="1 has a slot"),
        call(SHARED * 3 + "second", request_id="2 waits for the beginning that it shares with the first"),
        call("another", request_id="3 does not fit"),
    ]
    async with asyncio.timeout(20.0):
        first, second, third = await asyncio.gather(
            *(answer(engine, request) for request in requests), return_exceptions=True
        )
    for failed in (first, third):
        assert isinstance(failed, EngineError)
        assert "not enough memory for two rows" in str(failed)
    assert not isinstance(second, BaseException)
    assert second[1][0].token_ids
    assert (await engine.health()).queued == 0


async def test_logits_that_are_not_finite_fail_the_request_and_no_other(engine: EmbeddedEngine) -> None:
    def poison(_module: object, _args: object, output: Any) -> Any:
        output.logits[0] = float("nan")
        return output

    handle = lane_of(engine).runner.model.register_forward_hook(poison)
    with pytest.raises(EngineError, match="no finite logits for request 'bad'"):
        await answer(engine, call("x", request_id="bad"))
    handle.remove()
    assert (await answer(engine, call("x")))[1][0].token_ids


async def test_closing_fails_what_runs_and_draining_lets_it_end(model_dir: Path) -> None:
    engine = EmbeddedEngine(model_dir, threads=1, dtype="float32", max_context=LONGEST)
    with pytest.raises(EngineError, match="not started"):
        await answer(engine, call())
    await engine.start()
    stream = engine.generate(endless(engine, "x"))
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineError, match="closed while the request ran"):
        async for _ in stream:
            pass
    assert not (await engine.health()).ready
    with pytest.raises(EngineError, match="closed"):
        await answer(engine, call())
    with pytest.raises(EngineError, match="closed"):
        await engine.start()
    drained = EmbeddedEngine(model_dir, threads=1, dtype="float32")
    await drained.start()
    task = asyncio.create_task(answer(drained, call("x", max_tokens=100, temperature=1.0, seed=1)))
    await until(lambda: lane_of(drained).has_work)
    await drained.close(drain=True)
    assert (await task)[1][0].finish_reason is not FinishReason.CANCELLED


async def test_callers_take_turns_whatever_one_of_them_has_queued(model_dir: Path) -> None:
    ended: list[str] = []

    async def ask(engine: EmbeddedEngine, request: GenerationRequest) -> None:
        await answer(engine, request)
        ended.append(request.caller)

    async with running(model_dir, max_batch=1) as engine:
        blocker = engine.generate(endless(engine, "blocks the only slot"))
        await anext(blocker)
        await anext(blocker)
        asked: list[asyncio.Task[None]] = []
        for caller in ("many", "many", "many", "few", "many", "other"):
            request = replace(call(f"{caller} {len(asked)}", max_tokens=2), caller=caller)
            asked.append(asyncio.create_task(ask(engine, request)))
            await until(lambda: len(lane_of(engine).waiting) == len(asked))
        await blocker.aclose()
        await asyncio.gather(*asked)
    assert ended == ["many", "few", "other", "many", "many", "many"]
