"""Reading request bodies: bounded while they arrive, JSON only, and validated into models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from tidegate.core.errors import BodyTooLargeError, MediaTypeError, RequestError
from tidegate.core.hashing import canonical_json
from tidegate.gateway.problems import ClientGoneError

_SHOWN_CHARACTERS = 80
_SHOWN_PROBLEMS = 3

ModelT = TypeVar("ModelT", bound=BaseModel)


async def read_json_object(receive: Receive, headers: Headers, *, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        MediaTypeError: the content type is not JSON, or the body is compressed.
        BodyTooLargeError: the body is longer than ``max_bytes``, declared or found while reading.
        RequestError: the body is not one JSON object in UTF-8, or does not arrive within ``timeout_s``.
        ClientGoneError: the client hung up half-way.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError(f"content type {media_type!r} is not read; send 'Content-Type: application/json'")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise MediaTypeError(f"content encoding {encoding!r} is not read; send the body uncompressed")
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(receive, headers, max_bytes=max_bytes)
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {timeout_s:g} s; send it again in one piece") from error
    return _parse(body)


async def _read(receive: Receive, headers: Headers, *, max_bytes: int) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        _too_large(declared, max_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            _too_large(f"more than {max_bytes}", max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(size: str, max_bytes: int) -> NoReturn:
    raise BodyTooLargeError(
        f"the body has {size} bytes; at most {max_bytes} are read, see 'server.max_body_bytes' in the settings"
    )


def _parse(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode())
        # NaN, 1e999 and a lone surrogate ("\ud800") parse, but could not be hashed, stored or sent
        canonical_json(value).encode()
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON in UTF-8: {reason}; send one JSON object") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {type(value).__name__}; send one JSON object")
    return value


def validated(model: type[ModelT], value: Mapping[str, Any], *, context: Any = None) -> ModelT:
    """Build a request model; ``context`` is for its validators.

    Raises:
        RequestError: names the fields at fault, their values and what is accepted; ``param`` is the first.
    """
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = ".".join(str(part) for part in problems[0]["loc"]) or None
        told = "; ".join(
            _describe(".".join(str(part) for part in p["loc"]), p["type"], p["input"], p["msg"])
            for p in problems[:_SHOWN_PROBLEMS]
        )
        raise RequestError(told, param=first) from error


def _describe(name: str, kind: str, value: Any, message: str) -> str:
    message = message.removeprefix("Value error, ")
    if kind == "missing":
        return f"{name!r} is missing; it is required"
    if not name:
        return message
    return f"{name!r} is {shown(value)}: {message[:1].lower()}{message[1:]}"


def shown(value: Any) -> str:
    """A value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
