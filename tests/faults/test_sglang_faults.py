"""An SGLang server with its quirks, and one that lies: what is asked of it, what is believed, and what is said."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from engine_fixtures import answer, call, write_adapter, write_tiny_model
from gateway_world import CALCULATOR, until
from tidegate.core.errors import (
    AdapterError,
    ConfigError,
    EngineBusyError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
)
from tidegate.core.generation import GenerationFold
from tidegate.core.types import FinishReason, GenerationRequest
from tidegate.engines.model_cache import base_hash
from tidegate.engines.remote import SglangEngine, Upstream
from tidegate.engines.remote.sglang import choice_seed
from tidegate.engines.remote.sglang_notes import sglang_notes
from upstream_kit import sglang_engine
from upstream_server import Faults, running_upstream
from upstream_sglang import SglangServer

PROMPTS = (({"role": "user", "content": "What is 2 + 2?"},),)
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
PLAIN: dict[str, Any] = {}
PARSING: dict[str, Any] = {"tool_call_parser": "qwen"}
"""With a parser the answer comes through the chat, else after tokens."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("sglang") / "model")


async def part_of(engine: SglangEngine, request: GenerationRequest) -> tuple[GenerationFold, EngineError]:
    """What came before a failure, and the failure."""
    fold = GenerationFold()
    try:
        async for event in engine.generate(request):
            fold.add(event)
    except EngineError as error:
        return fold, error
    raise AssertionError("the engine did not fail")


# --- what is asked -----------------------------------------------------------------------------------------------


async def test_an_answer_is_sampled_from_the_servers_own_tokens() -> None:
    async with sglang_engine() as (engine, server):
        prompt, (choice,) = await answer(engine, call(**SAMPLED))
        assert server.paths == ["/tokenize", "/model_info", "/v1/completions"]
        assert server.body["prompt"] == list(prompt)
        assert choice.token_exact
        await answer(engine, call(**SAMPLED))
        assert server.paths[3:] == ["/tokenize", "/v1/completions"]  # its flags are asked for once


@pytest.mark.parametrize("flags", [PARSING, {"reasoning_parser": "qwen3"}])
async def test_what_the_server_parses_comes_through_its_chat(flags: dict[str, Any]) -> None:
    async with sglang_engine(script="hello", **flags) as (engine, server):
        _, (choice,) = await answer(engine, call(max_tokens=40))
        assert server.paths[-1] == "/v1/chat/completions"
        assert "return_token_ids" not in server.body
        assert choice.finish_reason is FinishReason.STOP
        assert choice.token_exact  # the token that ends it, which has no text, included
        assert len(choice.token_ids) == len(choice.text) + 1


