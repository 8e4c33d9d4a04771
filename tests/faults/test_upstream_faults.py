"""A server behind us that is down, slow, broken, confused or lying: what the engine says, and what is kept."""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

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
from tidegate.engines.remote import OpenAIEngine, Upstream, VllmEngine
from tidegate.engines.remote.models import only_model
from upstream_kit import openai_engine, vllm_engine
from upstream_server import Faults, running_upstream

PROMPTS = (({"role": "user", "content": "What is 2 + 2?"},),)
KEY = "sk-secret-0123456789"
SAMPLED: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("upstream") / "model")


async def part_of(engine: VllmEngine | OpenAIEngine, request: GenerationRequest) -> tuple[GenerationFold, EngineError]:
    """What came before a failure, and the failure."""
    fold = GenerationFold()
    try:
        async for event in engine.generate(request):
            fold.add(event)
    except EngineError as error:
        return fold, error
    raise AssertionError("the engine did not fail")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def test_a_server_that_is_down_is_unavailable_and_unhealthy() -> None:
    upstream = Upstream(f"http://127.0.0.1:{free_port()}")
    for engine in (
        VllmEngine(upstream, model="tiny", base_sha256="b" * 64, replica="r"),
        OpenAIEngine(upstream, model="tiny", replica="r"),
    ):
        _, error = await part_of(engine, call())
        assert (type(error), error.http_status) == (EngineUnavailableError, 503)
        assert "cannot be reached" in str(error)
        health = await engine.health()
        assert not health.ready
        assert "cannot be reached" in health.detail
    await upstream.close()


@pytest.mark.parametrize(
    ("status", "expected", "http_status"),
    [
        (400, RequestError, 400),
        (422, RequestError, 400),
        (401, EngineError, 502),
        (429, EngineBusyError, 429),
        (500, EngineError, 502),
        (503, EngineUnavailableError, 503),
        (504, EngineTimeoutError, 504),
        (404, EngineError, 502),
    ],
)
async def test_a_status_says_whose_fault_it_is(status: int, expected: type[Exception], http_status: int) -> None:
    faults = Faults(status=status, headers={"Retry-After": "17"}, message="temperature is a number")
    for opened in (vllm_engine, openai_engine):
        async with opened(faults=faults) as (engine, _):
            with pytest.raises(expected) as caught:
                await answer(engine, call())
            assert type(caught.value) is expected
            assert caught.value.http_status == http_status
            if status in (429, 503):
                assert caught.value.retry_after_s == 17
            quoted = status != 401 and (status != 404 or opened is openai_engine)
            assert ("temperature is a number" in str(caught.value)) is quoted


@pytest.mark.parametrize(("given", "expected"), [("99999999", 86_400), ("9" * 5000, None), ("-1", None), ("x", None)])
async def test_a_time_to_wait_is_bounded(given: str, expected: int | None) -> None:
    async with vllm_engine(faults=Faults(status=429, headers={"Retry-After": given})) as (engine, _):
        with pytest.raises(EngineBusyError) as caught:
            await answer(engine, call())
        assert caught.value.retry_after_s == expected


async def test_a_key_goes_into_one_header_and_into_no_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with vllm_engine(key=KEY, limits={"key": KEY}) as (engine, server):
        await answer(engine, call())
        assert server.headers[-1]["authorization"] == f"Bearer {KEY}"
        server.faults.status, server.faults.message = 500, f"cannot serve {KEY}"
        _, error = await part_of(engine, call())
        assert KEY not in str(error)
        server.faults.status, server.faults.error_after = None, 2
        server.faults.dying_words = f"cannot serve {KEY}"
        _, error = await part_of(engine, call())
        assert "cannot serve (key)" in str(error)
        server.faults.error_after, server.faults.garbage_after = None, 2
        _, error = await part_of(engine, call())
        assert "(key)" in str(error)
        assert KEY not in str(error)
    async with openai_engine(key="another", limits={"key": KEY}) as (plain, _):
        _, error = await part_of(plain, call())
        assert "does not accept our key" in str(error)
        assert KEY not in str(error)
        assert not (await plain.health()).ready
    assert KEY not in caplog.text


