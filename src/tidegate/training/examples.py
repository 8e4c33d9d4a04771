"""Reading a batch's examples and rendering them to tokens exactly as the serving engine would see them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from tidegate.core.chat import ChatTokenizer, content_text, encode_prompt, render_tool_call
from tidegate.core.errors import RequestError, TrainingError
from tidegate.core.types import Example, Messages, Tools
from tidegate.training.packing import TrainingSequence

_FIELDS = {field.name for field in fields(Example)}
_REQUIRED = {"id", "weight", "source", "kind"}
_HEAVIEST = 1e6  # beyond it a float could not hold the sum of a batch and its smallest member
_ROUNDING = 1e-4  # a recorded log-probability may lie above 0 by so much


class TrainingTokenizer(ChatTokenizer, Protocol):
    """The slice of a transformers tokenizer that rendering needs."""

    eos_token_id: int | None

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def all_special_tokens(self) -> Sequence[str]: ...


def read_examples(path: Path) -> tuple[Example, ...]:
    """Read a JSON Lines file of examples, one object with the fields of ``Example`` a line.

    Raises:
        TrainingError: the file cannot be read or a line is malformed; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"examples {str(path)!r} cannot be read: {error}; curate the batch again") from error
    return tuple(_example(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())


def _example(line: str, where: str) -> Example:
    try:
        values: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrainingError(f"{where}: not JSON ({error}); one example a line is expected") from error
    if not isinstance(values, dict) or not _REQUIRED <= set(values) <= _FIELDS:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise TrainingError(f"{where}: found {found}; an object with {sorted(_REQUIRED)} and any of {sorted(_FIELDS)}")
    for name in ("id", "kind", "source"):
        if not isinstance(values[name], str):
            raise TrainingError(f"{where}: {name} = {values[name]!r}; a text is expected")
    weight: Any = values["weight"]
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= _HEAVIEST:
        raise TrainingError(f"{where}: weight = {weight!r}; a number above 0 and up to {_HEAVIEST:g} is expected")
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return _checked(Example(**known))
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise TrainingError(f"{where}: example {values['id']!r}: {error}") from error


def _checked(example: Example) -> Example:
    _check_scores(example)
    if bool(example.token_ids) == bool(example.messages):
        raise ValueError("exactly one of token_ids and messages is expected")
    if example.token_ids:
        if len(example.token_ids) != len(example.loss_mask) or not set(example.loss_mask) <= {0, 1}:
            raise ValueError(
                f"{len(example.token_ids)} token_ids with a loss_mask of {len(example.loss_mask)}; "
                "equal lengths and a mask of 0 and 1 are expected"
            )
        tokens: tuple[Any, ...] = example.token_ids
        if not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise ValueError("token_ids must be integers from 0")
        return example
    roles = {index: example.messages[index].get("role") for index in example.trained_messages}
    if not roles or set(roles.values()) != {"assistant"}:
        raise ValueError(f"trained_messages name {roles or 'nothing'}; assistant messages are expected")
    return example


def _check_scores(example: Example) -> None:
    """Rewards and recorded log-probabilities of one example."""
    reward: Any = example.reward
    if reward is not None and (
        isinstance(reward, bool) or not isinstance(reward, (int, float)) or not 0 <= reward <= 1
    ):
        raise ValueError(f"reward = {reward!r}; a number in [0, 1] or null is expected")
    if not example.logprobs:
        return
    recorded: tuple[Any, ...] = example.logprobs
    if len(recorded) != len(example.token_ids):
        raise ValueError(f"{len(recorded)} logprobs for {len(example.token_ids)} token_ids; equal lengths are expected")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value <= _ROUNDING for value in recorded):
        raise ValueError("logprobs must be finite numbers up to 0")


def render_example(tokenizer: TrainingTokenizer, example: Example) -> tuple[TrainingSequence, ...]:
    """The training sequences of one example.

    Each trained assistant message is one model call: the prompt that serving would build from the messages
    before it, and the completion. A call whose prompt goes on exactly where the one before ended joins its
    sequence, as agents' calls mostly do; else it starts a new one. Only completions are trained.

    Raises:
        TrainingError: the messages cannot be rendered, or the tokenizer has no end-of-turn token.
    """
    if example.token_ids:
        return (_sequence(example, list(example.token_ids), list(example.loss_mask)),)
    rendered: list[TrainingSequence] = []
    tokens: list[int] = []
    mask: list[int] = []
    try:
        for index in sorted(set(example.trained_messages)):
            prompt = encode_prompt(tokenizer, example.messages[:index], example.tools)
            completion = completion_tokens(tokenizer, example.messages[: index + 1], example.tools, prompt=prompt)
            if tokens and list(prompt[: len(tokens)]) != tokens:
                rendered.append(_sequence(example, tokens, mask))
                tokens, mask = [], []
            mask = [*mask, *[0] * (len(prompt) - len(tokens)), *[1] * len(completion)]
            tokens = [*prompt, *completion]
    except (RequestError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"example {example.id!r} cannot be rendered: {type(error).__name__}: {error}; remove it from the batch"
        ) from error
    rendered.append(_sequence(example, tokens, mask))
    return tuple(rendered)


def teaches_control_tokens(tokenizer: TrainingTokenizer, example: Example) -> bool:
    """Whether the text of a trained message spells a token that ends turns or begins them.

    Whoever may send demonstrations could teach the model to end its turn and speak as somebody else.
    """
    trained = [example.messages[index] for index in example.trained_messages]
    texts = [content_text(message.get("content")) for message in trained]
    texts += [render_tool_call(call) for message in trained for call in message.get("tool_calls") or ()]
    return any(token in text for token in tokenizer.all_special_tokens for text in texts)


def completion_tokens(
    tokenizer: TrainingTokenizer, messages: Messages, tools: Tools, *, prompt: Sequence[int]
) -> tuple[int, ...]:
    """What the model should generate after ``prompt`` to say the last of ``messages``, end of turn included.

    Where the chat template continues the prompt, its own spelling and end token are taken: templates that know
    tools write calls in a form of their own. Else it is the plain text and the tokenizer's end token.
    """
    whole = encode_prompt(tokenizer, messages, tools, add_generation_prompt=False)
    if tuple(whole[: len(prompt)]) == tuple(prompt):
        rest = whole[len(prompt) :]
        special = set(tokenizer.all_special_ids)
        end = max((index for index, token in enumerate(rest) if token in special), default=None)
        if end is not None:
            return rest[: end + 1]
    if tokenizer.eos_token_id is None:
        raise TrainingError(
            "the tokenizer names no eos_token, so that no answer could end; add it to the model's files"
        )
    message = messages[-1]
    text = content_text(message.get("content"))
    text += "".join(render_tool_call(call) for call in message.get("tool_calls") or ())
    return (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)


def _sequence(example: Example, tokens: list[int], mask: list[int]) -> TrainingSequence:
    return TrainingSequence(
        example_id=example.id,
        token_ids=tuple(tokens),
        loss_mask=(0, *mask[1:]),
        weight=float(example.weight),
        logprobs=tuple(float(value) for value in example.logprobs),
    )
