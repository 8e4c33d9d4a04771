"""What a server is asked for: bodies of ``/v1/chat/completions`` in the two dialects."""

from __future__ import annotations

from typing import Any

from tidegate.core.chat import response_format
from tidegate.core.types import GenerationRequest, Sampling

_ONLY_WITH_TOOLS = ("tool_choice", "parallel_tool_calls")


def vllm_body(request: GenerationRequest, model: str) -> dict[str, Any]:
    """Every setting spelled out: what is left out would come from the model's generation_config.json, and the record
    would claim another distribution than was sampled from."""
    sampling = request.sampling
    return {
        **_frame(request, model),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": sampling.max_tokens,
        "n": sampling.n,
        **_optional(sampling),
        "logprobs": True,
        "top_logprobs": sampling.top_logprobs,
        "return_token_ids": True,
    }


def openai_body(request: GenerationRequest, model: str, *, with_tokens: bool) -> dict[str, Any]:
    """The client's own fields as it wrote them; ``with_tokens`` adds what asks for token ids and log-probabilities.

    A call of our own has no fields of a client; its settings are spelled out, ``top_k`` only where it is on, because
    OpenAI's own servers refuse fields that they don't know.
    """
    if request.passed is None:
        fields = _own_fields(request.sampling)
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


def _frame(request: GenerationRequest, model: str) -> dict[str, Any]:
    """Answers always come as streams, so that a client that goes away stops the server at once."""
    frame: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        frame["tools"] = [dict(tool) for tool in request.tools]
    return frame