@pytest.mark.parametrize("opened", [vllm_engine, openai_engine])
@pytest.mark.parametrize(
    "fault",
    [
        {"finish_reason": KEY},
        {"finish_reason": "x" * 70 + KEY},
        {"content_type": f"text/{KEY}"},
        {"garbage_after": 2, "dying_words": "x" * 45 + KEY},
        {"garbage_after": 2, "dying_words": KEY},
        {"error_after": 2, "dying_words": f"{KEY} \ud83d"},
        {"status": 500, "message": f"{KEY} \ud83d"},
    ],
)
async def test_what_a_server_puts_anywhere_is_repeated_without_the_key(opened: Any, fault: dict[str, Any]) -> None:
    async with opened(vllm=True, key=KEY, limits={"key": KEY}, faults=Faults(**fault)) as (engine, _):
        _, error = await part_of(engine, call())
        assert "(key)" in str(error)
        assert KEY[:5] not in "".join(traceback.format_exception(error))
        str(error).encode()


async def test_a_key_that_is_quoted_is_known_again() -> None:
    key = "it's-a-\\key"
    async with vllm_engine(key=key, limits={"key": key}, faults=Faults(finish_reason=key)) as (engine, _):
        _, error = await part_of(engine, call())
        assert 'finish_reason "(key)"' in str(error)


async def test_other_answers_of_a_server_are_repeated_without_the_key_too() -> None:
    app = web.Application()

    async def odd(request: web.Request) -> web.Response:
        del request
        return web.Response(text="{", headers={"Content-Type": f"text/{KEY}"})

    app.router.add_get("/v1/models", odd)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = Upstream(f"http://127.0.0.1:{runner.addresses[0][1]}", key=KEY)
    with pytest.raises(EngineError, match=r"content type 'text/\(key\)'"):
        await only_model(upstream)
    await upstream.close()
    await runner.cleanup()


async def test_a_redirect_is_not_followed() -> None:
    async with running_upstream() as target:
        app = web.Application()

        async def away(request: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(f"{target.url}{request.path}")

        app.router.add_route("*", "/{path:.*}", away)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        upstream = Upstream(f"http://127.0.0.1:{runner.addresses[0][1]}")
        _, error = await part_of(OpenAIEngine(upstream, model="tiny", replica="r"), call())
        await upstream.close()
        await runner.cleanup()
        assert "redirects, which is not followed" in str(error)
        assert target.bodies == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"reset_after": 4}, "the connection broke"),
        ({"end_after": 4}, "without '\\[DONE\\]'"),
        ({"garbage_after": 4}, "sent '{broken, the scheduler died'"),
        ({"error_after": 4}, "the scheduler died"),
    ],
)
async def test_a_stream_that_breaks_leaves_its_text_and_an_error(fault: dict[str, int], told: str) -> None:
    async with vllm_engine(faults=Faults(**fault)) as (engine, _):
        with pytest.raises(EngineError, match=told):
            await answer(engine, call(**SAMPLED))
        fold, error = await part_of(engine, call(**SAMPLED))
        assert error.http_status == 502
        (choice,) = fold.choices()
        assert (choice.token_exact, choice.token_ids, choice.logprobs) == (False, (), ())  # never confirmed
        assert (choice.finish_reason, len(choice.text)) == (FinishReason.CANCELLED, 4)
        assert fold.prompt_token_ids


async def test_a_server_that_says_nothing_more_times_out() -> None:
    async with vllm_engine(limits={"read_timeout_s": 0.2}, faults=Faults(hold_after=3)) as (engine, server):
        fold, error = await part_of(engine, call(**SAMPLED))
        assert (type(error), error.http_status) == (EngineTimeoutError, 504)
        assert "engine.read_timeout_s" in str(error)
        (choice,) = fold.choices()
        assert (len(choice.text), choice.token_ids) == (3, ())
        await until(lambda: server.cancelled == 1)


