"""Who asks, which episode a call belongs to, and which record it becomes.

Headers win over ``metadata``, which wins over OpenAI's own fields. Plain user ids are used to derive the keyed
hash and are kept nowhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from tidegate.core.errors import RequestError
from tidegate.core.hashing import canonical_json, content_hash
from tidegate.core.types import JsonObject, Messages, Split, Task, Tools
from tidegate.gateway.body import shown
from tidegate.gateway.chat_schema import ChatRequest

IDEMPOTENCY_HEADER = "idempotency-key"
"""What the OpenAI SDKs forward when a caller sets it with ``extra_headers``; they set none by themselves."""

SEARCH_HEADER = "x-tidegate-search"
"""Asks for a search; see :mod:`tidegate.gateway.searching`."""

_EPISODE_ID = re.compile(r"[\x21-\x7e]{1,200}")
_LINES = ("main", "side")
_MAX_USER_CHARACTERS = 512
_ID_DIGITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """``keyed``: the caller named an idempotency key, so the id is the same when it asks again.

    ``named_episode`` is False when the caller named none and the call is an episode of its own.
    """

    interaction_id: str
    keyed: bool
    episode_id: str
    named_episode: bool
    user_key: str
    split: Split
    main_line: bool
    consent: bool


def identify(
    chat: ChatRequest,
    raw: JsonObject,
    headers: Headers,
    *,
    new_id: Callable[[], str],
    split_of: Callable[[str], tuple[str, Split]],
) -> Identity:
    """Work out everything that a record needs to know about its caller.

    Raises:
        RequestError: an episode id, user id, line or idempotency key is not usable.
    """
    metadata = chat.metadata or {}
    user = _user_id(chat, headers)
    key = headers.get(IDEMPOTENCY_HEADER)
    interaction_id = f"chatcmpl-{keyed_id(key, headers, user, raw) if key else new_id()}"
    named = headers.get("x-tidegate-episode") or metadata.get("tidegate_episode")
    if named and not _EPISODE_ID.fullmatch(named):
        raise RequestError(
            f"episode id {shown(named)} is not usable; send 1 to 200 printable ASCII characters without spaces "
            "in 'x-tidegate-episode' or metadata.tidegate_episode",
            param="metadata.tidegate_episode",
        )
    episode_id = named or interaction_id
    user_key, split = split_of(user or episode_id)
    return Identity(
        interaction_id=interaction_id,
        keyed=bool(key),
        episode_id=episode_id,
        named_episode=bool(named),
        user_key=user_key,
        split=split,
        main_line=_line(metadata, headers) == "main",
        consent=chat.store is not False,
    )


def keyed_id(key: str, headers: Headers, user: str | None, raw: JsonObject) -> str:
    """A digest that is the same for the same request of the same caller under the same idempotency key.

    The request is part of it, a search that its header asks for too, so that a key that is used again for something
    else never gets the wrong answer; how the answer is delivered (``stream``) is not.
    """
    asked = {name: value for name, value in raw.items() if name not in ("stream", "stream_options")}
    if SEARCH_HEADER in headers:
        asked[SEARCH_HEADER] = headers[SEARCH_HEADER]
    caller = headers.get("authorization", "")
    return content_hash({"key": key, "caller": caller, "user": user, "asked": asked})[:_ID_DIGITS]


def _user_id(chat: ChatRequest, headers: Headers) -> str | None:
    metadata = chat.metadata or {}
    user = (
        headers.get("x-tidegate-user") or metadata.get("tidegate_user") or chat.safety_identifier or chat.user or None
    )
    if user and len(user) > _MAX_USER_CHARACTERS:
        raise RequestError(
            f"user id {shown(user)} has {len(user)} characters; at most {_MAX_USER_CHARACTERS} are accepted",
            param="user",
        )
    return user


def _line(metadata: Mapping[str, str], headers: Headers) -> str:
    line = headers.get("x-tidegate-line") or metadata.get("tidegate_line") or "main"
    if line not in _LINES:
        raise RequestError(
            f"tidegate_line is {shown(line)}; choose one of 'main', 'side'", param="metadata.tidegate_line"
        )
    return line


def declared_task(
    metadata: Mapping[str, str],
    messages: Messages,
    tools: Tools,
    *,
    json_schema: str | None,
    tool_choice: str | None,
) -> Task | None:
    """The replayable task that the first call of an episode declares through ``metadata``, if it does.

    Agents send the same metadata with every call; once the messages hold an assistant turn the declaration
    has been taken and is passed over.

    Raises:
        RequestError: a declaration is incomplete.
    """
    verifier, reference = metadata.get("tidegate_verifier"), metadata.get("tidegate_reference")
    if verifier is None and reference is None:
        return None
    for name, value, other in (
        ("tidegate_verifier", verifier, "tidegate_reference"),
        ("tidegate_reference", reference, "tidegate_verifier"),
    ):
        if not value:
            raise RequestError(
                f"metadata.{name} is {value!r} beside metadata.{other}; a replayable task needs both",
                param=f"metadata.{name}",
            )
    if any(message["role"] == "assistant" for message in messages):
        return None
    answer = _reference(reference or "")
    identity: dict[str, Any] = {"messages": messages, "tools": tools, "verifier": verifier, "reference": answer}
    if json_schema is not None:
        identity["json_schema"] = json_schema
    if tool_choice is not None:
        identity["tool_choice"] = tool_choice
    return Task(
        id=f"task-{content_hash(identity)[:16]}",
        messages=messages,
        tools=tools,
        verifier=verifier or "",
        reference=answer,
        kind=metadata.get("tidegate_kind") or "default",
        environment=metadata.get("tidegate_environment") or None,
        json_schema=json_schema,
        tool_choice=tool_choice,
    )


def _reference(text: str) -> Any:
    """JSON when it is JSON (without NaN, infinity and lone surrogates), else the text itself."""
    try:
        value = json.loads(text)
        canonical_json(value).encode()
    except (ValueError, RecursionError):
        return text
    return value
