"""Simulated users against a small real server that speaks the routes they use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from tidegate.core.errors import ConfigError
from tidegate.core.types import Sampling, Task
from tidegate.signals import builtin_environments, builtin_verifiers
from tidegate.signals.tasks import expert_answer, generate_tasks
from tidegate.simulate import (
    ArrivalOptions,
    EpisodeResult,
    FeedbackOptions,
    PlayOptions,
    SimulationReport,
    simulate,
)

Handler = Callable[["Server", dict[str, Any], web.Request], Any]


@dataclass
class Server:
    """Answers with what ``handler`` gives (a message, or a whole response) and remembers what it was asked."""

    handler: Handler
    port: int = 0
    requests: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    feedback: list[dict[str, Any]] = field(default_factory=list)
    feedback_status: int = 200
    together: int = 0
    most_together: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((body, dict(request.headers)))
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            answer = self.handler(self, body, request)
            answer = await answer if asyncio.iscoroutine(answer) else answer
            if isinstance(answer, web.StreamResponse):
                return answer
            return await (_stream if body.get("stream") else _whole)(request, answer)
        finally:
            self.together -= 1

    async def take_feedback(self, request: web.Request) -> web.Response:
        self.feedback.append(await request.json())
        return web.json_response({"feedback_id": "fb-1"}, status=self.feedback_status)


HEADERS = {"x-tidegate-release": "r-7"}


def _finish(message: dict[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


async def _whole(_: web.Request, message: dict[str, Any]) -> web.Response:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": _finish(message)}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }
    return web.json_response(body, headers=HEADERS)


def _chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(body)}\n\n".encode()


async def _stream(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    """The message in small pieces: letters of the text, and name and arguments of a call apart."""
    response = web.StreamResponse(headers={**HEADERS, "content-type": "text/event-stream"})
    await response.prepare(request)
    for letter in message.get("content") or "":
        await response.write(_chunk({"content": letter}))
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        opening = {"name": function["name"], "arguments": ""}
        await response.write(_chunk({"tool_calls": [{"index": index, "id": call["id"], "function": opening}]}))
        for letter in function["arguments"]:
            await response.write(_chunk({"tool_calls": [{"index": index, "function": {"arguments": letter}}]}))
    await response.write(_chunk({}, _finish(message)))
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    last = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": []}
    await response.write(f"data: {json.dumps({**last, 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    return response


def expert(_: Server, body: dict[str, Any], __: web.Request) -> dict[str, Any]:
    """Does what the calculator tasks' expert does: first the tool call, then its result."""
    messages = body["messages"]
    if messages[-1]["role"] == "tool":
        return {"content": messages[-1]["content"]}
    task = next(t for t in TASKS if t.messages[-1]["content"] == messages[-1]["content"])
    answer = expert_answer(task)
    assert answer is not None
    return dict(answer[0])


def says(text: str) -> Handler:
    return lambda *_: {"content": text}


TASKS = [*generate_tasks("chain_sum", 6, 0), *generate_tasks("leg_counting", 6, 0)]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Any]]:
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> Server:
        server = Server(handler=handler)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.chat)
        app.router.add_post("/v1/feedback", server.take_feedback)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        return server

    yield start
    for runner in runners:
        await runner.cleanup()


async def play(
    server: Server, tasks: Any = None, *, arrivals: ArrivalOptions | None = None, **options: Any
) -> tuple[SimulationReport, list[EpisodeResult]]:
    seen: list[EpisodeResult] = []
    settings: dict[str, Any] = {
        "base_url": server.url,
        "arrivals": arrivals or ArrivalOptions(session="s", concurrency=4),
        "environments": builtin_environments(),
        "verifiers": builtin_verifiers(),
        "on_episode": seen.append,
    }
    return await simulate(TASKS if tasks is None else tasks, **(settings | options)), seen