async def test_what_is_no_stream_of_events_is_refused() -> None:
    async with openai_engine(faults=Faults(content_type="text/html")) as (engine, _):
        fold, error = await part_of(engine, call())
        assert "content type 'text/html'; 'text/event-stream' is expected" in str(error)
        assert fold.choices() == ()


async def test_an_answer_that_was_aborted_is_no_answer() -> None:
    async with vllm_engine(faults=Faults(finish_reason="abort")) as (engine, _):
        _, error = await part_of(engine, call())
        assert "finish_reason 'abort'" in str(error)


@pytest.mark.parametrize("faults", [Faults(lose_token=2), Faults(usage=False)])
async def test_tokens_that_the_servers_own_count_does_not_confirm_are_not_kept(faults: Faults) -> None:
    async with vllm_engine(faults=faults) as (engine, _):
        _, (choice,) = await answer(engine, call(**SAMPLED))
        assert choice.text
        assert (choice.token_exact, choice.token_ids, choice.logprobs) == (False, (), ())


async def test_every_setting_is_spelled_out_for_vllm() -> None:
    async with vllm_engine() as (engine, server):
        await answer(engine, call(temperature=0.7))
        told = {name: server.body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        assert told == {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert "response_format" not in server.body
        await answer(engine, call(json_schema='{"type":"object","properties":{"z":{},"a":{}}}'))
        schema = {"type": "object", "properties": {"z": {}, "a": {}}}
        assert server.body["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }


@pytest.mark.parametrize(("raw", "temperature", "known"), [(True, 1.0, True), (True, 0.7, False), (False, 0.7, True)])
async def test_raw_logprobs_describe_only_temperature_one(raw: bool, temperature: float, known: bool) -> None:
    async with vllm_engine(raw_logprobs=raw) as (engine, _):
        request = call(max_tokens=9, temperature=temperature, seed=1)
        fold = GenerationFold()
        async for event in engine.generate(request):
            fold.add(event)
        assert fold.as_sampled(request.sampling).unfiltered is known


async def test_base_weights_under_an_adapters_name_are_caught(model_dir: Path, tmp_path: Path) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        for name, seed in (("old", 1), ("new", 2)):
            await engine.load(write_adapter(tmp_path / name, model_dir, seed=seed))
        assert (await engine.probe("new", against="old", prompts=PROMPTS)).max_logit_difference > 0.1
        kept = server.weights.pop("new")  # the server falls back to its base, which differs from the old adapter
        for against in ("old", None):
            assert (await engine.probe("new", against=against, prompts=PROMPTS)).max_logit_difference == 0.0
        server.weights["new"] = server.weights["old"]  # the old weights under the new name
        assert (await engine.probe("new", against="old", prompts=PROMPTS)).max_logit_difference == 0.0
        server.weights["new"] = kept
        assert (await engine.probe("new", against="old", prompts=PROMPTS)).max_logit_difference > 0.1


async def test_noise_is_no_difference(model_dir: Path, tmp_path: Path) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        server.faults.noise, server.faults.base_for_adapters = 0.01, True
        assert (await engine.probe("a", against=None, prompts=PROMPTS)).max_logit_difference == 0.0
        server.faults.base_for_adapters = False
        assert (await engine.probe("a", against=None, prompts=PROMPTS)).max_logit_difference > 0.1


async def test_files_that_change_behind_the_servers_back_change_the_probes_hash(
    model_dir: Path, tmp_path: Path
) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, _):
        ref = write_adapter(tmp_path / "a", model_dir)
        await engine.load(ref)
        other = write_adapter(tmp_path / "b", model_dir, seed=7)
        (ref.path / "adapter_model.safetensors").write_bytes((other.path / "adapter_model.safetensors").read_bytes())
        assert (await engine.probe("a", against=None, prompts=PROMPTS)).sha256 == other.sha256


async def test_a_restarted_server_has_lost_our_adapters_and_is_not_ready(model_dir: Path, tmp_path: Path) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        ref = write_adapter(tmp_path / "a", model_dir)
        await engine.load(ref)
        server.adapters.clear()
        health = await engine.health()
        assert not health.ready
        assert "has lost ['a']" in health.detail
        assert await engine.list_adapters() == ()
        with pytest.raises(AdapterError, match="has lost adapter 'a'"):
            await answer(engine, call(adapter="a"))
        with pytest.raises(AdapterError, match="does not list 'a'"):
            await engine.probe("a", against=None, prompts=PROMPTS)
        await engine.load(ref)
        assert (await engine.health()).ready
        assert (await engine.probe("a", against=None, prompts=PROMPTS)).max_logit_difference > 0.0
        server.faults.other_root = "/elsewhere"
        with pytest.raises(AdapterError, match="'a' is taken"):
            await engine.load(ref)


async def test_an_adapter_that_is_unloaded_while_health_is_asked_is_not_lost(model_dir: Path, tmp_path: Path) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        server.faults.hold_models = True
        asking = asyncio.create_task(engine.health())
        await until(lambda: server.holding == 1)
        server.faults.hold_models = False
        await engine.unload("a")
        server.go.set()
        assert (await asking).ready


async def test_a_server_that_outlived_us_gives_its_adapter_back(model_dir: Path, tmp_path: Path) -> None:
    ref = write_adapter(tmp_path / "a", model_dir)
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        server.adapters["a"], server.weights["a"] = ref.path.resolve(), b"a"
        await engine.load(ref)
        assert await engine.list_adapters() == (ref,)
        assert server.changes == []
        server.adapters["b"] = Path("/elsewhere")
        with pytest.raises(AdapterError, match=r"'b' is taken on .*from '/elsewhere'"):
            await engine.load(replace(ref, name="b"))
        with pytest.raises(AdapterError, match="'tiny' is taken"):
            await engine.load(replace(ref, name="tiny"))  # the base model's own name
        await engine.unload("b")
        assert "b" in server.adapters  # somebody else's


async def test_an_adapter_that_is_loaded_and_not_listed_is_not_served(model_dir: Path, tmp_path: Path) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir), faults=Faults(forget_adapters=True)) as (engine, _):
        with pytest.raises(EngineError, match="says that it loaded 'a' and does not list it"):
            await engine.load(write_adapter(tmp_path / "a", model_dir))
        assert await engine.list_adapters() == ()


