"""What a server is asked for: bodies of its requests for answers, in each dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.chat import response_format, tool_choice
from tidegate.core.types import GenerationRequest, Sampling

_ONLY_WITH_TOOLS = ("tool_choice", "parallel_tool_calls")


def vllm_body(request: GenerationRequest, model: str) -> dict[str, Any]:
    """Every setting spelled out: what is left out would come from the model's generation_config.json, and the record
    would claim another distribution than was sampled from."""
    sampling = request.sampling
    return {
        **_frame(request, model),
        **_tool_choice(request),
        **_spelled_out(sampling),
        "n": sampling.n,
        "logprobs": True,
        "top_logprobs": sampling.top_logprobs,
        "return_token_ids": True,
    }


def sglang_prompt_body(request: GenerationRequest, model: str) -> dict[str, Any]:
    """What ``/tokenize`` renders and tokenises as a chat completion of the same request would be."""
    return {"model": model, **_conversation(request), **_tool_choice(request)}


def sglang_completion_body(
    request: GenerationRequest, model: str, *, prompt: Sequence[int], seed: int
) -> dict[str, Any]:
    """One choice after tokens; every setting spelled out, as for vLLM."""
    return {
        "model": model,
        "prompt": list(prompt),
        **_STREAMED,
        **_spelled_out(request.sampling),
        "seed": seed,
        "logprobs": request.sampling.top_logprobs,  # 0 asks for those of the sampled tokens alone
        "return_token_ids": True,
    }


def sglang_chat_body(request: GenerationRequest, model: str, *, seed: int) -> dict[str, Any]:
    """One choice after messages; ``return_token_ids`` is refused in streams, its like in ``sglext`` is not."""
    return {
        "model": model,
        **_conversation(request),
        **_tool_choice(request),
        **_STREAMED,
        **_spelled_out(request.sampling),
        "seed": seed,
        "logprobs": True,
        "top_logprobs": request.sampling.top_logprobs,
        "return_input_ids_in_sglext": True,
        "return_output_ids_in_sglext": True,
    }


def _spelled_out(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": sampling.max_tokens,
        **_optional(sampling),
    }


def openai_body(request: GenerationRequest, model: str, *, with_tokens: bool) -> dict[str, Any]:
    """The client's own fields as it wrote them; ``with_tokens`` adds what asks for token ids and log-probabilities.

    A call of our own has no fields of a client; its settings are spelled out, ``top_k`` only where it is on, because
    OpenAI's own servers refuse fields that they don't know.
    """
    if request.passed is None:
        fields = {**_own_fields(request.sampling), **_tool_choice(request)}
    else:
        fields = {
            name: value for name, value in request.passed.items() if request.tools or name not in _ONLY_WITH_TOOLS
        }
    asked = {"logprobs": True, "return_token_ids": True} if with_tokens else {}
    return {**fields, **_frame(request, model), **asked}


def _own_fields(sampling: Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        **_optional(sampling),
    }
    defaults = Sampling()
    for name in ("n", "top_k", "presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != getattr(defaults, name):
            fields[name] = getattr(sampling, name)
    if sampling.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": sampling.top_logprobs}
    return fields


def _optional(sampling: Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.json_schema is not None:
        fields["response_format"] = response_format(sampling.json_schema)
    return fields


_STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Answers always come as streams, so that a client that goes away stops the server at once."""


def _frame(request: GenerationRequest, model: str) -> dict[str, Any]:
    return {"model": model, **_conversation(request), **_STREAMED}


def _conversation(request: GenerationRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": [dict(message) for message in request.messages]}
    if request.tools:
        fields["tools"] = [dict(tool) for tool in request.tools]
    return fields


def _tool_choice(request: GenerationRequest) -> dict[str, Any]:
    """What is asked of the calls; beside no tools it would be refused."""
    sampling, fields = request.sampling, dict[str, Any]()
    if not request.tools:
        return fields
    if sampling.tool_choice is not None:
        fields["tool_choice"] = tool_choice(sampling.tool_choice)
    if not sampling.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    return fields
