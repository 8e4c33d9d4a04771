"""Events fold into the answers they came from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.generation import GenerationFold, collect
from tidegate.core.types import (
    Choice,
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    PromptTokens,
    Sampling,
    TokenCounts,
    TokenDelta,
)

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

choices = st.builds(
    lambda tokens, text, calls, reason, invalid: Choice(
        index=0,
        token_ids=tuple(tokens),
        logprobs=tuple(-0.5 * token for token in tokens),
        text=text,
        tool_calls=(CALL,) * calls,
        finish_reason=reason,
        invalid_tool_call=invalid,
    ),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.text(max_size=6),
    st.integers(0, 2),
    st.sampled_from(FinishReason),
    st.booleans(),
)


def events_of(choice: Choice, index: int) -> list[GenerationEvent]:
    """One token an event, the text and the calls spread over them."""
    last = len(choice.token_ids) - 1
    deltas: list[GenerationEvent] = [
        TokenDelta(
            choice=index,
            token_ids=(token,),
            logprobs=(logprob,),
            text=choice.text[number:] if number == last else choice.text[number : number + 1],
            tool_calls=choice.tool_calls if number == last else (),
        )
        for number, (token, logprob) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True))
    ]
    end = ChoiceEnd(choice=index, finish_reason=choice.finish_reason, invalid_tool_call=choice.invalid_tool_call)
    return [*deltas, end]


@given(st.lists(choices, max_size=3), st.randoms(use_true_random=False))
def test_any_interleaving_folds_to_the_same_choices(answers: list[Choice], random: Random) -> None:
    queues = [events_of(answer, index) for index, answer in enumerate(answers)]
    fold = GenerationFold()
    fold.add(PromptTokens(token_ids=(1, 2, 3)))
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])
        fold.add(queue.pop(0))
    assert fold.prompt_token_ids == (1, 2, 3)
    for index, (got, answer) in enumerate(zip(fold.choices(), answers, strict=True)):
        assert got.index == index
        assert (got.token_ids, got.logprobs, got.text) == (answer.token_ids, answer.logprobs, answer.text)
        assert (got.tool_calls, got.finish_reason) == (answer.tool_calls, answer.finish_reason)
        assert got.invalid_tool_call == answer.invalid_tool_call


def test_a_choice_that_has_not_ended_is_cancelled() -> None:
    fold = GenerationFold()
    assert fold.choices() == ()
    fold.add(TokenDelta(choice=0, token_ids=(7,), logprobs=(-0.1,), text="a"))
    (choice,) = fold.choices()
    assert choice.finish_reason is FinishReason.CANCELLED
    assert choice.token_ids == (7,)


def test_tokens_that_are_confirmed_at_the_end_are_none_before() -> None:
    fold = GenerationFold()
    fold.add(PromptTokens(token_ids=(1,), confirmed_at_end=True))
    fold.add(TokenDelta(choice=0, token_ids=(7,), logprobs=(-0.1,), text="a"))
    begun, blank = fold.all_choices(2)
    assert (begun.text, begun.token_ids, begun.logprobs, begun.token_exact) == ("a", (), (), False)
    assert (blank.finish_reason, blank.token_exact) == (FinishReason.CANCELLED, False)
    fold.add(ChoiceEnd(choice=0, finish_reason=FinishReason.STOP))
    assert (fold.choices()[0].token_ids, fold.choices()[0].token_exact) == ((7,), True)


def test_one_delta_without_its_tokens_takes_the_others_tokens_with_it() -> None:
    fold = GenerationFold()
    fold.add(PromptTokens(token_ids=(), distribution_known=False))
    fold.add(TokenDelta(choice=0, token_ids=(7,), logprobs=(-0.1,), text="a"))
    fold.add(TokenDelta(choice=0, token_ids=(), logprobs=(-0.2,), text="b", token_exact=False))
    fold.add(TokenDelta(choice=0, token_ids=(8,), logprobs=(-0.3,), text="c"))
    fold.add(TokenDelta(choice=1, token_ids=(9,), logprobs=(-0.4,), text="d"))
    fold.add(TokenCounts(prompt=4, completion=5))
    lacking, whole = fold.choices()
    assert (lacking.text, lacking.token_ids, lacking.logprobs, lacking.token_exact) == ("abc", (), (), False)
    assert (whole.token_ids, whole.token_exact) == ((9,), True)
    assert fold.counts == TokenCounts(prompt=4, completion=5)
    assert not fold.as_sampled(Sampling()).unfiltered
    assert fold.as_sampled(Sampling(top_k=3)).top_k == 3


def test_a_choice_without_tokens_is_an_empty_answer() -> None:
    fold = GenerationFold()
    fold.add(ChoiceEnd(choice=1, finish_reason=FinishReason.STOP))
    assert fold.choices() == (Choice(index=1, token_ids=(), logprobs=(), text=""),)


async def test_collect_drains_a_stream() -> None:
    async def stream() -> AsyncIterator[GenerationEvent]:
        yield PromptTokens(token_ids=(1,))
        yield TokenDelta(choice=0, token_ids=(2,), logprobs=(-1.0,), text="b")
        yield ChoiceEnd(choice=0, finish_reason=FinishReason.LENGTH)

    fold = await collect(stream())
    assert fold.prompt_token_ids == (1,)
    assert fold.choices()[0].finish_reason is FinishReason.LENGTH
