"""The engine port over a vLLM server that was started with LoRA and run-time updates: its dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from tidegate.core.errors import AdapterError, EngineError, TidegateError
from tidegate.core.types import GenerationRequest, JsonObject
from tidegate.engines.remote.adapter_server import AdapterServerEngine
from tidegate.engines.remote.bodies import vllm_body
from tidegate.engines.remote.upstream import RefusedError, Upstream


class VllmEngine(AdapterServerEngine):
    """See :class:`AdapterServerEngine`; implements :class:`tidegate.ports.engine.Engine`.

    Args:
        upstream: the server; closed by whoever made it.
        model: name of the base model there.
        base_sha256: content hash of the base model's weights, as this side knows them.
        replica: name recorded with each interaction.
        raw_logprobs: whether the server states log-probabilities of temperature 1 (``--logprobs-mode raw_logprobs``).
        why_down: says why the server does not run, where whoever started it knows; None while it does.
    """

    load_path = "/v1/load_lora_adapter"
    unload_path = "/v1/unload_lora_adapter"
    needs = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    gives_ids = "vLLM 0.10.2 or later does, when asked"

    def __init__(
        self,
        upstream: Upstream,
        *,
        model: str,
        base_sha256: str,
        replica: str,
        raw_logprobs: bool = True,
        why_down: Callable[[], str | None] = lambda: None,
    ) -> None:
        super().__init__(
            upstream,
            model=model,
            base_sha256=base_sha256,
            replica=replica,
            raw_logprobs=raw_logprobs,
            why_down=why_down,
        )

    async def _chunks(self, request: GenerationRequest) -> AsyncGenerator[JsonObject]:
        body = vllm_body(request, request.adapter or self._model)
        async with aclosing(self._upstream.stream("/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _scored(self, adapter: str | None, given: Sequence[int], first: int) -> tuple[float, ...]:
        body = {
            "model": adapter or self._model,
            "prompt": list(given),
            "max_tokens": 1,  # none is refused
            "temperature": 1.0,
            "prompt_logprobs": 1,
        }
        answer = await self._upstream.post("/v1/completions", body)
        with self._upstream.speakable_errors():
            return self._stated(answer, given, first)

    def _stated(self, answer: JsonObject, given: Sequence[int], first: int) -> tuple[float, ...]:
        try:
            stated = answer["choices"][0]["prompt_logprobs"]
            if len(stated) != len(given):
                raise ValueError(f"{len(stated)} of them for {len(given)} tokens")
            return tuple(float(stated[at][str(given[at])]["logprob"]) for at in range(first, len(given)))
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(
                f"{self._upstream.url}/v1/completions states no usable prompt_logprobs: {type(error).__name__}: {error}"
            ) from error

    def _refused(self, refused: RefusedError, adapter: str | None) -> TidegateError:
        if refused.status != 404:
            return refused.as_error()
        if adapter is None:
            return EngineError(f"{self._upstream.url} does not serve model {self._model!r}; see engine.model")
        return AdapterError(f"{self._upstream.url} has lost adapter {adapter!r}: {refused.message}; load it anew")

    def _lacks_adapters(self, refused: RefusedError) -> bool:
        return refused.status == 404 and "not exist" not in refused.message
