"""Whatever JSON arrives: success or an OpenAI-shaped refusal, never a failure of ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_world import CALCULATOR, MODEL, World

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | ANYTHING},
    optional={
        "content": st.text(max_size=8) | ANYTHING,
        "tool_call_id": st.text(max_size=4) | ANYTHING,
        "tool_calls": ANYTHING,
        "name": ANYTHING,
    },
)
TASKS = st.dictionaries(
    st.sampled_from(["tidegate_verifier", "tidegate_reference", "tidegate_episode", "tidegate_user", "tidegate_line"]),
    st.text(max_size=8) | st.sampled_from(["numeric", "side"]),
    max_size=3,
)
FIELDS = [
    *("tool_choice", "parallel_tool_calls", "n", "stop", "seed", "temperature", "top_p", "top_k", "max_tokens"),
    *("max_completion_tokens", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "stream"),
    *("stream_options", "response_format", "return_token_ids", "user", "safety_identifier", "store", "logit_bias"),
]
CHAT = st.fixed_dictionaries(
    {"model": st.just(MODEL) | ANYTHING, "messages": st.lists(MESSAGE, min_size=1, max_size=3) | ANYTHING},
    optional={
        "tools": st.just([CALCULATOR]) | ANYTHING,
        "metadata": TASKS | ANYTHING,
        **{name: st.integers(0, 2) | st.booleans() | ANYTHING for name in FIELDS},
    },
)
FEEDBACK = st.dictionaries(
    st.sampled_from(["metric_name", "value", "episode_id", "tags", "comment", "demonstration", "idempotency_key"]),
    st.text(max_size=4) | ANYTHING,
)


WORLD = World()


def outcome(path: str, data: bytes) -> int:
    async def call() -> tuple[int, dict[str, str], bytes]:
        return await asyncio.wait_for(WORLD.direct(path, data), timeout=10)

    status, headers, answer = asyncio.run(call())
    assert headers["x-request-id"]
    if status != 200:
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
    return status


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()  # NaN and lone surrogates travel as they can


@settings(max_examples=150, deadline=None)
@given(body=CHAT | ANYTHING)
def test_any_json_to_chat_is_answered_or_refused(body: Any) -> None:
    assert outcome("/v1/chat/completions", encoded(body)) in (200, 400, 404)


@settings(max_examples=100, deadline=None)
@given(body=FEEDBACK | ANYTHING)
def test_any_json_to_feedback_is_taken_or_refused(body: Any) -> None:
    assert outcome("/v1/feedback", encoded(body)) in (200, 400)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=40))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert outcome("/v1/chat/completions", data) == 400


HEADER = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=300)


@settings(max_examples=80, deadline=None)
@given(
    headers=st.dictionaries(
        st.sampled_from(
            [
                "x-request-id",
                "x-tidegate-episode",
                "x-tidegate-user",
                "x-tidegate-line",
                "idempotency-key",
                "authorization",
            ]
        ),
        HEADER,
    )
)
def test_any_headers_are_used_or_refused(headers: dict[str, str]) -> None:
    body = encoded({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})

    async def call() -> tuple[int, dict[str, str], bytes]:
        return await WORLD.direct("/v1/chat/completions", body, headers)

    status, answer_headers, _ = asyncio.run(call())
    assert status in (200, 400)
    assert all(value.isprintable() for value in answer_headers.values())
