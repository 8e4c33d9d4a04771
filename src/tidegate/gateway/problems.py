"""Errors as HTTP responses in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from tidegate.core.errors import EngineBusyError, EngineUnavailableError, RequestError, TidegateError

_log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""A full queue or a busy store is usually free again within a second."""

_TYPES = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}
_RETRYABLE = frozenset({429, 503})
_ROUTE_CODES = {404: "not_found", 405: "method_not_allowed"}


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer. There is nobody to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One failure as the client sees it."""

    status: int
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, error: TidegateError) -> Problem:
        """What a client is told about an error of ours."""
        status = error.http_status
        headers: dict[str, str] = {}
        if status in _RETRYABLE:
            told = error.retry_after_s if isinstance(error, EngineBusyError | EngineUnavailableError) else None
            headers["retry-after"] = str(RETRY_AFTER_S if told is None else told)
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        param = error.param if isinstance(error, RequestError) else None
        return cls(status=status, code=error.code, message=str(error), param=param, headers=headers)

    @classmethod
    def of_route(cls, error: HTTPException, *, method: str, path: str) -> Problem:
        """What a client is told when no route takes its request."""
        messages = {
            404: f"there is no {path!r} here; the API is under '/v1', its models under '/v1/models'",
            405: f"{path!r} does not take {method!r}; accepted: {(error.headers or {}).get('Allow', 'other methods')}",
        }
        return cls(
            status=error.status_code,
            code=_ROUTE_CODES.get(error.status_code, "invalid_request"),
            message=messages.get(error.status_code, str(error.detail)),
            headers=error.headers or {},
        )

    def body(self) -> dict[str, Any]:
        """The JSON object, also sent as an event when a stream breaks."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The whole answer; ``headers`` come on top of the problem's own."""
        return JSONResponse(self.body(), status_code=self.status, headers={**self.headers, **(headers or {})})


@contextmanager
def boundary(stage: str, raises: type[TidegateError]) -> Generator[None]:
    """Attribute whatever ``stage`` raises that is not one of our errors.

    The client learns which stage failed; the details stay in the log because they may quote prompts or paths.
    """
    try:
        yield
    except (TidegateError, ClientGoneError, HTTPException):
        raise
    except Exception as error:
        _log.exception("%s failed unexpectedly", stage)
        name = type(error).__name__
        raise raises(f"{stage} failed unexpectedly ({name}); the server's log has the details") from error
