"""Every failure has OpenAI's shape, says what is accepted, and carries a request id."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AuthenticationError

from gateway_world import BASE_RELEASE, CALCULATOR, MODEL, World, ask, running_world
from tidegate.config.settings import ServerSettings
from tidegate.core.errors import ConfigError, EngineBusyError, EngineError, EngineTimeoutError, RequestError
from tidegate.gateway import create_gateway

USER = {"role": "user", "content": "hi"}


def check_shape(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["code"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "model", "'model' is missing"),
        ({"model": 5, "messages": [USER]}, "model", "'model' is 5: input should be a valid string"),
        ({"model": "", "messages": [USER]}, "model", "at least 1 character"),
        ({"model": MODEL}, "messages", "'messages' is missing"),
        ({"model": MODEL, "messages": []}, "messages", "at least 1 item"),
        ({"model": MODEL, "messages": "hi"}, "messages", "valid list"),
        ({"model": MODEL, "messages": ["hi"]}, "messages.0", "'hi'"),
        (
            {"model": MODEL, "messages": [{"role": "king", "content": "x"}]},
            "messages.0.role",
            "'king': input should be",
        ),
        ({"model": MODEL, "messages": [{"content": "x"}]}, "messages.0.role", "missing"),
        ({"model": MODEL, "messages": [{"role": "user"}]}, "messages.0", "no content"),
        ({"model": MODEL, "messages": [{"role": "user", "content": 5}]}, "messages.0.content", "list of parts"),
        (
            {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
            "not supported by this engine; send parts",
        ),
        ({"model": MODEL, "messages": [{"role": "tool", "content": "4"}]}, "messages.0", "tool_call_id"),
        (
            {
                "model": MODEL,
                "messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}],
            },
            "messages.0.tool_calls.0.function.arguments",
            "missing",
        ),
        (ask(tools=[{"type": "function"}]), "tools.0.function", "missing"),
        (ask(tools=[{"type": "custom", "custom": {}}]), "tools.0.type", "'function'"),
        (ask(tools=[{"type": "function", "function": {"name": "two words"}}]), "tools.0.function.name", "two words"),
        (ask(tools=[CALCULATOR, CALCULATOR]), None, "'calculator' twice"),
        (
            ask(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]),
            "tools.0.function.parameters.properties",
            "dictionary",
        ),
        (
            ask(
                tools=[
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": 5}}}}}
                ]
            ),
            "tools.0.function.parameters.properties",
            "list of values",
        ),
        (ask(temperature=-1), "temperature", "-1: input should be greater than or equal to 0"),
        (ask(temperature="hot"), "temperature", "'hot'"),
        (ask(top_p=0), "top_p", "greater than 0"),
        (ask(top_k=-2), "top_k", "-2"),
        (ask(max_tokens=0), "max_tokens", "greater than or equal to 1"),
        (ask(max_tokens=True), "max_tokens", "valid integer"),
        (ask(n=0), "n", "greater than or equal to 1"),
        (ask(n=129), "n", "less than or equal to 128"),
        (ask(seed=1 << 63), "seed", "less than"),
        (ask(stop=[""]), "stop", "non-empty"),
        (ask(stop=["x"] * 17), "stop", "up to 16"),
        (ask(stop=5), "stop", "non-empty string"),
        (ask(logprobs=True, top_logprobs=21), "top_logprobs", "less than or equal to 20"),
        (ask(top_logprobs=2), None, "needs 'logprobs': true"),
        (ask(presence_penalty=3), "presence_penalty", "less than or equal to 2"),
        (ask(stream="yes"), "stream", "valid boolean"),
        (ask(stream_options=5), "stream_options", "5"),
        (ask(metadata={"a": 1}), "metadata.a", "valid string"),
        (ask(metadata={"tidegate_line": "third"}), "metadata.tidegate_line", "choose one of 'main', 'side'"),
        (ask(metadata={"tidegate_episode": "a b"}), "metadata.tidegate_episode", "printable ASCII"),
        (ask(metadata={"tidegate_episode": "x" * 201}), "metadata.tidegate_episode", "1 to 200"),
        (ask(user="x" * 513), "user", "at most 512"),
        (ask(metadata={"tidegate_verifier": "numeric"}), "metadata.tidegate_reference", "needs both"),
        (ask(metadata={"tidegate_reference": "4"}), "metadata.tidegate_verifier", "needs both"),
        (ask(metadata={"tidegate_verifier": "gut", "tidegate_reference": "4"}), None, "'gut' is unknown"),
    ],
)
async def test_bad_fields_are_named(body: dict[str, Any], param: str | None, told: str) -> None:
    world = World()
    status, headers, answer = await world.direct("/v1/chat/completions", json.dumps(body).encode())
    error = check_shape(json.loads(answer))
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_request"
    assert error["param"] == param
    assert told in error["message"]
    assert headers["x-request-id"]
    assert not world.engine.requests
    assert not world.recorder.interactions


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not JSON in UTF-8"),
        (b"{", "not JSON in UTF-8"),
        (b"[]", "JSON list"),
        (b"null", "JSON NoneType"),
        (b'{"model": "\xff"}', "not JSON in UTF-8"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON in UTF-8"),
        (b'{"temperature": NaN}', "not JSON in UTF-8"),
        (b'{"temperature": 1e999}', "not JSON in UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON in UTF-8"),
        (b'{"a":' * 100_000, "not JSON in UTF-8"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback"])
async def test_bodies_that_are_no_json_object(path: str, data: bytes, told: str) -> None:
    status, _, body = await World().direct(path, data)
    assert status == 400
    assert told in check_shape(json.loads(body))["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_content_types_are_415(world: World, content_type: str) -> None:
    status, _, body = await world.call(
        "POST", "/v1/chat/completions", data=json.dumps(ask()), headers={"content-type": content_type}
    )
    assert status == 415
    error = check_shape(body)
    assert error["code"] == "media_type_unsupported"
    assert "application/json" in error["message"]


async def test_compressed_bodies_are_415(world: World) -> None:
    status, _, body = await world.call(
        "POST",
        "/v1/chat/completions",
        data=b"xx",
        headers={"content-type": "application/json; charset=utf-8", "content-encoding": "gzip"},
    )
    assert status == 415
    assert "'gzip'" in check_shape(body)["message"]


async def test_a_declared_body_over_the_limit_is_413_unread() -> None:
    async with running_world(settings=ServerSettings(max_body_bytes=500)) as world:
        status, _, _ = await world.post(ask("x" * 300))
        assert status == 200
        status, _, body = await world.post(ask("x" * 600))
        assert status == 413
        error = check_shape(body)
        assert error["code"] == "body_too_large"
        assert "at most 500" in error["message"]


async def test_a_chunked_body_over_the_limit_is_413_before_it_ends() -> None:
    async with running_world(settings=ServerSettings(max_body_bytes=500)) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(3):  # 600 bytes, and no last chunk
            writer.write(b"c8\r\n" + b"x" * 200 + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_does_not_arrive_ends_the_request() -> None:
    async with running_world(settings=ServerSettings(request_timeout_s=0.05)) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/chat", 404),
        ("POST", "/v1/completions", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/feedback", 405),
        ("GET", "/v1/models/unknown", 404),
    ],
)
async def test_routes_and_methods(world: World, method: str, path: str, expected: int) -> None:
    status, headers, body = await world.call(method, path)
    assert status == expected
    check_shape(body)
    assert headers["x-request-id"]
    if status == 405:
        assert headers["allow"]


async def test_request_ids_are_echoed_when_they_are_sane(world: World) -> None:
    _, headers, _ = await world.post(ask(), x_request_id="trace-42.a:b")
    assert headers["x-request-id"] == "trace-42.a:b"
    _, headers, _ = await world.post(ask(), x_request_id="no spaces or <html>")
    assert headers["x-request-id"].startswith("req-")
    _, headers, _ = await world.post(ask(), x_request_id="x" * 129)
    assert headers["x-request-id"].startswith("req-")


async def test_keys_are_required_once_configured() -> None:
    settings = ServerSettings(host="0.0.0.0", api_keys=("right", "also-right"))  # noqa: S104
    async with running_world(settings=settings) as world:
        for key in ("right", "also-right"):
            async with world.client(api_key=key) as client:
                assert (await client.chat.completions.create(**ask())).choices
        async with world.client(api_key="wrong") as client:
            with pytest.raises(AuthenticationError, match="is not known") as caught:
                await client.chat.completions.create(**ask())
        assert "wrong" not in str(caught.value.message).replace("is not known", "")
        for headers in ({}, {"authorization": "right"}, {"authorization": "Basic right"}, {"authorization": "Bearer "}):
            status, answer_headers, body = await world.call("GET", "/v1/models", headers=headers)
            assert status == 401
            error = check_shape(body)
            assert error["type"] == "authentication_error"
            assert "is missing" in error["message"]
            assert answer_headers["www-authenticate"] == "Bearer"
            assert answer_headers["x-request-id"]
        for path in ("/healthz", "/readyz", "/metrics"):
            status, _, _ = await world.call("GET", path)
            assert status == 200


def test_an_open_server_listens_on_loopback_only() -> None:
    for host in ("0.0.0.0", "10.0.0.5", "example.org", "::"):  # noqa: S104
        with pytest.raises(ConfigError, match=r"server\.api_keys is empty.*set server\.api_keys"):
            create_gateway(World().deps, ServerSettings(host=host))
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        create_gateway(World().deps, ServerSettings(host=host))


@pytest.mark.parametrize(
    ("failure", "failed"),
    [
        (None, False),
        (EngineError("the engine broke"), True),
        (EngineTimeoutError("the engine is slow"), True),
        (EngineBusyError("the queue is full"), False),
        (RequestError("the template refuses these messages"), False),
    ],
)
async def test_who_watches_is_told_which_calls_the_engine_failed(
    world: World, failure: Exception | None, failed: bool
) -> None:
    told: list[tuple[str, str, bool]] = []
    object.__setattr__(world.deps, "observe_call", lambda *call: told.append(call))
    if failure is not None:
        world.engine.fail_at, world.engine.failure = 0, failure
    await world.post(ask("hi", user="kim"))
    assert told == [(BASE_RELEASE, "key-of-kim", failed)]