async def test_every_setting_is_spelled_out() -> None:
    expected = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    for flags in (PLAIN, PARSING):
        async with sglang_engine(**flags) as (engine, server):
            await answer(engine, call(temperature=0.7, json_schema='{"type":"object"}'))
            assert {name: server.body[name] for name in expected} == expected
            assert server.body["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize("flags", [PLAIN, PARSING])
async def test_choices_are_single_calls_with_seeds_of_their_own(flags: dict[str, Any]) -> None:
    async with sglang_engine(**flags) as (engine, server):
        _, choices = await answer(engine, call(n=3, **SAMPLED))
        assert all(choice.token_exact for choice in choices)  # the counts of all were added up
        assert [body.get("n", 1) for body in server.bodies] == [1, 1, 1]
        seeds = [choice_seed(5, index) for index in range(3)]
        assert sorted(body["seed"] for body in server.bodies) == sorted(seeds)
        assert (seeds[0], len(set(seeds))) == (5, 3)
        assert all(0 <= seed < 1 << 31 for seed in seeds)


async def test_calls_without_a_seed_differ_on_a_server_that_gives_them_all_the_same() -> None:
    async with sglang_engine() as (engine, _):
        asked = {"max_tokens": 16, "temperature": 1.0}
        said = [choice.text for _ in range(2) for choice in (await answer(engine, call(n=2, **asked)))[1]]
        assert len(set(said)) == 4


async def test_an_adapter_is_named_after_its_base(model_dir: Path, tmp_path: Path) -> None:
    async with sglang_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        assert server.changes == [("load", "a")]
        await answer(engine, call(adapter="a"))
        assert server.body["model"] == "tiny:a"
        await answer(engine, call())
        assert server.body["model"] == "tiny"


async def test_every_request_carries_the_key() -> None:
    async with sglang_engine(key="sk-1", limits={"key": "sk-1"}) as (engine, server):
        await answer(engine, call())
        await engine.sequence_logprobs(None, [5, 6, 7])
        assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-1"}


# --- what is believed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [PLAIN, PARSING])
@pytest.mark.parametrize("faults", [{"lose_token": 2}, {"usage": False}])
async def test_tokens_that_the_servers_own_count_does_not_confirm_are_not_kept(
    flags: dict[str, Any], faults: dict[str, Any]
) -> None:
    async with sglang_engine(faults=Faults(**faults), **flags) as (engine, _):
        _, choices = await answer(engine, call(n=2, **SAMPLED))
        for choice in choices:
            assert choice.text
            assert (choice.token_exact, choice.token_ids, choice.logprobs) == (False, (), ())


async def test_ids_of_a_prompt_that_was_rendered_otherwise_are_not_kept() -> None:
    async with sglang_engine(template_differs=True, **PARSING) as (engine, _):
        _, (choice,) = await answer(engine, call(**SAMPLED))
        assert choice.text
        assert not choice.token_exact


async def test_an_older_server_gives_answers_without_tokens() -> None:
    async with sglang_engine(sglext=False, **PARSING) as (engine, _):
        fold = GenerationFold()
        entries = 0
        async for event in engine.generate(call(top_logprobs=2, **SAMPLED)):
            fold.add(event)
            entries += len(getattr(event, "token_texts", ()))
        (choice,) = fold.choices()
        assert (choice.token_exact, choice.token_ids) == (False, ())
        assert entries == 12  # log-probabilities still go to the client that asked


async def test_tools_without_a_parser_are_answered_and_not_trained_on() -> None:
    async with sglang_engine() as (engine, server):
        _, (choice,) = await answer(engine, call(tools=(CALCULATOR,), max_tokens=200))
        assert server.paths[-1] == "/v1/chat/completions"
        assert not choice.token_exact  # a token without text loses its log-probability there


async def test_calls_that_the_server_parsed_are_token_exact() -> None:
    async with sglang_engine(**PARSING) as (engine, server):
        _, (choice,) = await answer(engine, call(tools=(CALCULATOR,), max_tokens=200))
        (called,) = choice.tool_calls
        assert called["function"] == {"name": "calculator", "arguments": '{"i": 7}'}
        assert choice.finish_reason is FinishReason.TOOL_CALLS
        assert choice.token_exact
        assert server.body["tools"] == [CALCULATOR]


@pytest.mark.parametrize("flags", [PLAIN, PARSING])
async def test_chunks_of_several_tokens_are_whole(flags: dict[str, Any]) -> None:
    asked = call(top_logprobs=2, **SAMPLED)
    async with sglang_engine(**flags) as (engine, _):
        _, (single,) = await answer(engine, asked)
    async with sglang_engine(tokens_a_chunk=3, **flags) as (engine, _):
        tops: list[Any] = []
        fold = GenerationFold()
        async for event in engine.generate(asked):
            fold.add(event)
            tops += getattr(event, "top_logprobs", ())
    assert fold.choices() == (single,)
    if flags is PARSING:  # sglang #39260: only the first token of a chunk has alternatives of its own
        assert [len(top) for top in tops] == [2, 0, 0] * 4
    else:
        assert [len(top) for top in tops] == [2] * 12


@pytest.mark.parametrize(
    ("raw", "temperature", "known"), [(False, 0.7, True), (False, 1.0, True), (True, 0.7, False), (True, 1.0, True)]
)
async def test_original_logprobs_describe_only_temperature_one(raw: bool, temperature: float, known: bool) -> None:
    async with sglang_engine(raw_logprobs=raw) as (engine, _):
        request = call(max_tokens=9, temperature=temperature, seed=1)
        fold = GenerationFold()
        async for event in engine.generate(request):
            fold.add(event)
        assert fold.as_sampled(request.sampling).unfiltered is known


async def test_base_weights_under_an_adapters_name_are_caught(model_dir: Path, tmp_path: Path) -> None:
    async with sglang_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        for name, seed in (("old", 1), ("new", 2)):
            await engine.load(write_adapter(tmp_path / name, model_dir, seed=seed))
        assert (await engine.probe("new", against="old", prompts=PROMPTS)).max_logit_difference > 0.1
        kept = server.weights.pop("new")
        for against in ("old", None):
            assert (await engine.probe("new", against=against, prompts=PROMPTS)).max_logit_difference == 0.0
        server.weights["new"] = server.weights["old"]
        assert (await engine.probe("new", against="old", prompts=PROMPTS)).max_logit_difference == 0.0
        server.weights["new"] = kept
        server.faults.noise, server.faults.base_for_adapters = 0.01, True
        assert (await engine.probe("new", against=None, prompts=PROMPTS)).max_logit_difference == 0.0


async def test_log_probabilities_of_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sglang_engine() as (engine, _):

        async def other(path: str, body: Any) -> Any:
            del path, body
            return {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-1.0, 99, None]]}}

        monkeypatch.setattr(engine._upstream, "post", other)
        with pytest.raises(EngineError, match="they are of other tokens"):
            await engine.sequence_logprobs(None, [5, 6, 7])


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [PLAIN, PARSING])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"reset_after": 4}, "the connection broke"),
        ({"end_after": 4}, "without '\\[DONE\\]'"),
        ({"garbage_after": 4}, "sent '{broken, the scheduler died'"),
        ({"error_after": 4}, "the scheduler died"),
    ],
)
async def test_a_stream_that_breaks_leaves_its_text_and_an_error(
    flags: dict[str, Any], fault: dict[str, int], told: str
) -> None:
    async with sglang_engine(faults=Faults(**fault), **flags) as (engine, _):
        fold, error = await part_of(engine, call(**SAMPLED))
        with pytest.raises(EngineError, match=told):
            raise error
        (choice,) = fold.choices()
        assert (choice.token_exact, choice.token_ids, len(choice.text)) == (False, (), 4)
        assert choice.finish_reason is FinishReason.CANCELLED
        assert fold.prompt_token_ids


