"""Between the nouns of the core and table rows (plain strings, numbers and bytes). Pure.

What a client sent (messages, tools, tasks) keeps the order of its keys, because chat templates render it;
everything else is canonical JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tidegate.core.errors import RequestError, StoreError
from tidegate.core.hashing import canonical_json, ordered_json
from tidegate.core.types import Choice, FinishReason, Interaction, Sampling, Split, Task
from tidegate.stores.packing import pack_logprobs, pack_token_ids, unpack_logprobs, unpack_token_ids

_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))

Row: TypeAlias = Mapping[Any, Any]  # a RowMapping's keys are not typed as str


def to_json(value: Any, what: str, *, canonical: bool = True) -> str:
    """Serialise a column.

    Raises:
        RequestError: the value holds something that JSON cannot express; ``what`` names it.
    """
    try:
        text = canonical_json(value) if canonical else ordered_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} cannot be stored as JSON: {error}; finite JSON values are accepted") from error
    # A lone surrogate is legal in a client's JSON but has no UTF-8 form; escaped it survives.
    return text if _encodable(text) else json.dumps(json.loads(text), separators=(",", ":"), allow_nan=False)


def check_finite(what: str, **numbers: float) -> None:
    """Refuse times and durations that are not finite: NaN is NULL to SQLite, and has no place in an order.

    Raises:
        RequestError: one is NaN or infinite; ``what`` names the record.
    """
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise RequestError(f"{what} has the {name} {number!r}; a finite number of seconds is accepted")


def from_json(text: str) -> Any:
    """Read a column.

    Raises:
        StoreError: the text is damaged.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise StoreError(f"a stored JSON value is damaged: {error}; restore the database from a backup") from error


def interaction_row(interaction: Interaction) -> dict[str, Any]:
    """A row of ``interactions``; user and split are columns of its episode.

    Raises:
        RequestError: the record cannot be stored; the message names its id and the field.
    """
    named = f"interaction {interaction.id!r}"
    for choice in interaction.choices:
        if choice.token_ids and not choice.token_exact:
            raise RequestError(
                f"{named}: choice {choice.index} has {len(choice.token_ids)} tokens and is marked as lacking some; "
                "all of them or none are accepted"
            )
        if len(choice.logprobs) not in (0, len(choice.token_ids)):
            raise RequestError(
                f"{named}: choice {choice.index} has {len(choice.token_ids)} tokens and {len(choice.logprobs)} "
                "log-probabilities; as many or none are accepted"
            )
    ids = (interaction.id, interaction.episode_id, interaction.user_key, interaction.release_id)
    if not all(_encodable(text) and "\0" not in text for text in (*ids, interaction.engine_replica)):
        raise RequestError(
            f"{named} cannot be stored: an id holds a lone surrogate or a NUL; UTF-8 text without them is accepted"
        )
    check_finite(named, created_at=interaction.created_at, latency_s=interaction.latency_s)
    return {
        "id": interaction.id,
        "episode_id": interaction.episode_id,
        "created_at": interaction.created_at,
        "messages": _client_json(interaction.messages, f"messages of {named}"),
        "tools": _client_json(interaction.tools, f"tools of {named}"),
        "sampling": to_json(_sampling_json(interaction.sampling), f"sampling of {named}"),
        "prompt_tokens": pack_token_ids(interaction.prompt_token_ids),
        "choices": _client_json([_choice_json(choice) for choice in interaction.choices], f"choices of {named}"),
        "choice_tokens": pack_token_ids([t for choice in interaction.choices for t in choice.token_ids]),
        "choice_logprobs": pack_logprobs([p for choice in interaction.choices for p in choice.logprobs]),
        "release_id": interaction.release_id,
        "engine_replica": interaction.engine_replica,
        "latency_s": interaction.latency_s,
        "main_line": interaction.main_line,
        "consent": interaction.consent,
        "task": None if interaction.task is None else task_json(interaction.task, f"task of {named}"),
    }


