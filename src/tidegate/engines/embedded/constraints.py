"""Answers that are held to a form: which tokens may come next, by llguidance.

White space between JSON tokens is left out, because a model that may write white space anywhere may write it for ever.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from tidegate.core.errors import RequestError
from tidegate.core.json_schemas import check_schema
from tidegate.engines.embedded.forms import Form

_KEPT_GRAMMARS = 16
"""Each may take up to some 40 MB by the limits below, most take a few kB."""
_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=300_000, max_lexer_states=20_000, max_grammar_size=50_000)
_SHOWN_CHARACTERS = 300
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class Constraint:
    """What one answer may still say. Lives on the decode thread once it is made."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary_size: int, form: Form) -> None:
        """Use :meth:`Grammars.constraints`."""
        self.form = form
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._fault = ""

    @property
    def fault(self) -> str:
        """Why nothing may follow, although the answer is not whole; empty while all is well."""
        return self._fault

    def allowed(self) -> torch.Tensor:
        """Whether each token (V,) may come next; end tokens may where the answer is whole. None may after a fault."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # its mask then allows the end, and a broken answer would pass for a whole one
            self._fault = self._matcher.get_error()
            return torch.zeros(self._vocabulary_size, dtype=torch.bool)
        bits = np.unpackbits(packed, bitorder="little")[: self._vocabulary_size]
        return torch.from_numpy(bits.astype(np.bool_))

    def accept(self, token_id: int) -> None:
        """Take the token that was sampled; one that :meth:`allowed` excluded is a fault."""
        if not self._matcher.consume_token(token_id):
            self._fault = self._matcher.get_error()


class Grammars:
    """Forms compiled for one vocabulary, on a thread of their own: neither decoding nor other requests wait.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocabulary_size: logits that the model gives, V.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, *, vocabulary_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_ids = sorted(end_ids)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Form, llguidance.LLMatcher | RequestError] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidegate-grammar")

    def close(self) -> None:
        """End the thread; a form that is being compiled is finished first."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    async def constraints(self, form: Form, count: int) -> list[Constraint]:
        """Fresh constraints for so many answers.

        Args:
            form: what they are held to.
            count: answers.

        Raises:
            RequestError: a schema is malformed or too large, or uses a keyword that can't be held to; the message
                names it.
        """
        found = self._known(form)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._compiler, self._compiled_once, form)
        if isinstance(found, RequestError):
            raise found
        return [Constraint(found.deep_copy(), self._vocabulary_size, form) for _ in range(count)]

    def _known(self, form: Form) -> llguidance.LLMatcher | RequestError | None:
        with self._lock:
            found = self._compiled.get(form)
            if found is not None:
                self._compiled.move_to_end(form)
            return found

    def _compiled_once(self, form: Form) -> llguidance.LLMatcher | RequestError:
        """Compile unless whoever waited before has done so; refusals are remembered too."""
        found = self._known(form)
        if found is None:
            try:
                found = self._compile(form)
            except RequestError as error:
                found = error
            with self._lock:
                self._compiled[form] = found
                while len(self._compiled) > _KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
        return found

    def _compile(self, form: Form) -> llguidance.LLMatcher:
        for token in self._tokenizer.get_added_vocab():
            if any(token in schema for schema in form.schemas):
                raise _refused(form, f"it holds {token!r}, which is a token of the model's own and no text")
        try:
            for schema in form.schemas:
                check_schema(json.loads(schema))
            if self._vocabulary is None:
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocabulary_size, eos_token=self._end_ids
                )
            if form.grammar is None:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(form.schemas[0], overrides=_COMPACT)
            else:
                grammar = llguidance.LLMatcher.grammar_from_lark(form.grammar)
        except (ValueError, RecursionError) as error:
            raise _refused(form, str(error)) from error
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()  # what can't even begin, or only at great length, is found here
        if first.is_error():
            raise _refused(form, first.get_error())
        return matcher


def _refused(form: Form, reason: str) -> RequestError:
    """Only the first line of what the compiler says: what follows are its own states."""
    words = (reason.splitlines() or [""])[0][:_SHOWN_CHARACTERS]
    return RequestError(
        f"{form.source} can't be held to: {words}; change or leave out what the message names", param=form.param
    )