@pytest.mark.parametrize("stream_share", [0.0, 1.0, 0.5])
async def test_simulate_plays_episodes_to_their_end(serve: Any, stream_share: float) -> None:
    server = await serve(expert)
    report, seen = await play(server, play=PlayOptions(stream_share=stream_share))
    assert (report.overall.episodes, report.overall.passed, report.requests) == (12, 12, 24)
    assert {kind: share.passed for kind, share in report.by_kind.items()} == {"chain_sum": 6, "leg_counting": 6}
    assert report.by_release["r-7"].rate == 1.0
    assert (report.failures, report.failed_requests, report.releases) == ({}, {}, {"r-7": 24})
    assert report.completion_tokens == 24 * 5
    assert list(report.latency_s) == ["p50", "p90", "p99"]
    streamed = sum(call.streamed for result in seen for call in result.calls)
    assert streamed == sum(bool(body.get("stream")) for body, _ in server.requests)
    assert streamed == {0.0: 0, 1.0: 24}.get(stream_share, streamed)
    assert 0 < streamed < 24 or stream_share != 0.5
    assert json.loads(json.dumps(report.to_json()))["by_kind"]["chain_sum"] == {"episodes": 6, "passed": 6, "rate": 1.0}
    for result in seen:
        assert [message["role"] for message in result.messages] == ["assistant", "tool", "assistant"]
        assert [call.interaction_id for call in result.calls] == ["chatcmpl-1", "chatcmpl-1"]


async def test_simulate_requests_carry_identity_task_and_sampling(serve: Any) -> None:
    server = await serve(expert)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=3, max_tokens=17, seed=100, stop=("x",), presence_penalty=0.1)
    await play(
        server,
        TASKS[:2],
        arrivals=ArrivalOptions(session="run", concurrency=1, first_index=5),
        play=PlayOptions(model="m", sampling=sampling, max_calls=4),
        api_key="secret",
    )
    bodies = [body for body, _ in server.requests]
    headers = [{name.lower(): value for name, value in headers.items()} for _, headers in server.requests]
    assert [head["x-tidegate-episode"] for head in headers] == ["run-5", "run-5", "run-6", "run-6"]
    assert [head["x-tidegate-user"] for head in headers] == ["run-user-5"] * 2 + ["run-user-6"] * 2
    assert {head["authorization"] for head in headers} == {"Bearer secret"}
    assert bodies[0]["metadata"] == {
        "tidegate_verifier": "reasoning_gym",
        "tidegate_reference": json.dumps(TASKS[0].reference),
        "tidegate_kind": "chain_sum",
        "tidegate_environment": "calculator",
    }
    assert "metadata" not in bodies[1]
    assert bodies[0]["messages"] == list(TASKS[0].messages)
    assert bodies[0]["tools"] == bodies[1]["tools"] == list(TASKS[0].tools)
    assert [body["seed"] for body in bodies] == [120, 121, 124, 125]
    assert {name: bodies[0][name] for name in ("model", "temperature", "top_p", "top_k", "max_tokens", "stop")} == {
        "model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 17, "stop": ["x"],
    }  # fmt: skip
    assert bodies[0]["presence_penalty"] == 0.1
    assert "frequency_penalty" not in bodies[0]


async def test_simulate_users_ask_once_for_the_tasks_call(serve: Any) -> None:
    server = await serve(expert)
    await play(server, [replace(TASKS[0], tool_choice="calculator")])
    named = {"type": "function", "function": {"name": "calculator"}}
    assert [body.get("tool_choice") for body, _ in server.requests] == [named, None]


async def test_simulate_users_ask_for_the_tasks_schema(serve: Any) -> None:
    schema = '{"type":"object","properties":{"z":{},"a":{}}}'
    task = Task(
        id="t", messages=({"role": "user", "content": "?"},), verifier="exact_text", reference="1", json_schema=schema
    )
    server = await serve(lambda *_: {"content": "1"})
    await play(server, [task])
    sent = server.requests[0][0]["response_format"]
    assert sent["type"] == "json_schema"
    assert json.dumps(sent["json_schema"]["schema"], separators=(",", ":")) == schema


