"""What every engine promises: in this process, over vLLM's and SGLang's dialects, over several such servers, and, where
it applies, over plain OpenAI's. ``make test-vllm`` runs it over a real vLLM too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine_fixtures import answer, call, running, write_adapter, write_tiny_model
from gateway_world import until
from real_vllm import RealVllm, running_vllm
from replica_world import vllm_replicas
from tidegate.core.errors import AdapterError, EngineError, RequestError
from tidegate.core.generation import collect
from tidegate.core.types import AdapterRef, ChoiceEnd, FinishReason, GenerationEvent, PromptTokens, TokenDelta
from tidegate.engines.model_cache import base_hash
from tidegate.ports import Engine
from upstream_kit import openai_engine, sglang_engine, vllm_engine

CONTEXT = 512
PROMPTS = (({"role": "user", "content": "What is 2 + 2?"},), ({"role": "user", "content": "Name a colour."},))


@dataclass(frozen=True)
class Kit:
    """An engine and what a test needs to know of it. ``hold`` makes answers stop half-way where they can be held."""

    engine: Engine
    name: str
    model_dir: Path
    hold: Callable[[], None]
    cancelled: Callable[[], bool]
    let_go: Callable[[], None]

    @property
    def recorder_only(self) -> bool:
        return self.name == "openai"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("contract") / "model")


@pytest.fixture(scope="module")
def vllm_process(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealVllm]:
    with running_vllm(tmp_path_factory.mktemp("vllm"), max_context=CONTEXT) as running:
        yield running


@pytest.fixture(
    params=[
        "embedded", "vllm", "sglang", "sglang-parsing", "replicas", "openai",
        pytest.param("real vllm", marks=pytest.mark.vllm),
    ]
)  # fmt: skip
async def kit(request: pytest.FixtureRequest, model_dir: Path) -> AsyncGenerator[Kit]:
    async with AsyncExitStack() as stack:
        if request.param == "embedded":
            engine: Engine = await stack.enter_async_context(running(model_dir, max_context=CONTEXT))
            yield Kit(engine, request.param, model_dir, lambda: None, lambda: True, lambda: None)
            return
        if request.param == "replicas":
            opening = vllm_replicas(3, base_sha256=base_hash(model_dir))
            several, servers = await stack.enter_async_context(opening)

            def hold_all() -> None:
                for one in servers:
                    one.faults.hold_after = 2

            def let_all_go() -> None:
                for one in servers:
                    one.go.set()

            yield Kit(
                several, request.param, model_dir, hold_all, lambda: sum(one.cancelled for one in servers) == 1,
                let_all_go,
            )  # fmt: skip
            return
        if request.param == "real vllm":
            real = request.getfixturevalue("vllm_process")
            engine = await stack.enter_async_context(real.engine())
            yield Kit(engine, request.param, real.model_dir, lambda: None, lambda: True, lambda: None)
            return
        base = base_hash(model_dir)
        opened = {
            "vllm": lambda: vllm_engine(base_sha256=base),
            "sglang": lambda: sglang_engine(base_sha256=base),
            "sglang-parsing": lambda: sglang_engine(
                base_sha256=base, tool_call_parser="qwen"
            ),  # another way to answers
            "openai": openai_engine,
        }
        engine, server = await stack.enter_async_context(opened[request.param]())

        def hold() -> None:
            server.faults.hold_after = 2

        yield Kit(engine, request.param, model_dir, hold, lambda: server.cancelled == 1, server.go.set)


@pytest.fixture
def with_adapters(kit: Kit) -> Kit:
    if kit.recorder_only:
        pytest.skip("this engine has no adapters")
    return kit


async def events_of(engine: Engine, content: str = "hello", **options: object) -> list[GenerationEvent]:
    return [event async for event in engine.generate(call(content, **options))]


async def test_the_prompt_comes_first_then_tokens_then_one_end_a_choice(kit: Kit) -> None:
    events = await events_of(kit.engine, n=2, max_tokens=5, temperature=1.0, seed=3)
    assert isinstance(events[0], PromptTokens)
    assert sum(isinstance(event, PromptTokens) for event in events) == 1
    for choice in (0, 1):
        mine = [event for event in events if isinstance(event, TokenDelta | ChoiceEnd) and event.choice == choice]
        assert [isinstance(event, ChoiceEnd) for event in mine] == [False] * (len(mine) - 1) + [True]


async def test_tokens_are_whole_or_said_to_be_lacking(kit: Kit) -> None:
    prompt, (choice,) = await answer(kit.engine, call(max_tokens=9, temperature=1.0, seed=1))
    assert choice.text
    assert choice.token_exact is not kit.recorder_only
    assert bool(prompt) is not kit.recorder_only
    assert len(choice.token_ids) == len(choice.logprobs)
    assert bool(choice.token_ids) is not kit.recorder_only


async def test_an_answer_of_so_many_tokens_ends_by_its_length(kit: Kit) -> None:
    _, (choice,) = await answer(kit.engine, call("abc", max_tokens=1))
    assert choice.finish_reason is FinishReason.LENGTH
    assert kit.recorder_only or len(choice.token_ids) == 1


@pytest.mark.parametrize("adapter", [None, "one"])
async def test_the_logprobs_of_an_answer_are_those_of_its_sequence(
    with_adapters: Kit, tmp_path: Path, adapter: str | None
) -> None:
    engine = with_adapters.engine
    await engine.load(write_adapter(tmp_path / "one", with_adapters.model_dir))
    prompt, (choice,) = await answer(engine, call(max_tokens=9, temperature=1.0, seed=1, adapter=adapter))
    scored = await engine.sequence_logprobs(adapter, (*prompt, *choice.token_ids), first=len(prompt))
    assert choice.logprobs == pytest.approx(scored, abs=1e-4)
    other = await engine.sequence_logprobs(
        "one" if adapter is None else None, (*prompt, *choice.token_ids), first=len(prompt)
    )
    assert choice.logprobs != pytest.approx(other, abs=1e-2)


async def test_choices_of_one_call_differ(kit: Kit) -> None:
    _, choices = await answer(kit.engine, call(n=3, max_tokens=16, temperature=1.0, seed=2))
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.text for choice in choices}) == 3


async def test_the_same_seed_gives_the_same_answer(kit: Kit) -> None:
    said = [(await answer(kit.engine, call(n=2, max_tokens=16, temperature=1.0, seed=seed)))[1] for seed in (5, 5, 6)]
    texts = [[choice.text for choice in choices] for choices in said]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


async def test_a_greedy_answer_is_the_same_without_a_seed(kit: Kit) -> None:
    first, again = [(await answer(kit.engine, call(max_tokens=16)))[1][0] for _ in range(2)]
    assert first.text == again.text


async def test_text_ends_before_a_stop_string(kit: Kit) -> None:
    _, (whole,) = await answer(kit.engine, call(max_tokens=24, temperature=1.0, seed=5))
    stop = whole.text[3:5]
    _, (cut,) = await answer(kit.engine, call(max_tokens=24, temperature=1.0, seed=5, stop=(stop,)))
    assert stop
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == whole.text[: whole.text.index(stop)]


async def test_closing_the_iterator_cancels_the_generation(kit: Kit) -> None:
    kit.hold()
    async with aclosing(kit.engine.generate(call(max_tokens=400, temperature=1.0))) as events:
        async for event in events:
            if isinstance(event, TokenDelta):
                break
    await until(kit.cancelled)
    async with asyncio.timeout(10):
        while (await kit.engine.health()).running:  # noqa: ASYNC110 - the engine tells only when asked
            await asyncio.sleep(0.005)


async def test_a_prompt_longer_than_the_context_is_the_requests_fault(kit: Kit) -> None:
    with pytest.raises(RequestError, match=str(CONTEXT)):
        await answer(kit.engine, call("x" * 2 * CONTEXT))


async def test_an_adapter_that_is_not_loaded_answers_nothing(kit: Kit) -> None:
    with pytest.raises(AdapterError, match="'gone' is not loaded"):
        await answer(kit.engine, call(adapter="gone"))
    with pytest.raises(AdapterError, match="'gone' is not loaded"):
        await kit.engine.sequence_logprobs("gone", [5, 6, 7])
    with pytest.raises(AdapterError, match="'gone' is not loaded"):
        await kit.engine.probe("gone", against=None, prompts=PROMPTS)


async def test_a_running_engine_is_healthy(kit: Kit) -> None:
    health = await kit.engine.health()
    assert (health.ready, health.queued, health.running) == (True, 0, 0)
    assert len(kit.engine.base_sha256) == 64


@pytest.mark.parametrize(("length", "first"), [(3, 0), (3, 3), (1, 1), (0, 1)])
async def test_a_token_without_any_before_it_has_no_log_probability(kit: Kit, length: int, first: int) -> None:
    with pytest.raises(RequestError, match=f"first is {first} of {length} tokens"):
        await kit.engine.sequence_logprobs(None, [5] * length, first=first)


async def test_adapters_are_listed_from_load_to_unload(with_adapters: Kit, tmp_path: Path) -> None:
    engine = with_adapters.engine
    refs = [write_adapter(tmp_path / name, with_adapters.model_dir, seed=seed) for seed, name in enumerate(("a", "b"))]
    assert await engine.list_adapters() == ()
    for ref in (*refs, refs[0]):  # the same again is a no-op
        await engine.load(ref)
    assert await engine.list_adapters() == tuple(refs)
    texts = [(await answer(engine, call(max_tokens=24, adapter=name)))[1][0].text for name in (None, "a", "b")]
    assert len(set(texts)) == 3
    await engine.unload("a")
    await engine.unload("never loaded")
    assert await engine.list_adapters() == (refs[1],)
    with pytest.raises(AdapterError, match="'a' is not loaded"):
        await answer(engine, call(adapter="a"))


async def test_an_adapter_leaves_when_its_last_call_has_ended(with_adapters: Kit, tmp_path: Path) -> None:
    engine = with_adapters.engine
    await engine.load(write_adapter(tmp_path / "a", with_adapters.model_dir))
    with_adapters.hold()
    async with aclosing(engine.generate(call(max_tokens=40, temperature=1.0, adapter="a"))) as events:
        await anext(events)
        leaving = asyncio.create_task(engine.unload("a"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not leaving.done()
        assert await engine.list_adapters() == ()
        with_adapters.let_go()
        async for event in events:
            last = event
        assert isinstance(last, ChoiceEnd)
    async with asyncio.timeout(10):
        await leaving


async def test_files_that_were_changed_are_not_loaded(with_adapters: Kit, tmp_path: Path) -> None:
    ref = write_adapter(tmp_path / "a", with_adapters.model_dir)
    with pytest.raises(AdapterError, match=f"hashes to {ref.sha256}, expected {'0' * 64}"):
        await with_adapters.engine.load(replace(ref, sha256="0" * 64))
    assert await with_adapters.engine.list_adapters() == ()


async def test_an_adapter_of_another_base_is_not_loaded(with_adapters: Kit, tmp_path: Path) -> None:
    ref = write_adapter(tmp_path / "a", with_adapters.model_dir, base_sha256="f" * 64)
    with pytest.raises(AdapterError, match="was trained on base f"):
        await with_adapters.engine.load(ref)
    assert await with_adapters.engine.list_adapters() == ()


async def test_a_name_is_never_given_to_other_content(with_adapters: Kit, tmp_path: Path) -> None:
    ref = write_adapter(tmp_path / "a", with_adapters.model_dir)
    await with_adapters.engine.load(ref)
    other = write_adapter(tmp_path / "other", with_adapters.model_dir, name="a", seed=9)
    with pytest.raises(AdapterError, match="'a' is taken"):
        await with_adapters.engine.load(other)
    assert await with_adapters.engine.list_adapters() == (ref,)


async def test_a_probe_tells_equal_weights_from_different_ones(with_adapters: Kit, tmp_path: Path) -> None:
    engine = with_adapters.engine
    refs: dict[str, AdapterRef] = {}
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        refs[name] = write_adapter(tmp_path / name, with_adapters.model_dir, seed=seed)
        await engine.load(refs[name])
    for against in (None, "other"):
        result = await engine.probe("one", against=against, prompts=PROMPTS)
        assert (result.name, result.sha256) == ("one", refs["one"].sha256)
        assert result.max_logit_difference > 0.1
    assert (await engine.probe("one", against="same", prompts=PROMPTS)).max_logit_difference == 0.0
    with pytest.raises(RequestError, match="at least one prompt"):
        await engine.probe("one", against=None, prompts=())


async def test_an_engine_without_adapters_says_what_it_is(kit: Kit, tmp_path: Path) -> None:
    if not kit.recorder_only:
        pytest.skip("this engine has adapters")
    ref = write_adapter(tmp_path / "a", kit.model_dir)
    with pytest.raises(AdapterError, match="this upstream takes no adapters: recorder only"):
        await kit.engine.load(ref)
    await kit.engine.unload("a")
    assert await kit.engine.list_adapters() == ()
    with pytest.raises(EngineError, match="states no log-probabilities of given tokens"):
        await kit.engine.sequence_logprobs(None, [5, 6, 7])
    fold = await collect(kit.engine.generate(call(max_tokens=9)))
    assert fold.counts is not None
    assert fold.counts.completion == 9