def interaction_of(row: Row) -> Interaction:
    """The record of a row that carries its episode's ``user_key`` and ``split`` too.

    Raises:
        StoreError: the row is damaged.
    """
    sampling = from_json(row["sampling"])
    return Interaction(
        id=row["id"],
        episode_id=row["episode_id"],
        user_key=row["user_key"],
        split=Split(row["split"]),
        created_at=row["created_at"],
        messages=tuple(from_json(row["messages"])),
        tools=tuple(from_json(row["tools"])),
        sampling=Sampling(**changed(sampling, stop=tuple(sampling["stop"]))),
        prompt_token_ids=unpack_token_ids(row["prompt_tokens"]),
        choices=_choices(row),
        release_id=row["release_id"],
        engine_replica=row["engine_replica"],
        latency_s=row["latency_s"],
        main_line=bool(row["main_line"]),
        consent=bool(row["consent"]),
        task=None if row["task"] is None else task_of(row["task"]),
    )


def task_json(task: Task, what: str) -> str:
    """A task as one JSON object.

    Raises:
        RequestError: its reference or messages cannot be stored.
    """
    fields = {
        "id": task.id,
        "messages": [dict(message) for message in task.messages],
        "tools": [dict(tool) for tool in task.tools],
        "verifier": task.verifier,
        "reference": task.reference,
        "kind": task.kind,
        "environment": task.environment,
        "json_schema": task.json_schema,
        "tool_choice": task.tool_choice,
    }
    return to_json(fields, what, canonical=False)


def task_of(text: str) -> Task:
    """Inverse of :func:`task_json`."""
    fields = from_json(text)
    return Task(**changed(fields, messages=tuple(fields["messages"]), tools=tuple(fields["tools"])))


def episode_row(first: Interaction) -> dict[str, Any]:
    """A row of ``episodes`` from one of its interactions."""
    return {
        "id": first.episode_id,
        "user_key": first.user_key,
        "split": str(first.split),
        "first_at": first.created_at,
    }


def changed(row: Row, **changes: Any) -> dict[str, Any]:
    """A copy of ``row`` with some columns replaced."""
    return {**row, **changes}


def _client_json(values: Sequence[Mapping[str, Any]], what: str) -> str:
    return to_json([dict(value) for value in values], what, canonical=False)


def _sampling_json(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in _SAMPLING}


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "tool_calls": [dict(call) for call in choice.tool_calls],
        "finish_reason": str(choice.finish_reason),
        "invalid_tool_call": choice.invalid_tool_call,
        "tokens": len(choice.token_ids),
        "logprobs": len(choice.logprobs),
        **({} if choice.token_exact else {"token_exact": False}),
        **({} if choice.delivered else {"delivered": False}),
    }


def _choices(row: Row) -> tuple[Choice, ...]:
    token_ids = unpack_token_ids(row["choice_tokens"])
    logprobs = unpack_logprobs(row["choice_logprobs"])
    choices: list[Choice] = []
    token_at = logprob_at = 0
    for fields in from_json(row["choices"]):
        token_end, logprob_end = token_at + fields["tokens"], logprob_at + fields["logprobs"]
        choices.append(
            Choice(
                index=fields["index"],
                token_ids=token_ids[token_at:token_end],
                logprobs=logprobs[logprob_at:logprob_end],
                text=fields["text"],
                tool_calls=tuple(fields["tool_calls"]),
                finish_reason=FinishReason(fields["finish_reason"]),
                invalid_tool_call=fields["invalid_tool_call"],
                token_exact=fields.get("token_exact", True),
                delivered=fields.get("delivered", True),
            )
        )
        token_at, logprob_at = token_end, logprob_end
    if (token_at, logprob_at) != (len(token_ids), len(logprobs)):
        raise StoreError(
            f"interaction {row['id']!r} holds {len(token_ids)} completion tokens and {len(logprobs)} "
            f"log-probabilities, its choices claim {token_at} and {logprob_at}: the row is damaged"
        )
    return tuple(choices)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