async def test_simulate_a_task_without_environment_ends_at_its_tool_call(serve: Any) -> None:
    task = Task(
        id="bfcl",
        messages=({"role": "user", "content": "?"},),
        tools=TASKS[0].tools,
        verifier="tool_call",
        reference=[{"calculator": {"expression": ["1+1"]}}],
    )
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}
    server = await serve(lambda *_: {"content": None, "tool_calls": [call]})
    report, _ = await play(server, [task])
    assert (report.overall.passed, report.requests) == (1, 1)
    assert "tidegate_environment" not in server.requests[0][0]["metadata"]


@pytest.mark.parametrize(
    ("text", "reason"), [("", "no_reply"), ("no idea", "wrong"), ("<tool_call>{", "invalid_tool_call")]
)
@pytest.mark.parametrize("stream_share", [0.0, 1.0])
async def test_simulate_wrong_answers_fail_by_reason(serve: Any, text: str, reason: str, stream_share: float) -> None:
    server = await serve(says(text))
    report, seen = await play(server, TASKS[:3], play=PlayOptions(stream_share=stream_share))
    assert (report.overall.passed, report.failures, report.failed_requests) == (0, {reason: 3}, {})
    assert not any(result.request_failed for result in seen)


# --- failed requests ----------------------------------------------------------------------------------------


def _error(status: int) -> Handler:
    return lambda *_: web.json_response({"error": {"message": "no", "type": "x", "code": "y"}}, status=status)


