"""A real HTTP server with OpenAI's API over :mod:`upstream_model`: vLLM's dialect or plain, with faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from tidegate.artifacts import WEIGHTS_FILE
from upstream_model import END, Drawn, draw, log_probabilities, render, stated_of, token_text

OWN_FIELDS = frozenset(
    {
        "model", "messages", "tools", "tool_choice", "stream", "stream_options", "temperature", "top_p", "max_tokens",
        "n", "seed", "stop", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "response_format",
        "parallel_tool_calls", "service_tier", "max_completion_tokens",
    }
)  # fmt: skip


@dataclass
class Faults:
    """What goes wrong. Numbers count the chunks with tokens that are sent before it does."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "no"
    content_type: str | None = None
    reset_after: int | None = None
    end_after: int | None = None
    garbage_after: int | None = None
    error_after: int | None = None
    dying_words: str = "the scheduler died"
    hold_after: int | None = None
    finish_reason: str | None = None
    contents: Sequence[str] = ()
    lose_token: int | None = None
    usage: bool = True
    base_for_adapters: bool = False
    other_root: str | None = None
    forget_adapters: bool = False
    hold_models: bool = False
    noise: float = 0.0
    on_load: Callable[[Path], object] = lambda path: None


@dataclass
class UpstreamServer:
    """Start it with :func:`running_upstream`.

    Args:
        vllm: whether adapters, token ids and prompt log-probabilities exist. A plain server refuses unknown fields.
        ids_when_streaming: whether ``return_token_ids`` is accepted (SGLang refuses it for streams).
        strict: a plain server that refuses fields that it does not know, as OpenAI's own does.
        logprobs_beside: a field beside which log-probabilities are refused.
        raw_logprobs: log-probabilities are those of temperature 1.
        script: what it answers instead of sampling; greedy calls of tools are scripted anyway.
        pace_s: time that it takes for each chunk with a token.
    """

    vllm: bool = True
    ids_when_streaming: bool = True
    strict: bool = True
    logprobs_beside: str | None = None
    raw_logprobs: bool = True
    model: str = "tiny"
    max_context: int = 512
    key: str | None = None
    script: str | None = None
    pace_s: float = 0.0
    faults: Faults = field(default_factory=Faults)
    adapters: dict[str, Path] = field(default_factory=dict)
    weights: dict[str, bytes] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    changes: list[tuple[str, str]] = field(default_factory=list)
    holding: int = 0
    cancelled: int = 0
    answered: int = 0
    scored: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.vllm:
            app.router.add_get("/health", self._health)
            app.router.add_post("/v1/completions", self._completions)
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        return app

    @property
    def body(self) -> dict[str, Any]:
        """The last chat request."""
        return self.bodies[-1]

    def weights_of(self, model: str) -> bytes | None:
        return None if self.faults.base_for_adapters else self.weights.get(model)

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=self.faults.status or 200)

    async def _models(self, request: web.Request) -> web.Response:
        refused = self._unauthorised(request)
        if refused is not None:
            return refused
        if self.faults.hold_models:
            self.holding += 1
            await self.go.wait()
            self.holding -= 1
        shown = {} if self.faults.forget_adapters else self.adapters
        found: list[dict[str, Any]] = [{"id": self.model, "object": "model", "root": "/models/tiny", "parent": None}]
        for name, path in shown.items():
            found.append(
                {"id": name, "object": "model", "root": self.faults.other_root or str(path), "parent": self.model}
            )
        return web.json_response({"object": "list", "data": found})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        self.changes.append(("load", name))
        if name in self.adapters:
            return problem(400, f"The lora adapter '{name}' has already been loaded.")
        weights = path / WEIGHTS_FILE
        if not weights.is_file():
            return problem(404, f"No adapter found for {path}: it does not exist")
        self.faults.on_load(path)
        self.adapters[name], self.weights[name] = path, weights.read_bytes()
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.changes.append(("unload", name))
        if self.faults.status is not None:
            return problem(self.faults.status, self.faults.message)
        if self.adapters.pop(name, None) is None:
            return problem(404, f"The lora adapter '{name}' cannot be found.")
        self.weights.pop(name)
        return web.Response(text="Success")

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = body["prompt"]
        if len(tokens) + body["max_tokens"] > self.max_context:
            return too_long(self.max_context, len(tokens))
        if body["model"] not in (self.model, *self.adapters):
            return problem(404, f"The model `{body['model']}` does not exist.")
        self.scored += 1
        moved = self.faults.noise * (self.scored % 3)
        stated: list[Any] = [None]
        for at in range(1, len(tokens)):
            logprobs = log_probabilities(tokens[:at], self.weights_of(body["model"])) - moved
            best = int(logprobs.argmax())
            stated.append({str(one): {"logprob": float(logprobs[one]), "rank": 1} for one in {best, tokens[at]}})
        return web.json_response({"choices": [{"index": 0, "text": "", "prompt_logprobs": stated}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        refused = self._unauthorised(request) or self._refusal(body)
        if refused is not None:
            return refused
        prompt = render(body["messages"], body.get("tools") or [])
        if len(prompt) >= self.max_context:
            return too_long(self.max_context, len(prompt))
        if self.faults.content_type is not None:
            return web.Response(text="<h1>welcome</h1>", content_type=self.faults.content_type)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            whole = await self._answer(request, response, body, prompt)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        if whole:
            await response.write(b"data: [DONE]\n\n")
            self.answered += 1
        return response

    async def _answer(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], prompt: list[int]
    ) -> bool:
        """Send all chunks; False when the stream shall end before its end."""
        with_ids = self.vllm and self.ids_when_streaming and bool(body.get("return_token_ids"))
        head: dict[str, Any] = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        first: dict[str, Any] = {"prompt_token_ids": prompt} if with_ids else {}
        n = body.get("n", 1)
        opening = [{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None} for i in range(n)]
        await write(response, {**head, **first, "choices": opening})
        sampled = 0
        for number, (part, tokens) in enumerate(self._parts(body, prompt)):
            if not await self._go_on(request, response, number):
                return False
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            sampled += tokens
            if number == self.faults.lose_token:
                continue
            shown = part if with_ids else {name: value for name, value in part.items() if name != "token_ids"}
            await write(response, {**head, "choices": [shown]})
        if self.faults.usage and (body.get("stream_options") or {}).get("include_usage"):
            counts = {"prompt_tokens": len(prompt), "completion_tokens": sampled}
            await write(response, {**head, "choices": [], "usage": counts})
        return True

    async def _go_on(self, request: web.Request, response: web.StreamResponse, number: int) -> bool:
        faults = self.faults
        if number == faults.hold_after:
            self.holding += 1
            try:
                await self.go.wait()
            finally:
                self.holding -= 1
        if number == faults.reset_after:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if number == faults.garbage_after:
            await response.write(f"data: {{broken, {faults.dying_words}\n\n".encode())
        if number == faults.error_after:
            await write(response, {"error": {"message": faults.dying_words, "type": "server_error", "code": 500}})
        return number != faults.end_after

    def _parts(self, body: dict[str, Any], prompt: list[int]) -> Iterator[tuple[dict[str, Any], int]]:
        """Chunks of all choices in turns, each with the number of its tokens."""
        choices = [list(self._choice(body, prompt, index)) for index in range(body.get("n", 1))]
        for position in range(max(map(len, choices))):
            for parts in choices:
                if position < len(parts):
                    yield parts[position], len(parts[position]["token_ids"])

    def _choice(self, body: dict[str, Any], prompt: list[int], index: int) -> Iterator[dict[str, Any]]:
        drawn = list(self._drawn(body, prompt, index))
        text = "".join(token_text(one.token) for one in drawn if one.token != END)
        ended = bool(drawn) and drawn[-1].token == END
        stopped = next((at for stop in _stops(body) if (at := text.find(stop)) >= 0), None)
        visible = text if stopped is None else text[:stopped]
        calls = bool(body.get("tools")) and visible.startswith("<tool_call>") and visible.endswith("</tool_call>")
        reason = "tool_calls" if calls else ("stop" if ended or stopped is not None else "length")
        if calls:
            called = json.loads(visible.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            pieces: list[dict[str, Any]] = [{} for _ in drawn]
            arguments = json.dumps(called["arguments"])
            pieces[2] = _call(id=f"call_up{index}", name=called["name"], arguments="")
            pieces[3], pieces[4] = _call(arguments=arguments[:3]), _call(arguments=arguments[3:])
        else:
            shown = self.faults.contents or visible
            pieces = [{"content": shown[at]} if at < len(shown) else {} for at in range(len(drawn))]
        for at, (one, delta) in enumerate(zip(drawn, pieces, strict=True)):
            last = at == len(drawn) - 1
            yield {
                "index": index,
                "delta": delta,
                "token_ids": [one.token],
                "logprobs": {"content": [_entry(one)]} if body.get("logprobs") else None,
                "finish_reason": (self.faults.finish_reason or reason) if last else None,
            }

    def _drawn(self, body: dict[str, Any], prompt: list[int], index: int) -> Iterator[Drawn]:
        weights = self.weights_of(body["model"])
        seed = body.get("seed")
        stream = random.Random(f"{seed}:{index}") if seed is not None else random.Random()
        temperature = float(body.get("temperature", 1.0))
        top = int(body.get("top_logprobs") or 0)
        script = self._script(body)
        context, text = list(prompt), ""
        for position in range(min(int(body.get("max_tokens", 64)), self.max_context - len(prompt))):
            if script is None:
                one = draw(
                    context, weights, temperature=temperature, stream=stream, raw=self.raw_logprobs, top=top
                )  # fmt: skip
            else:
                token = script[position] if position < len(script) else END
                one = stated_of(token, log_probabilities(context, weights), top)
            yield one
            context.append(one.token)
            text += token_text(one.token)
            if one.token == END or any(stop in text for stop in _stops(body)):
                return

    def _script(self, body: dict[str, Any]) -> bytes | None:
        if self.script is not None:
            return self.script.encode()
        if not body.get("tools") or body["messages"][-1]["role"] == "tool":
            return None
        called = {"name": body["tools"][0]["function"]["name"], "arguments": {"i": 7}}
        return f"<tool_call>{json.dumps(called)}</tool_call>".encode()

    def _refusal(self, body: dict[str, Any]) -> web.Response | None:
        if self.faults.status is not None:
            return problem(self.faults.status, self.faults.message, self.faults.headers)
        unknown = sorted(set(body) - OWN_FIELDS)
        if not self.vllm and self.strict and unknown:
            return problem(400, f"Unrecognized request arguments supplied: {', '.join(unknown)}")
        if not self.ids_when_streaming and body.get("return_token_ids"):
            return problem(400, "return_token_ids is not supported for streaming chat completions")
        if self.logprobs_beside in body and body.get("logprobs"):
            return problem(400, f"logprobs are not supported together with {self.logprobs_beside}")
        if body["model"] not in (self.model, *self.adapters):
            return problem(404, f"The model `{body['model']}` does not exist.")
        return None

    def _unauthorised(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("authorization", "")
        if self.key is None or given == f"Bearer {self.key}":
            return None
        return problem(401, f"Incorrect API key provided: {given}")


Server = TypeVar("Server", bound=UpstreamServer)


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}
    return web.json_response(body, status=status, headers=headers)


def too_long(most: int, length: int) -> web.Response:
    return problem(400, f"This model's maximum context length is {most} tokens. However, you requested {length}.")


async def write(response: web.StreamResponse, value: Any) -> None:
    await response.write(f"data: {json.dumps(value)}\n\n".encode())


def _call(*, arguments: str, **named: str) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": named["name"]} if named else {})}
    start = {"id": named["id"], "type": "function"} if named else {}
    return {"tool_calls": [{"index": 0, **start, "function": function}]}


def _entry(one: Drawn) -> dict[str, Any]:
    others = [{"token": token_text(token), "logprob": logprob, "bytes": None} for token, logprob in one.top]
    return {"token": token_text(one.token), "logprob": one.logprob, "bytes": None, "top_logprobs": others}


def _stops(body: dict[str, Any]) -> Sequence[str]:
    stops = body.get("stop") or []
    return [stops] if isinstance(stops, str) else stops


@asynccontextmanager
async def running_upstream(
    kind: type[Server] = UpstreamServer,  # pyright: ignore[reportInvalidTypeVarUse] - a default of its bound
    *,
    port: int = 0,
    **options: Any,
) -> AsyncGenerator[Server]:
    """A server on a port of loopback, a free one by default, for the length of a block."""
    server = kind(**options)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.go.set()
        with contextlib.suppress(Exception):
            await runner.cleanup()


@contextmanager
def upstream_in_a_thread(**options: Any) -> Generator[UpstreamServer]:
    """A server on a loop of its own, for tests that wait for other processes."""
    made: list[UpstreamServer] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with running_upstream(**options) as server:
            made.append(server)
            ready.set()
            await stop.wait()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(main())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(timeout=10)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
