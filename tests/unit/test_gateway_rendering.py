"""Rendering of events and records, without a server."""

from __future__ import annotations

import json
import math

import pytest
from starlette.datastructures import Headers

from gateway_world import MODEL, World, ask
from tidegate.core.errors import (
    AuthenticationError,
    EngineBusyError,
    NotFoundError,
    RequestError,
    StoreError,
    TidegateError,
)
from tidegate.core.generation import GenerationFold
from tidegate.core.types import ChoiceEnd, FinishReason, JsonObject, PromptTokens, TokenDelta
from tidegate.gateway.chat_call import ChatCall, plan_call, to_record
from tidegate.gateway.problems import Problem, boundary
from tidegate.gateway.rendering import (
    LOWEST_LOGPROB,
    AnswerShape,
    ChunkMaker,
    is_finished,
    logprob_entries,
    recorded_events,
)

SHAPE = AnswerShape(id="chatcmpl-1", created=1, model=MODEL, release_id="r0")


def call_of(number: int) -> JsonObject:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def planned(**fields: object) -> ChatCall:
    return plan_call(ask(**fields), Headers({}), World().deps, max_search=8, started_s=0.0)


def calls_heard(call: ChatCall, *deltas: tuple[JsonObject, ...]) -> int:
    fold = GenerationFold()
    for tool_calls in deltas:
        fold.add(call.heard(TokenDelta(choice=0, token_ids=(), logprobs=(), tool_calls=tool_calls), fold))
    return sum(len(choice.tool_calls) for choice in fold.choices())


def test_one_tool_call_a_choice_whether_they_come_together_or_apart() -> None:
    together, apart = [(call_of(0), call_of(1))], [(call_of(0),), (call_of(1),)]
    for deltas in (together, apart):
        assert calls_heard(planned(parallel_tool_calls=False), *deltas) == 1
        assert calls_heard(planned(parallel_tool_calls=True), *deltas) == 2
        assert calls_heard(planned(), *deltas) == 2


def test_tool_call_indexes_go_on_over_deltas_and_are_each_choices_own() -> None:
    chunks = ChunkMaker(SHAPE, n=2)
    seen: list[tuple[int, int]] = []
    for choice, numbers in ((0, (0, 1)), (1, (0,)), (0, (2,))):
        delta = TokenDelta(choice=choice, token_ids=(), logprobs=(), tool_calls=tuple(call_of(n) for n in numbers))
        for chunk in chunks.delta(delta):
            (rendered,) = chunk["choices"]
            seen.extend((rendered["index"], call["index"]) for call in rendered["delta"]["tool_calls"])
    assert seen == [(0, 0), (0, 1), (1, 0), (0, 2)]


def test_tokens_that_are_held_back_make_no_chunk() -> None:
    delta = TokenDelta(choice=0, token_ids=(5,), logprobs=(-1.0,), text="", token_texts=("<tool_call>",))
    assert not list(ChunkMaker(SHAPE, n=1).delta(delta))


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, math.inf])
def test_logprobs_that_json_has_no_number_for(logprob: float) -> None:
    delta = TokenDelta(choice=0, token_ids=(5,), logprobs=(logprob,), token_texts=("a",))
    (entry,) = logprob_entries(delta)
    assert entry["logprob"] == LOWEST_LOGPROB
    json.dumps(entry, allow_nan=False)


def test_a_record_makes_the_events_that_it_was_made_from() -> None:
    fold = GenerationFold()
    events = [
        PromptTokens(token_ids=(1, 2)),
        TokenDelta(choice=0, token_ids=(3, 4), logprobs=(-1.0, -2.0), text="ab", tool_calls=(call_of(0),)),
        ChoiceEnd(choice=0, finish_reason=FinishReason.TOOL_CALLS, invalid_tool_call=True),
    ]
    for event in events:
        fold.add(event)
    record = to_record(planned(), fold, interaction_id="i", release_id="r", replica="e", latency_s=1.0)
    assert is_finished(record)
    assert list(recorded_events(record)) == events


def test_a_record_of_nothing_has_every_choice_cancelled_and_is_not_finished() -> None:
    record = to_record(planned(n=2), GenerationFold(), interaction_id="i", release_id="r", replica="e", latency_s=1.0)
    assert [(choice.index, choice.finish_reason.value) for choice in record.choices] == [
        (0, "cancelled"),
        (1, "cancelled"),
    ]
    assert not is_finished(record)


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (RequestError("x", param="n"), 400, "invalid_request_error", {}),
        (AuthenticationError("x"), 401, "authentication_error", {"www-authenticate": "Bearer"}),
        (NotFoundError("x"), 404, "invalid_request_error", {}),
        (EngineBusyError("x"), 429, "rate_limit_error", {"retry-after": "1"}),
        (StoreError("x"), 503, "server_error", {"retry-after": "1"}),
        (TidegateError("x"), 500, "server_error", {}),
    ],
)
def test_problems(error: TidegateError, status: int, kind: str, headers: dict[str, str]) -> None:
    problem = Problem.of(error)
    assert problem.status == status
    assert problem.headers == headers
    param = error.param if isinstance(error, RequestError) else None
    assert problem.body() == {"error": {"message": "x", "type": kind, "param": param, "code": error.code}}


def test_the_boundary_hides_details_and_lets_our_own_errors_through() -> None:
    with (
        pytest.raises(StoreError, match=r"the store failed unexpectedly \(OSError\)") as caught,
        boundary("the store", StoreError),
    ):
        raise OSError("/secret")
    assert "secret" not in str(caught.value)
    with pytest.raises(NotFoundError, match="mine"), boundary("the store", StoreError):
        raise NotFoundError("mine")
