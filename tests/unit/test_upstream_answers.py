"""Chunks of other people's servers as events: what they mean, and what is no chunk."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_fixtures import call
from gateway_world import CALCULATOR
from tidegate.core.errors import EngineError, RequestError
from tidegate.core.generation import GenerationFold
from tidegate.core.rollout import Transcript
from tidegate.core.types import Choice, FinishReason, PromptTokens, TokenDelta
from tidegate.engines.remote.answers import AnswerReader

USAGE = {"prompt_tokens": 2, "completion_tokens": 3}


def part(index: int = 0, *, ids: Any = (), logprobs: Any = None, reason: str | None = None, **delta: Any) -> Any:
    """A part of one choice; by default each id has a log-probability."""
    stated = [-0.5] * len(ids or ()) if logprobs is None else logprobs
    entries = [{"token": f"t{i}", "logprob": value} for i, value in enumerate(stated)]
    fields = {"index": index, "delta": delta, "logprobs": {"content": entries}, "finish_reason": reason}
    return fields if ids is None else {**fields, "token_ids": list(ids)}


def chunk(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": list(parts), **fields}


def read(*chunks: dict[str, Any], n: int = 1, tools: bool = False) -> GenerationFold:
    """All events of some chunks, folded."""
    request = call(n=n, tools=(CALCULATOR,)) if tools else call(n=n)
    reader = AnswerReader(request, distribution_known=True)
    fold = GenerationFold()
    for one in chunks:
        for event in reader.read(one):
            fold.add(event)
    for event in reader.finish():
        fold.add(event)
    return fold


def only(fold: GenerationFold) -> Choice:
    (choice,) = fold.choices()
    return choice


FIRST = chunk(part(role="assistant", content="", ids=None), prompt_token_ids=[7, 8])


def test_tokens_with_ids_and_logprobs_that_are_all_there_are_kept() -> None:
    fold = read(
        FIRST,
        chunk(part(ids=[1, 2], content="ab")),
        chunk(part(ids=[], content="c")),  # text that was held back, without a token of its own
        chunk(part(ids=[3], reason="stop")),
        chunk(usage=USAGE),
    )
    choice = only(fold)
    assert (choice.text, choice.token_ids, choice.logprobs) == ("abc", (1, 2, 3), (-0.5,) * 3)
    assert fold.prompt_token_ids == (7, 8)
    assert choice.token_exact
    assert fold.counts is None


@pytest.mark.parametrize(
    ("what", "broken"),
    [
        ("no ids", part(ids=None, content="b")),
        ("ids that are none", part(ids=["b"], content="b")),
        ("an id beyond all vocabularies", part(ids=[1 << 40], content="b")),
        ("a negative id", part(ids=[-1], content="b")),
        ("fewer logprobs than ids", part(ids=[2, 2], logprobs=[-1.0], content="b")),
        ("a logprob that is no number", part(ids=[2], logprobs=["x"], content="b")),
        ("a logprob of NaN", part(ids=[2], logprobs=[float("nan")], content="b")),
        ("a logprob of hundreds of digits", part(ids=[2], logprobs=[-(10**400)], content="b")),
        ("a token too few", part(ids=[], content="b")),
    ],
)
def test_one_token_that_is_lacking_takes_all_with_it(what: str, broken: Any) -> None:
    del what
    fold = read(
        FIRST, chunk(part(ids=[1], content="a")), chunk(broken), chunk(part(ids=[3], reason="stop"), usage=USAGE)
    )
    choice = only(fold)
    assert (choice.text, choice.token_ids, choice.logprobs, choice.token_exact) == ("ab", (), (), False)
    assert fold.counts is not None
    assert (fold.counts.prompt, fold.counts.completion) == (2, 3)


@pytest.mark.parametrize("count", [True, -1, 1 << 53, 10**400, 3.0, "3", None, [3]])
def test_counts_that_are_none_are_ignored(count: Any) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": count}
    fold = read(FIRST, chunk(part(ids=[1, 2, 3], content="abc", reason="stop"), usage=usage))
    assert (only(fold).token_exact, fold.counts) == (False, None)


def test_an_answer_whose_prompt_is_unknown_has_no_tokens() -> None:
    fold = read(chunk(part(ids=[1, 2, 3], content="abc", reason="stop"), usage=USAGE))
    assert (only(fold).token_exact, fold.prompt_token_ids) == (False, ())
    reader = AnswerReader(call(), distribution_known=True)  # nor has one that breaks off before any count
    _, delta = reader.read(chunk(part(ids=[1], content="a")))
    assert isinstance(delta, TokenDelta)
    assert (delta.token_ids, delta.token_exact) == ((), False)


def test_logprobs_without_ids_reach_the_client_and_not_the_record() -> None:
    reader = AnswerReader(call(), distribution_known=False)
    prompt, delta = reader.read(chunk(part(ids=None, logprobs=[-1.0], content="a")))
    assert isinstance(prompt, PromptTokens)
    assert isinstance(delta, TokenDelta)
    assert (delta.token_ids, delta.logprobs, delta.token_texts, delta.token_exact) == ((), (-1.0,), ("t0",), False)


def test_surprise_is_unknown_without_tokens() -> None:
    choice = only(read(chunk(part(ids=None, content="a", reason="stop"))))
    assert Transcript(messages=(), choices=(choice,)).surprisal is None


def test_a_tool_call_comes_whole_from_its_parts() -> None:
    def calls(*parts: Any) -> Any:
        return part(ids=[1], tool_calls=list(parts))

    fold = read(
        FIRST,
        chunk(calls({"index": 0, "id": "a", "type": "function", "function": {"name": "add", "arguments": ""}})),
        chunk(calls({"index": 0, "function": {"arguments": '{"i": '}}, {"index": 1, "function": {"name": "now"}})),
        chunk(calls({"index": 0, "function": {"arguments": "1}"}})),
        chunk(part(reason="tool_calls"), usage=USAGE),
        tools=True,
    )
    choice = only(fold)
    assert choice.tool_calls[0] == {
        "id": "a", "type": "function", "function": {"name": "add", "arguments": '{"i": 1}'},
    }  # fmt: skip
    assert choice.tool_calls[1]["function"] == {"name": "now", "arguments": "{}"}
    assert str(choice.tool_calls[1]["id"]).startswith("call_")
    assert choice.finish_reason is FinishReason.TOOL_CALLS
    assert choice.token_exact
    assert not choice.invalid_tool_call


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["a\ud83d", "\ude00b"], "a\U0001f600b"),
        (["\ud83d", "", "\ude00"], "\U0001f600"),
        (["\ud83d\ude00"], "\U0001f600"),
        (["a\ud83d", "b"], "a\ufffdb"),
        (["\ude00", "\ud83d"], "\ufffd\ufffd"),
        (["\ud83d", "\ud83d\ude00"], "\ufffd\U0001f600"),
        (["ü\ufeffz"], "ü\ufeffz"),
        (["\ufeffz"], "\ufeffz"),
    ],
)
def test_characters_that_come_in_halves_are_joined_or_replaced(pieces: list[str], text: str) -> None:
    parts = [chunk(part(ids=[1], content=piece)) for piece in pieces]
    ended = [*parts[:-1], chunk(part(ids=[1], content=pieces[-1], reason="stop"))]
    usage = chunk(usage={"prompt_tokens": 2, "completion_tokens": len(pieces)})
    for chunks in ([*parts, chunk(part(reason="stop"))], ended):
        choice = only(read(FIRST, *chunks, usage))
        assert (choice.text, choice.token_exact) == (text, True)


def test_half_a_character_without_an_id_is_text_without_a_token() -> None:
    fold = read(FIRST, chunk(part(ids=None, content="\ud83d")), chunk(part(ids=[1, 2, 3], reason="stop"), usage=USAGE))
    assert (only(fold).text, only(fold).token_exact) == ("\ufffd", False)


def test_the_texts_of_tokens_and_calls_can_be_written() -> None:
    first = {"index": 0, "id": "\ud83d", "function": {"name": "add\ude00", "arguments": '{"i": "\ud83d'}}
    rest = {"index": 0, "function": {"arguments": '\ude00\ud83d"}'}}
    called = chunk(part(ids=None, tool_calls=[first])), chunk(part(ids=None, tool_calls=[rest], reason="tool_calls"))
    (made,) = only(read(FIRST, *called, tools=True)).tool_calls
    assert made["id"] == "\ufffd"
    assert made["function"] == {"name": "add\ufffd", "arguments": '{"i": "\U0001f600\ufffd"}'}
    stated = {"token": "\ud83d", "logprob": -1.0, "top_logprobs": [{"token": "\ude00", "logprob": -1.0}]}
    reader = AnswerReader(call(top_logprobs=1), distribution_known=True)
    _, delta = reader.read(chunk({"index": 0, "delta": {}, "token_ids": [1], "logprobs": {"content": [stated]}}))
    assert isinstance(delta, TokenDelta)
    assert (delta.token_texts, delta.top_logprobs) == (("\ufffd",), ((("\ufffd", -1.0),),))


@pytest.mark.parametrize(
    "parts",
    [
        [part(ids=None, tool_calls=[{"index": 0, "function": {"name": "add", "arguments": "{"}}])],
        [part(ids=None, tool_calls=[{"index": 0, "function": {"name": "add", "arguments": "[1]"}}])],
        [part(ids=None, tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])],
        [part(ids=None, content="<tool"), part(ids=None, content="_call>{}")],
    ],
)
def test_a_tool_call_that_nobody_can_execute_is_marked(parts: list[Any]) -> None:
    choice = only(read(*map(chunk, parts), chunk(part(ids=None, reason="stop")), tools=True))
    assert choice.invalid_tool_call


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("content_filter", FinishReason.CONTENT_FILTER),
        ("function_call", FinishReason.TOOL_CALLS),
    ],
)
def test_finish_reasons_keep_their_meaning(reason: str, expected: FinishReason) -> None:
    assert only(read(chunk(part(ids=None, content="a", reason=reason)))).finish_reason is expected


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ({"error": "boom"}, "boom"),
        ({"type": "ping"}, "'choices' is expected"),
        (chunk(part(7)), "choice 7 of 1"),
        (chunk(part(-1)), "choice -1 of 1"),
        (chunk("x"), "choice None of 1"),
        (chunk(part(ids=None, content=["x"])), "no chat message"),
        (chunk(part(ids=None, tool_calls=["x"])), "a tool call of type str"),
        (chunk(part(ids=None, reason="abort")), "finish_reason 'abort'"),
        (chunk({"index": 0, "finish_reason": ["stop"]}), r"finish_reason \['stop'\]"),
        (chunk({"index": 0, "finish_reason": {"stop": "x" * 9999}}), r"finish_reason .{80}\.\.\.: no whole answer"),
        (chunk({"index": 10**400}), "choice 1.* of 1"),
    ],
)
def test_what_is_no_chunk_of_an_answer_is_an_engine_error(bad: Any, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        read(bad)


def test_a_choice_without_an_end_is_no_answer() -> None:
    with pytest.raises(EngineError, match="after 1 of 2 choices"):
        read(chunk(part(0, ids=None, reason="stop"), part(1, ids=None, content="a")), n=2)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(
        ("choices", "index", "delta", "content", "tool_calls", "function", "name", "arguments", "token_ids", "logprobs",
         "logprob", "top_logprobs", "finish_reason", "usage", "prompt_tokens", "prompt_token_ids", "error", "id")
    )), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(
    st.lists(st.dictionaries(st.sampled_from(["choices", "usage", "prompt_token_ids", "error"]), VALUES), max_size=3)
)
def test_garbage_is_an_engine_error_or_an_answer_and_never_half_tokens(chunks: list[dict[str, Any]]) -> None:
    try:
        fold = read(*chunks, tools=True)
    except (EngineError, RequestError):
        return
    for choice in fold.choices():
        assert len(choice.token_ids) == len(choice.logprobs)
