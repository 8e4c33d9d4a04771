"""A real HTTP server that speaks SGLang 0.5.23's endpoints over :mod:`upstream_model`, with its quirks.

Written after its sources: which fields each endpoint has, which requests are refused with which status and words, when
log-probabilities are lost on the way, and how an unload deadlocks. The deadlock lasts until ``go`` is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tidegate.artifacts import WEIGHTS_FILE
from upstream_model import log_probabilities, render
from upstream_server import UpstreamServer, problem, write

_UNSEEDED = 42
"""The seed of every call without one, where seeds are heeded at all."""


@dataclass
class SglangServer(UpstreamServer):
    """Start it with ``running_upstream(SglangServer)``.

    Args:
        lora: whether adapters can be loaded at all.
        tool_call_parser, reasoning_parser: as its flags. With either the chat stream holds every log-probability.
        deterministic: whether seeds are heeded.
        max_loaded: adapters that it keeps; it drops the one that was used longest ago on its own.
        tokens_a_chunk: so many tokens come in one chunk, as with speculative decoding.
        template_differs: ``/tokenize`` renders other tokens than the chat does.
        sglext: whether chat streams give token ids when asked for them so (versions before 0.5.23 do not).
    """

    lora: bool = True
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    deterministic: bool = True
    max_loaded: int | None = None
    tokens_a_chunk: int = 1
    template_differs: bool = False
    sglext: bool = True
    full: bool = False
    sampled_in_parallel: bool = False
    wedged: bool = False
    pending: dict[str, Path] = field(default_factory=dict)
    ever_loaded: dict[str, Path] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=16 << 20, middlewares=[self._kept])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/load_lora_adapter", self._load)
        app.router.add_post("/unload_lora_adapter", self._unload)
        return app

    @web.middleware
    async def _kept(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.wedged and request.path != "/v1/models":
            await self.go.wait()
        refused = None if request.path == "/health" else self._unauthorised(request)
        return refused or await handler(request)

    async def _model_info(self, request: web.Request) -> web.Response:
        del request
        parsers = {"tool_call_parser": self.tool_call_parser, "reasoning_parser": self.reasoning_parser}
        return web.json_response({"model_path": "/models/tiny", "served_model_name": self.model, **parsers})

    async def _server_info(self, request: web.Request) -> web.Response:
        del request
        flags = {"enable_lora": self.lora or None, "max_loaded_loras": self.max_loaded, "allow_auto_truncate": False}
        return web.json_response(
            {"version": "0.5.23", "enable_deterministic_inference": self.deterministic, **flags, "internal_states": []}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = render(body["messages"], body.get("tools") or [])
        if self.template_differs:
            tokens = [1, *tokens[1:]]  # as many, so that no count tells
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.max_context})

    async def _generate(self, request: web.Request) -> web.Response:
        """Scoring alone: input log-probabilities of temperature 1, nothing at ``logprob_start_len`` itself."""
        body = await request.json()
        tokens, adapter = body["input_ids"], body.get("lora_path")
        refused = self._refused_adapter(adapter, bare=True) or self._too_long(len(tokens), bare=True)
        if refused is not None:
            return refused
        assert body["return_logprob"] is True
        assert body["sampling_params"]["max_new_tokens"] == 0
        self.scored += 1
        moved = self.faults.noise * (self.scored % 3)
        start = body["logprob_start_len"]
        stated: list[Any] = [[None, tokens[start], None]]
        for at in range(start + 1, len(tokens)):
            logprobs = log_probabilities(tokens[:at], self.weights_of(adapter or self.model)) - moved
            stated.append([float(logprobs[tokens[at]]), tokens[at], None])
        return web.json_response({"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": stated}})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._streamed(request, body, body["prompt"], chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("return_token_ids"):
            self.bodies.append(body)
            return _bad(
                "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false "
                "when using return_token_ids=true."
            )
        return await self._streamed(request, body, render(body["messages"], body.get("tools") or []), chat=True)

    async def _streamed(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], *, chat: bool
    ) -> web.StreamResponse:
        self.bodies.append(body)
        assert body["stream"] is True
        self.sampled_in_parallel |= body.get("n", 1) > 1
        _, _, adapter = body["model"].partition(":")
        refused = self._refused_adapter(adapter or None) or self._too_long(len(prompt))
        if self.faults.status is not None:
            refused = problem(self.faults.status, self.faults.message, self.faults.headers)
        if refused is not None:
            return refused
        if self.faults.content_type is not None:
            return web.Response(text="<h1>welcome</h1>", content_type=self.faults.content_type)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.full:  # told in a stream that has begun, with its status
            error = {"object": "error", "message": "The request queue is full.", "code": 503}
            await write(response, {"error": {**error, "type": "SERVICE_UNAVAILABLE", "param": None}})
            await response.write(b"data: [DONE]\n\n")
            return response
        named = {**body, "model": adapter or self.model}
        if not self.deterministic:
            named.pop("seed", None)
        else:
            named.setdefault("seed", _UNSEEDED)
        try:
            whole = await self._sent(request, response, named, prompt, chat=chat)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        if whole:
            await response.write(b"data: [DONE]\n\n")
            self.answered += 1
        return response

    async def _sent(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        prompt: list[int],
        *,
        chat: bool,
    ) -> bool:
        head = {"id": "sg-1", "created": 1, "model": body["model"]}
        parts = list(self._choice({**body, "logprobs": True, **_tops(body, chat=chat)}, prompt, 0))
        if chat:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await write(response, {**head, "choices": [opening]})
        sampled: list[int] = []
        reason: str | None = None
        for number, chunk in enumerate(_together(parts, self.tokens_a_chunk)):
            if not await self._go_on(request, response, number):
                return False
            sampled += chunk["token_ids"]
            reason = chunk["finish_reason"]
            if number == self.faults.lose_token:
                continue
            first = number == 0
            shown = self._chat_part(chunk) if chat else self._completion_part(body, chunk, prompt if first else None)
            if shown is not None:
                await write(response, {**head, "choices": [shown]})
        if chat:
            await write(response, {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
            if self.sglext and body.get("return_output_ids_in_sglext"):
                ids = {"input_ids": prompt, "output_ids": [sampled]}
                await write(response, {**head, "choices": [], "sglext": ids})
        if self.faults.usage and body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
            await write(response, {**head, "choices": [], "usage": usage})
        return True

    def _chat_part(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """None for tokens without text where nothing is parsed: their log-probabilities have no chunk to go with."""
        delta = dict(chunk["delta"])
        if self.tool_call_parser is None and "tool_calls" in delta:
            delta = {"content": ""}
        entries = chunk["logprobs"]["content"]
        shown = [{**entry, "top_logprobs": entries[0]["top_logprobs"]} for entry in entries]  # sglang #39260
        if not any(delta.values()) and self.tool_call_parser is None and self.reasoning_parser is None:
            return None
        return {"index": 0, "delta": delta, "logprobs": {"content": shown}, "finish_reason": None}

    @staticmethod
    def _completion_part(body: dict[str, Any], chunk: dict[str, Any], prompt: list[int] | None) -> dict[str, Any]:
        entries = chunk["logprobs"]["content"]
        part = {
            "index": 0,
            "text": chunk["delta"].get("content", ""),
            "logprobs": {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [{one["token"]: one["logprob"] for one in entry["top_logprobs"]} for entry in entries],
                "text_offset": [],
            },
            "finish_reason": chunk["finish_reason"],
        }
        if body.get("return_token_ids"):
            part["token_ids"] = chunk["token_ids"]
            if prompt is not None:
                part["prompt_token_ids"] = prompt
        return part

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        self.changes.append(("load", name))
        if not self.lora:
            return _failed("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.pending:
            return _failed(f"LoRA adapter '{name}' has an incomplete unload. Retry the unload before loading it again.")
        if name in self.adapters:
            return _failed(f"Failed to load LoRA adapter '{name}': it is already loaded")
        if not (path / WEIGHTS_FILE).is_file():
            return _failed(f"Can't find weights in {path}")
        self.faults.on_load(path)
        self.adapters[name] = self.ever_loaded[name] = path
        self.weights[name] = (path / WEIGHTS_FILE).read_bytes()
        while self.max_loaded is not None and len(self.adapters) > self.max_loaded:
            self.adapters.pop(next(iter(self.adapters)))
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": {name: str(path)}})

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.changes.append(("unload", name))
        if self.faults.status is not None:
            return problem(self.faults.status, self.faults.message)
        if name not in self.pending:
            if name not in self.adapters:
                return _failed(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.adapters)}")
            self.pending[name] = self.adapters.pop(name)  # from here on it cannot be called
        if self.sampled_in_parallel:  # sglang #36894: never returns, and nothing else runs any more
            self.wedged = True
            await self.go.wait()
        del self.pending[name]
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": {}})

    def _refused_adapter(self, adapter: str | None, *, bare: bool = False) -> web.Response | None:
        if adapter is None or adapter in self.adapters:
            return None
        if adapter in self.ever_loaded:  # dropped or unloaded: it is read again, from where it was
            self.adapters[adapter] = self.ever_loaded[adapter]
            return None
        words = f"Got LoRA adapter that has never been loaded: {adapter}\nAll loaded adapters: {list(self.adapters)}."
        return _bad(words, bare=bare)

    def _too_long(self, length: int, *, bare: bool = False) -> web.Response | None:
        if length < self.max_context:
            return None
        words = f"The input ({length} tokens) is longer than the model's context length ({self.max_context} tokens)."
        return _bad(words, bare=bare)

    def weights_of(self, model: str) -> bytes | None:
        return None if model == self.model else super().weights_of(model)


def _tops(body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """The two endpoints name the number of alternatives differently."""
    return {"top_logprobs": (body.get("top_logprobs") if chat else body.get("logprobs")) or 0}


def _together(parts: list[dict[str, Any]], size: int) -> Iterator[dict[str, Any]]:
    """Chunks of ``size`` tokens each."""
    for start in range(0, len(parts), size):
        chunk = parts[start : start + size]
        if len(chunk) == 1:
            yield chunk[0]
            continue
        calls = [call for part in chunk for call in part["delta"].get("tool_calls") or ()]
        yield {
            "index": 0,
            "delta": {"tool_calls": calls}
            if calls
            else {"content": "".join(part["delta"].get("content", "") for part in chunk)},
            "token_ids": [token for part in chunk for token in part["token_ids"]],
            "logprobs": {"content": [entry for part in chunk for entry in part["logprobs"]["content"]]},
            "finish_reason": chunk[-1]["finish_reason"],
        }


def _bad(message: str, *, bare: bool = False) -> web.Response:
    """A bad request in the two shapes that SGLang has for it."""
    if bare:
        return web.json_response({"error": {"message": message}}, status=400)
    body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response(body, status=400)


def _failed(message: str) -> web.Response:
    body = {"success": False, "error_message": message, "loaded_adapters": None}
    return web.json_response(body, status=400)