async def test_files_that_change_while_the_server_reads_them_are_not_served(model_dir: Path, tmp_path: Path) -> None:
    def change(path: Path) -> None:
        (path / "tidegate.json").write_text('{"base_sha256": "changed"}')

    async with vllm_engine(base_sha256=base_hash(model_dir), faults=Faults(on_load=change)) as (engine, server):
        with pytest.raises(AdapterError, match="hashes to"):
            await engine.load(write_adapter(tmp_path / "a", model_dir))
        assert await engine.list_adapters() == ()
        assert server.adapters == {}


async def test_an_unload_that_fails_leaves_the_adapter_for_another_try(model_dir: Path, tmp_path: Path) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        ref = write_adapter(tmp_path / "a", model_dir)
        await engine.load(ref)
        server.faults.status = 500
        with pytest.raises(EngineError, match="could not be unloaded"):
            await engine.unload("a")
        assert await engine.list_adapters() == (ref,)
        server.faults.status = None
        await engine.unload("a")
        assert await engine.list_adapters() == ()
        assert server.adapters == {}


async def test_a_server_without_run_time_adapters_says_what_it_needs(model_dir: Path, tmp_path: Path) -> None:
    async with running_upstream(vllm=False) as server:
        upstream = Upstream(server.url)
        engine = VllmEngine(upstream, model="tiny", base_sha256=base_hash(model_dir), replica="r")
        with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            await engine.load(write_adapter(tmp_path / "a", model_dir))
        await upstream.close()


