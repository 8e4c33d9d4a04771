"""The outermost layer of an app: request ids, keys, metrics, and an OpenAI-shaped answer to every failure.

Plain ASGI: nothing is buffered, so streams stay streams.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.core.errors import AuthenticationError, TidegateError
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.problems import ClientGoneError, Problem, boundary

_log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_GONE = "499"
_MODEL_PREFIX = "/v1/models/"


class EdgeMiddleware:
    """Wraps a whole app.

    Args:
        app: the app.
        new_id: makes request ids for clients that send none.
        keys: accepted bearer tokens; empty accepts every caller.
        open_paths: paths that need no key.
        routes: paths that may be metric labels; anything else is counted as ``unmatched``.
        metrics: where to count; None counts nothing.
        monotonic: seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], str],
        keys: Collection[str] = (),
        open_paths: Collection[str] = (),
        routes: Collection[str] = (),
        metrics: GatewayMetrics | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._keys = tuple(key.encode() for key in keys)
        self._open_paths = frozenset(open_paths)
        self._routes = frozenset(routes)
        self._metrics = metrics
        self._monotonic = monotonic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_GONE
        request_id = self._request_id(Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        began_s = self._monotonic()
        if self._metrics is not None:
            self._metrics.in_flight.inc()
        try:
            await self._serve(scope, receive, send_with_id)
        except TidegateError as error:
            if status != _CLIENT_GONE:
                raise  # the head is out: closing the connection is the only honest signal left
            await Problem.of(error).response()(scope, receive, send_with_id)
        except ClientGoneError:
            _log.debug("request %s: the client went away", request_id)
        finally:
            self._count(scope["path"], status, self._monotonic() - began_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["path"] not in self._open_paths:
            self._check_key(Headers(scope=scope))
        with boundary("the server", TidegateError):
            await self._app(scope, receive, send)

    def _request_id(self, headers: Headers) -> str:
        given = headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else f"req-{self._new_id()}"

    def _check_key(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode() if scheme.lower() == "bearer" else b""
        # every key is compared, so that the time taken says nothing about which came close
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            told = "is not known" if given else "is missing"
            raise AuthenticationError(f"the API key {told}; send 'Authorization: Bearer KEY' with a configured key")

    def _count(self, path: str, status: str, seconds: float) -> None:
        if self._metrics is None:
            return
        route = path if path in self._routes else "unmatched"
        if path.startswith(_MODEL_PREFIX):
            route = f"{_MODEL_PREFIX}{{id}}"
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(route, status).inc()
        self._metrics.request_seconds.labels(route).observe(max(seconds, 0.0))