@pytest.mark.parametrize("flags", [PLAIN, PARSING])
async def test_an_answer_that_was_aborted_is_no_answer(flags: dict[str, Any]) -> None:
    async with sglang_engine(faults=Faults(finish_reason="abort"), **flags) as (engine, _):
        _, error = await part_of(engine, call())
        assert "finish_reason 'abort'" in str(error)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, RequestError), (429, EngineBusyError), (500, EngineError), (503, EngineUnavailableError)],
)
async def test_a_status_says_whose_fault_it_is(status: int, expected: type[Exception]) -> None:
    faults = Faults(status=status, headers={"Retry-After": "17"}, message="temperature is a number")
    async with sglang_engine(faults=faults) as (engine, _):
        with pytest.raises(expected, match="temperature is a number") as caught:
            await answer(engine, call(n=2))
        assert type(caught.value) is expected


async def test_a_full_queue_that_is_told_within_a_stream_keeps_its_status() -> None:
    async with sglang_engine(full=True) as (engine, _):
        with pytest.raises(EngineUnavailableError, match="The request queue is full") as caught:
            await answer(engine, call())
        assert caught.value.http_status == 503


async def test_one_choice_that_fails_ends_the_others() -> None:
    async with sglang_engine(faults=Faults(hold_after=2)) as (engine, server):
        events = engine.generate(call(n=3, max_tokens=40, temperature=1.0, seed=1))
        fails = asyncio.create_task(collect_until_error(events))
        await until(lambda: server.holding == 3)
        server.faults.reset_after = 2  # the next to go on breaks
        server.go.set()
        assert isinstance(await fails, EngineError)
        assert (await engine.health()).running == 0


async def collect_until_error(events: Any) -> EngineError | None:
    try:
        async for _ in events:
            pass
    except EngineError as error:
        return error
    return None


async def test_closing_cancels_every_choice() -> None:
    async with sglang_engine(faults=Faults(hold_after=2)) as (engine, server):
        async with (
            asyncio.timeout(10),
            aclosing(engine.generate(call(n=3, max_tokens=40, temperature=1.0))) as events,
        ):
            await anext(events)
            await anext(events)
            await until(lambda: server.holding == 3)
        await until(lambda: server.cancelled == 3)


