"""Answers that must match a JSON Schema: which tokens may come next, by llguidance.

White space between JSON tokens is left out, because a model that may write white space anywhere may write it for ever.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from tidegate.core.errors import RequestError

_KEPT_GRAMMARS = 64
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


class Constraint:
    """What one answer may still say. Lives on the decode thread once it is made."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary_size: int) -> None:
        """Use :meth:`Grammars.constraint`."""
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
    """JSON Schemas compiled for one vocabulary; safe to use from several threads.

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
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, schema: str) -> Constraint:
        """A fresh constraint for one answer.

        Args:
            schema: a JSON Schema as JSON text.

        Raises:
            RequestError: the schema is malformed, or uses a keyword that can't be held to; the message names it.
        """
        with self._lock:
            matcher = self._compiled.get(schema)
            if matcher is None:
                matcher = self._compile(schema)
                self._compiled[schema] = matcher
                if len(self._compiled) > _KEPT_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(schema)
            return Constraint(matcher.deep_copy(), self._vocabulary_size)

    def _compile(self, schema: str) -> llguidance.LLMatcher:
        if self._vocabulary is None:
            try:
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocabulary_size, eos_token=self._end_ids
                )
            except ValueError as error:
                raise RequestError(
                    f"response_format can't be held to with this model's tokenizer ({error}); leave it out",
                    param="response_format",
                ) from error
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(
                f"the JSON schema of response_format can't be held to: {matcher.get_error()}; change or leave out what "
                "the message names",
                param="response_format",
            )
        return matcher
