"""The engine port over an SGLang server that was started with LoRA: its dialect, as of SGLang 0.5.23.

The server renders and tokenises the prompt (``/tokenize``), and samples from those very tokens; nothing is tokenised
here. Where it parses nothing, the answer comes from ``/v1/completions``, whose streams hold every token's id and
log-probability. Where it parses tool calls or reasoning, or tools are offered, it comes from ``/v1/chat/completions``,
whose streams hold the ids at their end. ``n`` is never more than 1: a server that has sampled in parallel deadlocks
when an adapter is unloaded (sglang #36894).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tidegate.core.errors import AdapterError, EngineError, EngineTimeoutError, TidegateError
from tidegate.core.types import AdapterRef, GenerationRequest, JsonObject
from tidegate.engines.remote.adapter_server import AdapterServerEngine
from tidegate.engines.remote.bodies import sglang_chat_body, sglang_completion_body, sglang_prompt_body
from tidegate.engines.remote.sglang_chunks import ChatPart, CompletionPart, Part, Usage
from tidegate.engines.remote.upstream import RefusedError, Upstream
from tidegate.ports.engine import EngineHealth

_SEED_BITS = 31
"""Fits every integer that a server may keep a seed in."""
_LOST = ("has never been loaded", "are not loaded", "LoRA is not enabled", "Failed to implicitly load")
"""Words of a refusal (status 400, like any bad request) that mean the adapter and not the request."""
_WRITTEN_FOR = "SGLang 0.5.23 is what this dialect was written for"


class SglangEngine(AdapterServerEngine):
    """See :class:`AdapterServerEngine`; implements :class:`tidegate.ports.engine.Engine`.

    Args:
        upstream: the server; closed by whoever made it.
        model: name of the base model there.
        base_sha256: content hash of the base model's weights, as this side knows them.
        replica: name recorded with each interaction.
        raw_logprobs: whether the server states log-probabilities of temperature 1 (``SGLANG_RETURN_ORIGINAL_LOGPROB``).
        entropy: seeds of calls without one; a server that honours seeds gives all of those the same.
    """

    load_path = "/load_lora_adapter"
    unload_path = "/unload_lora_adapter"
    needs = "start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules"
    gives_ids = _WRITTEN_FOR

    def __init__(
        self,
        upstream: Upstream,
        *,
        model: str,
        base_sha256: str,
        replica: str,
        raw_logprobs: bool = False,
        entropy: random.Random | None = None,
    ) -> None:
        super().__init__(upstream, model=model, base_sha256=base_sha256, replica=replica, raw_logprobs=raw_logprobs)
        self._entropy = entropy or random.SystemRandom()
        self._parses: bool | None = None

    async def health(self) -> EngineHealth:
        """Whether the server serves and still lists our adapters; a restarted one has lost them."""
        found = await super().health()
        if not found.ready:
            self._parses = None  # it may come back with other flags
        return found

    async def _chunks(self, request: GenerationRequest) -> AsyncGenerator[JsonObject]:
        prompt = await self._prompt(request)
        through_chat = bool(request.tools) or await self._server_parses()
        sampling = request.sampling
        seed = self._entropy.getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed
        usage = Usage(prompt=len(prompt), choices=sampling.n)
        answers = [
            self._answer(request, prompt, index, choice_seed(seed, index), through_chat=through_chat)
            for index in range(sampling.n)
        ]
        begun = False
        async with aclosing(_merged(answers)) as chunks:
            async for chunk in chunks:
                if not begun:  # only now the server has taken the call: until then another one may be asked instead
                    yield {"choices": [], "prompt_token_ids": prompt}
                    begun = True
                for part in usage.take(chunk):
                    yield part

    async def _answer(
        self, request: GenerationRequest, prompt: list[int], index: int, seed: int, *, through_chat: bool
    ) -> AsyncGenerator[JsonObject]:
        """One choice as chunks of a chat stream with token ids."""
        model = self._model_of(request.adapter)
        part: Part
        if through_chat:
            path, part = "/v1/chat/completions", ChatPart(index=index, prompt=prompt)
            body = sglang_chat_body(request, model, seed=seed)
        else:
            path, part = "/v1/completions", CompletionPart(index=index, prompt=prompt)
            body = sglang_completion_body(request, model, prompt=prompt, seed=seed)
        begun = False
        async with aclosing(self._upstream.stream(path, body)) as chunks:
            async for chunk in chunks:
                if not begun:
                    self._refuse_at_once(chunk, path)
                    begun = True
                for translated in part.take(chunk):
                    yield translated
        for translated in part.finish():
            yield translated

    async def _prompt(self, request: GenerationRequest) -> list[int]:
        """Token ids of the conversation, by the server that samples from them."""
        answer = await self._asked("/tokenize", sglang_prompt_body(request, self._model))
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(type(one) is int for one in tokens):
            raise EngineError(f"{self._upstream.url}/tokenize gives no token ids of messages; {_WRITTEN_FOR}")
        return tokens

    async def _server_parses(self) -> bool:
        """Whether the server parses tool calls or reasoning out of answers: then they must come through its chat."""
        if self._parses is None:
            try:
                info = await self._upstream.get("/model_info")
            except RefusedError as refused:
                raise self._unasked(refused, "/model_info") from refused
            self._parses = bool(info.get("tool_call_parser") or info.get("reasoning_parser"))
        return self._parses

    async def _asked(self, path: str, body: JsonObject) -> JsonObject:
        try:
            return await self._upstream.post(path, body)
        except RefusedError as refused:
            if refused.status != 404:
                raise
            raise self._unasked(refused, path) from refused

    def _unasked(self, refused: RefusedError, path: str) -> TidegateError:
        if refused.status != 404:
            return refused.as_error()
        return EngineError(f"{self._upstream.url} has no {path}: is it SGLang? {_WRITTEN_FOR}")

    def _refuse_at_once(self, chunk: JsonObject, path: str) -> None:
        """A full queue is told within a stream that has begun: with its status, as if it had not."""
        error = chunk.get("error")
        status = error.get("code") if isinstance(error, dict) else None
        if isinstance(error, dict) and isinstance(status, int):
            raise RefusedError(f"{self._upstream.url}{path}", status, str(error.get("message")), None)

    async def _scored(self, adapter: str | None, given: Sequence[int], first: int) -> tuple[float, ...]:
        body: dict[str, Any] = {
            "input_ids": list(given),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": first - 1,  # at it stands nothing: its log-probability would need the token before
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = await self._asked("/generate", body)
        with self._upstream.speakable_errors():
            return self._stated(answer, given, first)

    def _stated(self, answer: JsonObject, given: Sequence[int], first: int) -> tuple[float, ...]:
        try:
            stated = [(entry[0], entry[1]) for entry in answer["meta_info"]["input_token_logprobs"]][1:]
            if [token for _, token in stated] != list(given[first:]):
                raise ValueError(f"they are of other tokens: {len(stated)} of them, {len(given) - first} were asked")
            return tuple(float(logprob) for logprob, _ in stated)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(
                f"{self._upstream.url}/generate states no usable input_token_logprobs: {type(error).__name__}: {error}"
            ) from error

    def _refused(self, refused: RefusedError, adapter: str | None) -> TidegateError:
        if adapter is not None and refused.status == 400 and any(words in refused.message for words in _LOST):
            return AdapterError(f"{self._upstream.url} has lost adapter {adapter!r}: {refused.message}; load it anew")
        return refused.as_error()

    def _lacks_adapters(self, refused: RefusedError) -> bool:
        return refused.status == 404 or "LoRA is not enabled" in refused.message

    async def _load(self, adapter: AdapterRef) -> None:
        self._parses = None  # one that lacks what it held was started anew, maybe with other flags
        try:
            await super()._load(adapter)
        except AdapterError as error:
            if "incomplete unload" not in str(error):
                raise
            await self._unload(adapter.name)  # an earlier one broke off; the name is free only after it
            await super()._load(adapter)

    async def _unload(self, name: str) -> None:
        try:
            await super()._unload(name)
        except EngineTimeoutError as error:
            raise EngineTimeoutError(
                f"{error}; SGLang hangs for good when it unloads an adapter after somebody's call with n > 1 "
                "(sglang #36894): restart it, and let nobody but Tidegate call it"
            ) from error

    def _model_of(self, adapter: str | None) -> str:
        return self._model if adapter is None else f"{self._model}:{adapter}"


def choice_seed(seed: int, index: int) -> int:
    """The seed of one choice of a call: the call's own for the first, another for each of the rest."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"tidegate-choice:{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


async def _merged(answers: Sequence[AsyncGenerator[JsonObject]]) -> AsyncGenerator[JsonObject]:
    """The chunks of several answers as they come. Closing it, or a failure of one, ends all of them."""
    if len(answers) == 1:
        async with aclosing(answers[0]) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    told: asyncio.Queue[JsonObject | int] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async with aclosing(answers[number]) as chunks:
                async for chunk in chunks:
                    told.put_nowait(chunk)
        finally:
            told.put_nowait(number)

    tasks = [asyncio.create_task(pump(number)) for number in range(len(answers))]
    try:
        left = len(tasks)
        while left:
            item = await told.get()
            if isinstance(item, int):
                await tasks[item]  # raises what ended it
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