async def _broken_stream(_: Server, __: dict[str, Any], request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(_chunk({"content": "4"}))
    assert request.transport is not None
    request.transport.abort()
    return response


async def _unfinished_stream(_: Server, __: dict[str, Any], request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(_chunk({"content": "4"}) + b"data: [DONE]\n\n")
    return response


async def _error_in_stream(_: Server, __: dict[str, Any], request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(_chunk({"content": "4"}) + b'data: {"error": {"message": "engine died"}}\n\n')
    return response


async def _garbled_stream(_: Server, __: dict[str, Any], request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: {nonsense\n\n")
    return response


FAILURES: dict[str, tuple[Handler, float, str]] = {
    "busy": (_error(503), 0.0, "http_503"),
    "limited": (_error(429), 1.0, "http_429"),
    "refused": (_error(400), 0.0, "http_400"),
    "web page": (lambda *_: web.Response(text="<html>", content_type="text/html"), 0.0, "malformed_response"),
    "no JSON": (lambda *_: web.Response(text="{", content_type="application/json"), 0.0, "malformed_response"),
    "no choices": (lambda *_: web.json_response({"id": "x", "choices": []}), 0.0, "malformed_response"),
    "no message": (lambda *_: web.json_response({"id": "x", "choices": [{}]}), 0.0, "malformed_response"),
    "connection lost": (_broken_stream, 1.0, "connection"),
    "no end": (_unfinished_stream, 1.0, "incomplete_stream"),
    "error in stream": (_error_in_stream, 1.0, "stream_error"),
    "garbled stream": (_garbled_stream, 1.0, "malformed_response"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_simulate_failed_requests_are_counted_and_never_retried(serve: Any, case: str) -> None:
    handler, stream_share, failure = FAILURES[case]
    server = await serve(handler)
    thumbs = FeedbackOptions(thumbs=True, expert=expert_answer, demonstrate_kinds=frozenset({"chain_sum"}),
                             demonstrate_count=9)  # fmt: skip
    report, seen = await play(server, TASKS[:3], play=PlayOptions(stream_share=stream_share, feedback=thumbs))
    assert report.failed_requests == report.failures == {failure: 3}
    assert (report.overall.episodes, report.overall.passed, report.requests) == (3, 0, 3)
    assert len(server.requests) == 3
    assert (report.releases, report.latency_s) == ({}, {})
    assert all(result.request_failed and result.calls[0].error for result in seen)
    assert server.feedback == []


async def test_simulate_an_unreachable_server_and_a_slow_one_are_failed_requests(serve: Any) -> None:
    server = await serve(expert)
    never = asyncio.Event()

    async def hang(*_: Any) -> dict[str, Any]:
        await never.wait()
        return {}

    server.handler = hang
    report, _ = await play(server, TASKS[:2], timeout_s=0.2)
    assert report.failed_requests == {"timeout": 2}
    never.set()
    report, _ = await play(replace(server, port=1), TASKS[:2])
    assert report.failed_requests == {"connection": 2}


async def test_simulate_a_failure_in_the_second_call_fails_the_episode(serve: Any) -> None:
    def half(server: Server, body: dict[str, Any], request: web.Request) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return web.json_response({"error": {"message": "no"}}, status=500)
        return expert(server, body, request)

    report, seen = await play(await serve(half), TASKS[:1])
    assert (report.requests, report.failed_requests, report.releases) == (2, {"http_500": 1}, {"r-7": 1})
    assert (seen[0].reason, seen[0].release) == ("http_500", "r-7")


# --- arrivals -----------------------------------------------------------------------------------------------


async def test_simulate_users_may_come_again(serve: Any) -> None:
    server = await serve(says("1"))
    _, seen = await play(server, arrivals=ArrivalOptions(session="s", users=3, concurrency=1))
    assert [result.user for result in seen] == ["user-0", "user-1", "user-2"] * 4
    assert len({result.episode_id for result in seen}) == 12


async def test_simulate_keeps_to_its_concurrency_and_uses_it(serve: Any) -> None:
    server = await serve(says("1"))
    full = asyncio.Event()

    async def gather(server: Server, *_: Any) -> dict[str, Any]:
        if server.together == 3:
            full.set()
        await full.wait()
        return {"content": "1"}

    server.handler = gather
    await play(server, arrivals=ArrivalOptions(session="s", concurrency=3))
    assert server.most_together == 3


async def test_simulate_arrivals_wait_until_they_are_due(serve: Any) -> None:
    server = await serve(says("1"))
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    stop = asyncio.Event()
    # The second episode is due in about 100 days; the end of the first one ends the simulation.
    report, _ = await play(
        server,
        arrivals=ArrivalOptions(session="s", rate_per_s=1e-7),
        clock=clock,
        stop=stop,
        on_episode=lambda _: stop.set(),
    )
    assert (report.overall.episodes, report.stopped_early) == (1, True)


async def test_simulate_stops_when_told_and_plays_on_what_began(serve: Any) -> None:
    stop = asyncio.Event()

    def endless() -> Any:
        while True:
            yield TASKS[0]

    def until_five(server: Server, body: dict[str, Any], request: web.Request) -> Any:
        if len(server.requests) >= 5:
            stop.set()
        return expert(server, body, request)

    report, seen = await play(await serve(until_five), endless(), stop=stop)
    assert report.stopped_early
    assert report.overall.passed == report.overall.episodes == len(seen)
    assert 2 <= len(seen) <= 8


def _running_since(before: set[asyncio.Task[Any]]) -> set[str]:
    return {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks() - before if not task.done()}


async def test_simulate_cancelled_leaves_nothing_running(serve: Any) -> None:
    never, full = asyncio.Event(), asyncio.Event()

    async def hang(server: Server, *_: Any) -> dict[str, Any]:
        if len(server.requests) == 4:
            full.set()
        await never.wait()
        return {}

    server = await serve(hang)
    before = asyncio.all_tasks()
    running = asyncio.create_task(play(server))
    async with asyncio.timeout(20):
        await full.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    left = _running_since(before)
    never.set()
    assert not any("work" in name or "simulate" in name for name in left)


async def test_simulate_what_a_callback_raises_ends_the_simulation(serve: Any) -> None:
    never = asyncio.Event()

    async def answer_once(server: Server, *_: Any) -> dict[str, Any]:
        if len(server.requests) > 1:
            await never.wait()
        return {"content": "1"}

    def fail(_: EpisodeResult) -> None:
        raise RuntimeError("full disk")

    before = asyncio.all_tasks()
    with pytest.raises(RuntimeError, match="full disk"):
        await play(await serve(answer_once), on_episode=fail)
    left = _running_since(before)
    never.set()
    assert not any("work" in name for name in left)


# --- feedback -----------------------------------------------------------------------------------------------


async def test_simulate_demonstrates_failed_episodes_of_the_kind_up_to_the_count(serve: Any) -> None:
    server = await serve(says("no idea"))
    feedback = FeedbackOptions(expert=expert_answer, demonstrate_kinds=frozenset({"leg_counting"}), demonstrate_count=4)
    report, seen = await play(server, play=PlayOptions(feedback=feedback))
    assert report.feedback == {"demonstration": 4}
    shown = {result.episode_id: result.task_id for result in seen if result.feedback}
    tasks = {task.id: task for task in TASKS}
    assert {body["episode_id"] for body in server.feedback} == set(shown)
    for body in server.feedback:
        task = tasks[shown[body["episode_id"]]]
        assert task.kind == "leg_counting"
        assert body["metric_name"] == "demonstration"
        assert tuple(body["value"]) == expert_answer(task)


async def test_simulate_does_not_demonstrate_what_passed_or_has_no_expert(serve: Any) -> None:
    kinds = frozenset({"leg_counting", "chain_sum"})
    for handler, expert_of in ((expert, expert_answer), (says("?"), lambda _: None), (says("?"), None)):
        server = await serve(handler)
        feedback = FeedbackOptions(expert=expert_of, demonstrate_kinds=kinds, demonstrate_count=9)
        report, _ = await play(server, play=PlayOptions(feedback=feedback))
        assert (report.feedback, server.feedback) == ({}, [])


async def test_simulate_thumbs_say_whether_the_episode_passed(serve: Any) -> None:
    for handler, thumb in ((expert, True), (says("?"), False)):
        server = await serve(handler)
        report, _ = await play(server, TASKS[:2], play=PlayOptions(feedback=FeedbackOptions(thumbs=True)))
        assert report.feedback == {"thumbs": 2}
        assert [(body["metric_name"], body["value"]) for body in server.feedback] == [("thumbs", thumb)] * 2


async def test_simulate_feedback_that_fails_is_counted_and_may_be_made_up_for(serve: Any) -> None:
    server = await serve(says("?"))
    server.feedback_status = 500
    feedback = FeedbackOptions(expert=expert_answer, demonstrate_kinds=frozenset({"chain_sum"}), demonstrate_count=1)
    report, _ = await play(server, play=PlayOptions(feedback=feedback))
    assert (report.feedback, report.failed_requests) == ({}, {})
    assert report.feedback_failures["http_500"] >= 2


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"session": " "}, "session = ' ' is not usable"),
        ({"session": "\u00e9"}, "session = 'é' is not usable"),
        ({"users": 0}, "users = 0 is not usable"),
        ({"concurrency": 0}, "concurrency = 0 is not usable"),
        ({"rate_per_s": 0}, "rate_per_s = 0 is not usable"),
    ],
)
def test_simulate_refuses_impossible_arrivals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ArrivalOptions(**{"session": "s", **changes})


async def test_simulate_refuses_urls_and_tasks_that_it_cannot_use(serve: Any) -> None:
    server = await serve(expert)
    with pytest.raises(ConfigError, match="base URL 'localhost:80' is not usable"):
        await play(server, base_url="localhost:80")
    for changes, message in (
        ({"verifier": "oracle"}, "names verifier 'oracle'; accepted: "),
        ({"environment": "shell"}, "names environment 'shell'; accepted: "),
    ):
        with pytest.raises(ConfigError, match=message):
            await play(server, [replace(TASKS[0], **changes)])
    assert server.requests == []


async def test_simulate_completes_a_base_url_without_its_version(serve: Any) -> None:
    server = await serve(expert)
    report, _ = await play(server, TASKS[:1], base_url=f"http://127.0.0.1:{server.port}/")
    assert report.overall.passed == 1


async def test_simulate_reaches_a_loopback_server_past_a_proxy(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    report, _ = await play(await serve(expert), TASKS[:1])
    assert report.overall.passed == 1
