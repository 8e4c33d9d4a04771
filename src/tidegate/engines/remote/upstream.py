"""HTTP to one server: its address, its key, its limits, and what its failures mean here.

The address comes from the settings and from nowhere else. Redirects are not followed, no proxy or password file of
the environment is used, no cookie is kept. The key goes into one header and into no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tidegate.core.errors import (
    EngineBusyError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
    TidegateError,
)
from tidegate.core.types import JsonObject
from tidegate.engines.remote.events import EventReader
from tidegate.engines.remote.texts import shown, whole_text, without_secret

MAX_BODY_BYTES = 64 << 20
"""Log-probabilities of a long prompt are some megabytes; an endless body must end."""
MAX_ERROR_BYTES = 64 << 10
_SHOWN_CHARACTERS = 300
_KEEP_ALIVE_S = 4.0
"""Below the 5 s of uvicorn, behind which most of these servers stand: who closes first never meets a request."""
_LONGEST_RETRY_S = 86_400
_RETRY_DIGITS = 9
"""More of them are no time to wait, and thousands no number that Python reads."""
_STATUSES = range(400, 600)
_END_S = 0.25
"""A server that has said that it is done and does not end the response by then is hung up on."""


class RefusedError(Exception):
    """The server answered with another status than 200. ``message`` is its own, cut and without the key."""

    def __init__(self, where: str, status: int, message: str, retry_after_s: int | None) -> None:
        super().__init__(f"{where} answered {status}: {message}")
        self.where = where
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    def as_error(self) -> TidegateError:
        """What a client of ours is told."""
        told = f"{self}; repeat later"
        match self.status:
            case 400 | 413 | 415 | 422:
                error: TidegateError = RequestError(f"the upstream refuses the request: {self.message}")
            case 401 | 403:  # its message may quote the key
                error = EngineError(f"the upstream does not accept our key ({self.status}); see engine.api_key_env")
            case 408 | 504:
                error = EngineTimeoutError(told)
            case 429:
                error = EngineBusyError(told, retry_after_s=self.retry_after_s)
            case 503:
                error = EngineUnavailableError(told, retry_after_s=self.retry_after_s)
            case 404:
                error = EngineError(f"{self}; see engine.urls and engine.model")
            case 301 | 302 | 303 | 307 | 308:
                error = EngineError(f"{self.where} redirects, which is not followed; put its target into engine.urls")
            case _:
                error = EngineError(str(self))
        return error


class Upstream:
    """One server. Make it where an event loop runs, and close it.

    Args:
        url: ``http(s)://host[:port][/prefix]``, see :func:`tidegate.config.engine.upstream_url`.
        key: sent as a bearer token; None sends none.
        connect_timeout_s: longest time to connect.
        read_timeout_s: longest silence while an answer is awaited or under way.
        socket: a Unix socket to connect to instead of the host of ``url``, which then only names the server.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 120.0,
        socket: Path | None = None,
    ) -> None:
        self.url = url
        self._key = key
        self._read_timeout_s = read_timeout_s
        self._connect_timeout_s = connect_timeout_s
        headers = {"Accept-Encoding": "identity", "User-Agent": "tidegate"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            if socket is None
            else aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s),
        )

    async def close(self) -> None:
        """End every connection."""
        await self._session.close()

    async def get(self, path: str, *, timeout_s: float | None = None) -> JsonObject:
        """A JSON object.

        Raises:
            RefusedError: the status is not 200.
            EngineError: the server cannot be reached, is silent too long, or answers something else.
        """
        with self.speakable_errors():
            async with self._response("GET", path, None, timeout_s=timeout_s) as response:
                return await self._object(response)

    async def post(self, path: str, body: JsonObject) -> JsonObject:
        """The JSON object that a request is answered with. Raises as :meth:`get`."""
        with self.speakable_errors():
            async with self._response("POST", path, body) as response:
                return await self._object(response)

    async def call(self, method: str, path: str, body: JsonObject | None, *, timeout_s: float | None = None) -> None:
        """A request of which only the status matters. Raises as :meth:`get`."""
        with self.speakable_errors():
            async with self._response(method, path, body, timeout_s=timeout_s):
                pass

    async def stream(self, path: str, body: JsonObject) -> AsyncGenerator[JsonObject]:
        """The objects of a stream of server-sent events, up to ``[DONE]``. Closing it cancels the request.

        Read it within :meth:`speakable_errors`: what is wrong with an object shows only to whom reads it.

        Raises:
            RefusedError: the status is not 200.
            EngineError: it cannot be reached, breaks off, is silent too long, or sends something else.
        """
        async with self._response("POST", path, body) as response:
            if response.content_type != "text/event-stream":
                raise EngineError(
                    f"{self.url}{path} answered with content type {shown(response.content_type)}; "
                    "'text/event-stream' is expected: is it a server with OpenAI's API?"
                )
            events = EventReader()
            with self._failures(path):
                while not events.done and (piece := await response.content.readany()):
                    for event in events.feed(piece):
                        yield self._with_speakable_error(event)
            events.finish()
            await _to_its_end(response)

    @contextmanager
    def speakable_errors(self) -> Generator[None]:
        """An error of ours that leaves here may be repeated: it holds neither the key nor half a character."""
        try:
            yield
        except TidegateError as error:
            told = self._speakable(str(error))
            if told == str(error):
                raise
            error.args = (told,)
            raise error from None  # its cause may hold the same

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: JsonObject | None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        data = None if body is None else json.dumps(body, ensure_ascii=True).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        limits: dict[str, Any] = {} if timeout_s is None else {"timeout": aiohttp.ClientTimeout(total=timeout_s)}
        with self._failures(path, timeout_s):
            response = await self._session.request(
                method, f"{self.url}{path}", data=data, headers=headers, allow_redirects=False, **limits
            )
        try:
            if response.status != 200:
                with self._failures(path):
                    raise await self._refusal(response, path)
            yield response
        finally:
            response.close()  # what has not been read is not waited for: closing the connection stops the server

    async def _object(self, response: aiohttp.ClientResponse) -> JsonObject:
        path = response.url.path
        with self._failures(path):
            raw = await _read(response, MAX_BODY_BYTES + 1)
        if len(raw) > MAX_BODY_BYTES:
            raise EngineError(f"{self.url}{path} answered with more than {MAX_BODY_BYTES} bytes")
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.url}{path} answered with content type {shown(response.content_type)}, which is no JSON; "
                "is it a server with OpenAI's API?"
            ) from error
        if not isinstance(value, dict):
            raise EngineError(f"{self.url}{path} answered with a JSON {type(value).__name__}; an object is expected")
        return value

    async def _refusal(self, response: aiohttp.ClientResponse, path: str) -> RefusedError:
        text = (await _read(response, MAX_ERROR_BYTES)).decode(errors="replace")
        message = _cut(self._speakable(_error_message(text)))
        return RefusedError(f"{self.url}{path}", response.status, message, _retry_after_s(response.headers))

    def _with_speakable_error(self, event: JsonObject) -> JsonObject:
        """An event whose error, if it is one, may be repeated."""
        if not event.get("error"):
            return event
        error = event["error"]
        told: dict[str, Any] = {"message": _cut(self._speakable(_error_message(json.dumps({"error": error}))))}
        code = error.get("code") if isinstance(error, dict) else None
        if type(code) is int and code in _STATUSES:
            told["code"] = code
        return {"error": told}

    def _speakable(self, text: str) -> str:
        return whole_text(without_secret(text, self._key) if self._key else text)

    @contextmanager
    def _failures(self, path: str, timeout_s: float | None = None) -> Generator[None]:
        """Every way in which a connection fails, as an error of ours."""
        where = f"{self.url}{path}"
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailableError(  # nothing was asked yet: another replica may be
                f"{where}: no connection within {self._connect_timeout_s:g} s; look whether the server runs, or raise "
                "engine.connect_timeout_s"
            ) from error
        except TimeoutError as error:
            if timeout_s is not None:
                limit = f"{timeout_s:g} s"
            else:
                limit = f"{self._read_timeout_s:g} s; look what the server does, or raise engine.read_timeout_s"
            raise EngineTimeoutError(f"{where}: no answer within {limit}") from error
        except (aiohttp.ClientConnectorError, ssl.SSLError) as error:
            raise EngineUnavailableError(
                f"{where} cannot be reached: {error}; is the server running, and is engine.urls right?"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{where}: the connection broke: {type(error).__name__}: {_cut(str(error))}") from error


async def _to_its_end(response: aiohttp.ClientResponse) -> None:
    """Read what follows an answer, which is nothing but its end: only then can the connection be used again."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_END_S):
            while await response.content.readany():
                pass


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) >= most:
            return bytes(data[:most])
    return bytes(data)


def _error_message(text: str) -> str:
    """What the common servers mean by an error body."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message", "detail", "error_message"):
        found = value.get(name) if isinstance(value, dict) else None
        if isinstance(found, Mapping):
            found = found.get("message")
        if isinstance(found, str):
            return found
    return text


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _retry_after_s(headers: Mapping[str, str]) -> int | None:
    given = headers.get("Retry-After", "").strip()
    if not given.isascii() or not given.isdecimal() or len(given) > _RETRY_DIGITS:
        return None
    return min(int(given), _LONGEST_RETRY_S)
