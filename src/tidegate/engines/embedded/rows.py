"""One call and its choices while they run: tokens, settings, and what has been told to the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tidegate.core.errors import EngineError, RequestError, TidegateError
from tidegate.core.types import ChoiceEnd, FinishReason, GenerationEvent, GenerationRequest, TokenDelta
from tidegate.engines.embedded.sampling import RowSampler, Sampled
from tidegate.engines.embedded.text import Decoder, TextStream

Post = Callable[[GenerationEvent | TidegateError], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One request. ``cancelled`` may be set from any thread; the decode thread looks at every token boundary."""

    request: GenerationRequest
    prompt: tuple[int, ...]
    post: Post
    open_choices: int
    cancelled: bool = False

    def fail(self, error: TidegateError) -> None:
        """Tell the caller once; the remaining rows leave at the next boundary."""
        if not self.cancelled:
            self.cancelled = True
            self.post(error)


class Vocabulary:
    """Text of single tokens, remembered; and the tokens that end an answer."""

    def __init__(self, decoder: Decoder, end_ids: frozenset[int]) -> None:
        self.decoder = decoder
        self.end_ids = end_ids
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """A token by itself, special tokens included; part of a character shows as U+FFFD."""
        known = self._texts.get(token_id)
        if known is None:
            known = self.decoder.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._texts[token_id] = known
        return known


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One choice of a call. ``tokens`` are prompt and answer, of which ``cached`` have keys and values in a slot.

    ``siblings`` are choices with the same prompt that start from this row's slot when its prompt is computed.
    """

    call: Call
    choice: int
    limit: int
    sampler: RowSampler
    text: TextStream
    tokens: list[int]
    cached: int = 0
    siblings: list[Row] = field(default_factory=list["Row"])

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.call.prompt)

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens whose keys and values are not computed yet."""
        return self.prompt_length - self.cached

    def _nothing_to_say(self) -> TidegateError:
        request = self.call.request
        constraint = self.sampler.constraint
        if constraint is not None and constraint.fault:
            return RequestError(  # the schema is the client's, not the engine's fault
                f"the answer can't be held to {constraint.form.what} any further "
                f"({constraint.fault.splitlines()[0][:200]}); simplify it",
                param=constraint.form.param,
            )
        return EngineError(
            f"the model gave no finite logits for request {request.request_id!r} (adapter {request.adapter!r}); the "
            "weights or the prompt are damaged"
        )

    def accept(self, sampled: Sampled, vocabulary: Vocabulary) -> bool:
        """Take a sampled token and tell the caller. True when the choice has ended."""
        if not math.isfinite(sampled.logprob):
            self.call.fail(self._nothing_to_say())
            return True
        self.tokens.append(sampled.token_id)
        ended = sampled.token_id in vocabulary.end_ids
        full = len(self.tokens) - self.prompt_length >= self.limit
        piece = self.text.feed(sampled.token_id, last=ended or full)
        self.call.post(
            TokenDelta(
                choice=self.choice,
                token_ids=(sampled.token_id,),
                logprobs=(sampled.logprob,),
                text=piece.text,
                token_texts=(vocabulary.text(sampled.token_id),),
                top_logprobs=(tuple((vocabulary.text(token), value) for token, value in sampled.top),)
                if sampled.top
                else (),
                tool_calls=piece.tool_calls,
            )
        )
        if not (ended or full or piece.stopped):
            return False
        reason = FinishReason.STOP if ended or piece.stopped else FinishReason.LENGTH
        if self.text.has_calls:
            reason = FinishReason.TOOL_CALLS
        self.call.post(
            ChoiceEnd(choice=self.choice, finish_reason=reason, invalid_tool_call=self.text.invalid_tool_call)
        )
        self.call.open_choices -= 1
        return True


def rows_of(call: Call, *, limit: int, samplers: Collection[RowSampler], vocabulary: Vocabulary) -> list[Row]:
    """The rows of a call, one a choice."""
    request = call.request
    return [
        Row(
            call=call,
            choice=index,
            limit=limit,
            sampler=sampler,
            text=TextStream(
                vocabulary.decoder,
                hidden=vocabulary.end_ids,
                stops=request.sampling.stop,
                call_id_seed=f"{request.request_id}:{index}" if request.tools else None,
                one_call=not request.sampling.parallel_tool_calls,
            ),
            tokens=list(call.prompt),
        )
        for index, sampler in enumerate(samplers)
    ]