async def test_an_unload_after_parallel_sampling_by_others_does_not_hang_us(model_dir: Path, tmp_path: Path) -> None:
    limits = {"read_timeout_s": 0.3}
    async with sglang_engine(base_sha256=base_hash(model_dir), limits=limits) as (engine, server):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        await answer(engine, call(n=4, adapter="a", max_tokens=3))  # ours never are
        assert not server.sampled_in_parallel
        server.sampled_in_parallel = True
        with pytest.raises(EngineTimeoutError, match="#36894"):
            await engine.unload("a")
        assert await engine.list_adapters() == ()  # the server let go of its name before it hung


async def test_an_unload_of_ours_never_meets_parallel_sampling(model_dir: Path, tmp_path: Path) -> None:
    async with sglang_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        for tools in ((), (CALCULATOR,)):
            await answer(engine, call(n=4, adapter="a", max_tokens=3, tools=tools))
        await engine.unload("a")
        assert server.adapters == {}


async def test_an_unload_that_broke_off_is_ended_before_the_name_is_loaded_again(
    model_dir: Path, tmp_path: Path
) -> None:
    async with sglang_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        ref = write_adapter(tmp_path / "a", model_dir)
        server.pending["a"] = ref.path
        await engine.load(ref)
        assert server.changes == [("load", "a"), ("unload", "a"), ("load", "a")]
        assert await engine.list_adapters() == (ref,)


async def test_a_restarted_server_has_lost_our_adapters_and_is_not_ready(model_dir: Path, tmp_path: Path) -> None:
    async with sglang_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        await answer(engine, call())
        server.adapters.clear()
        server.ever_loaded.clear()
        server.tool_call_parser = "qwen"
        health = await engine.health()
        assert not health.ready
        assert "has lost ['a']" in health.detail
        with pytest.raises(AdapterError, match="has lost adapter 'a'"):
            await answer(engine, call(adapter="a"))
        with pytest.raises(AdapterError, match="has lost adapter 'a'"):
            await engine.sequence_logprobs("a", [5, 6, 7])
        await answer(engine, call())
        assert server.paths[-1] == "/v1/chat/completions"  # its flags were asked for again


async def test_a_server_that_drops_adapters_on_its_own_is_noticed(model_dir: Path, tmp_path: Path) -> None:
    async with sglang_engine(base_sha256=base_hash(model_dir), max_loaded=1) as (engine, _):
        for seed, name in enumerate(("a", "b")):
            await engine.load(write_adapter(tmp_path / name, model_dir, seed=seed))
        assert [ref.name for ref in await engine.list_adapters()] == ["b"]
        assert "has lost ['a']" in (await engine.health()).detail


async def test_a_server_without_adapters_says_what_it_needs(model_dir: Path, tmp_path: Path) -> None:
    async with sglang_engine(base_sha256=base_hash(model_dir), lora=False) as (engine, _):
        with pytest.raises(EngineError, match="--enable-lora, --max-lora-rank and --lora-target-modules"):
            await engine.load(write_adapter(tmp_path / "a", model_dir))


async def test_another_server_says_that_it_is_not_sglang(model_dir: Path, tmp_path: Path) -> None:
    async with running_upstream() as server:
        upstream = Upstream(server.url)
        engine = SglangEngine(upstream, model="tiny", base_sha256=base_hash(model_dir), replica="r")
        with pytest.raises(EngineError, match="has no /tokenize: is it SGLang"):
            await answer(engine, call())
        with pytest.raises(EngineError, match="takes no adapters; start SGLang with"):
            await engine.load(write_adapter(tmp_path / "a", model_dir))
        await upstream.close()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, ()),
        ({"deterministic": False}, ("--enable-deterministic-inference",)),
        ({"max_loaded": 4}, ("--max-loaded-loras 4",)),
    ],
)
async def test_a_person_is_told_which_flags_matter(flags: dict[str, Any], told: tuple[str, ...]) -> None:
    async with running_upstream(SglangServer, **flags) as server:
        upstream = Upstream(server.url)
        notes = (await sglang_notes(upstream)).split("; ")
        await upstream.close()
        assert notes[0] == "SGLang 0.5.23"
        assert len(notes) == 1 + len(told)
        assert all(words in note for words, note in zip(told, notes[1:], strict=True))


async def test_a_person_is_told_of_a_server_without_adapters() -> None:
    async with running_upstream(SglangServer, lora=False) as server:
        upstream = Upstream(server.url)
        with pytest.raises(ConfigError, match="takes no adapters"):
            await sglang_notes(upstream)
        await upstream.close()