async def test_a_server_that_refuses_to_be_asked_for_tokens_is_asked_without() -> None:
    async with openai_engine() as (engine, server):
        for _ in range(2):
            _, (choice,) = await answer(engine, call())
            assert (choice.token_exact, choice.token_ids) == (False, ())
        assert ["return_token_ids" in body for body in server.bodies] == [True, False, False]


async def test_a_request_that_is_refused_anyway_teaches_nothing() -> None:
    async with openai_engine(vllm=True, model="other") as (engine, server):
        with pytest.raises(RequestError, match="maximum context length"):
            await answer(engine, call("x" * 1000))
        await answer(engine, call())
        assert ["return_token_ids" in body for body in server.bodies] == [True, False, True]


async def test_logprobs_that_are_refused_beside_tools_are_asked_for_without(caplog: pytest.LogCaptureFixture) -> None:
    async with openai_engine(vllm=True, logprobs_beside="tools") as (engine, server):
        for tools in ((CALCULATOR,), (), (CALCULATOR,), ()):
            _, (choice,) = await answer(engine, call(tools=tools, max_tokens=80))
            assert choice.token_exact is not bool(tools)
        assert ["logprobs" in body for body in server.bodies] == [True, False, True, False, True]
        assert [record.message.count("calls with tools") for record in caplog.records] == [1]


async def test_one_call_that_is_refused_with_tokens_does_not_decide_for_a_server_that_gives_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with openai_engine(vllm=True, logprobs_beside="seed") as (engine, server):
        exact: list[bool] = []
        for options in ({}, {"seed": 1}, {"seed": 1}, {}):
            _, (choice,) = await answer(engine, call(**options))
            exact.append(choice.token_exact)
        assert exact == [True, False, False, True]
        assert ["logprobs" in body for body in server.bodies] == [True, True, False, True, False, True]
        assert len(caplog.records) == 1


async def test_sglang_streams_without_token_ids() -> None:
    async with openai_engine(vllm=True, ids_when_streaming=False) as (engine, server):
        _, (choice,) = await answer(engine, call())
        assert not choice.token_exact
        assert "return_token_ids" not in server.body


async def test_a_plain_server_that_gives_tokens_is_recorded_with_them() -> None:
    async with openai_engine(vllm=True) as (engine, _):
        prompt, (choice,) = await answer(engine, call())
        assert prompt
        assert choice.token_exact
        assert len(choice.token_ids) == len(choice.logprobs) == 12


async def test_calls_of_others_go_on_when_one_is_cancelled() -> None:
    async with vllm_engine(faults=Faults(hold_after=2)) as (engine, server):
        async with aclosing(engine.generate(call(max_tokens=9))) as given_up:
            await anext(given_up)
            other = asyncio.create_task(answer(engine, call(max_tokens=9)))
            await until(lambda: server.holding == 2)
        await until(lambda: server.cancelled == 1)
        server.go.set()
        _, (choice,) = await other
        assert len(choice.token_ids) == 9


async def test_the_only_model_is_found_and_several_must_be_named(model_dir: Path, tmp_path: Path) -> None:
    async with vllm_engine(base_sha256=base_hash(model_dir)) as (engine, server):
        await engine.load(write_adapter(tmp_path / "a", model_dir))
        upstream = Upstream(server.url)
        assert await only_model(upstream) == "tiny"  # adapters do not count
        await upstream.close()
    async with running_upstream() as server:
        upstream = Upstream(f"{server.url}/elsewhere")
        with pytest.raises(EngineError, match="404"):
            await only_model(upstream)
        await upstream.close()
    app = web.Application()

    async def two(request: web.Request) -> web.Response:
        del request
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    app.router.add_get("/v1/models", two)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = Upstream(f"http://127.0.0.1:{runner.addresses[0][1]}")
    with pytest.raises(ConfigError, match=r"lists 2 models \('a', 'b'\); name one with engine.model"):
        await only_model(upstream)
    await upstream.close()
    await runner.cleanup()
