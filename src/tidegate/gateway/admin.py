"""The admin app: releases are listed, published, promoted and rolled back here, and nowhere else over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidegate.core.errors import ConfigError
from tidegate.core.types import JsonObject, Release
from tidegate.gateway.body import read_json_object, validated
from tidegate.gateway.factory import bare_app
from tidegate.gateway.middleware import EdgeMiddleware

_MAX_BODY_BYTES = 1 << 16
_BODY_TIMEOUT_S = 10.0

BodyT = TypeVar("BodyT", bound=BaseModel)


class Publisher(Protocol):
    """Changes what is served. A refusal is one of our errors and leaves the champion as it was."""

    async def publish(self, candidate_id: str, *, against: str) -> Release:
        """Serve a certified candidate as a new release, unless another champion than ``against`` is served."""
        ...

    async def promote(self, release_id: str) -> Release:
        """Serve an earlier release's content again."""
        ...

    async def rollback(self, to: str | None, reason: str) -> Release:
        """Serve the previous champion's content again, or that of release ``to``."""
        ...

    async def status(self) -> JsonObject:
        """What is served and loaded now."""
        ...


class LiveTrials(Protocol):
    """Canaries, and the holdback beside the champion."""

    async def start_canary(self, candidate_id: str, *, against: str) -> JsonObject:
        """Put a certified candidate before a share of the users, unless another champion than ``against`` is served."""
        ...

    async def stop(self, reason: str) -> JsonObject:
        """End the canary that runs; its candidate is rejected."""
        ...

    def status(self) -> JsonObject:
        """What runs now, under ``canary`` and ``holdback``."""
        ...


class ReleaseInShadow(Protocol):
    """The release that answers copies of calls, and nobody."""

    async def start(self, release_id: str, share: float) -> JsonObject:
        """Put a release into the shadow, for a share in (0, 1] of the champion's calls."""
        ...

    async def stop(self, reason: str) -> JsonObject:
        """End it."""
        ...

    def status(self) -> JsonObject:
        """What runs now, under ``shadow``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminDependencies:
    """``releases`` lists all releases by number; ``new_id`` makes request ids."""

    publisher: Publisher
    live: LiveTrials
    shadow: ReleaseInShadow
    releases: Callable[[], Awaitable[Sequence[Release]]]
    new_id: Callable[[], str]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PublishRequest(_Body):
    """``candidate`` is the id of a certified candidate; ``against`` what it was judged against, as content hash
    or the word ``base``."""

    candidate: str = Field(min_length=1)
    against: str = Field(min_length=1)


class CanaryRequest(PublishRequest):
    """As :class:`PublishRequest`, for a share of the users."""


class StopRequest(_Body):
    """``reason`` goes into the audit log."""

    reason: str = Field(min_length=1, max_length=1000)


class PromoteRequest(_Body):
    """``release`` is the id of an earlier release."""

    release: str = Field(min_length=1)


class ShadowRequest(_Body):
    """``release`` is the id of a release, ``share`` of the champion's calls."""

    release: str = Field(min_length=1)
    share: float = Field(gt=0.0, le=1.0, allow_inf_nan=False)


class RollbackRequest(_Body):
    """``to`` names a release, None means the previous champion; ``reason`` goes into the audit log."""

    to: str | None = Field(default=None, min_length=1)
    reason: str = Field(min_length=1, max_length=1000)


def create_admin(deps: AdminDependencies, token: str) -> FastAPI:
    """Build the admin API, which serves loopback only and takes one bearer token.

    Raises:
        ConfigError: the token is empty, which would let everybody in.
    """
    if not token.strip():
        raise ConfigError("the admin token is empty; write a random one into the data directory's token file")
    app = bare_app("Tidegate admin")

    async def list_releases(request: Request) -> Response:
        del request
        return JSONResponse({"data": [release_json(release) for release in await deps.releases()]})

    async def show_status(request: Request) -> Response:
        del request
        return JSONResponse({**await deps.publisher.status(), **deps.live.status(), **deps.shadow.status()})

    async def publish(request: Request) -> Response:
        body = await _body(request, PublishRequest)
        return JSONResponse(release_json(await deps.publisher.publish(body.candidate, against=body.against)))

    async def promote(request: Request) -> Response:
        body = await _body(request, PromoteRequest)
        return JSONResponse(release_json(await deps.publisher.promote(body.release)))

    async def rollback(request: Request) -> Response:
        body = await _body(request, RollbackRequest)
        return JSONResponse(release_json(await deps.publisher.rollback(body.to, body.reason)))

    async def start_canary(request: Request) -> Response:
        body = await _body(request, CanaryRequest)
        return JSONResponse(dict(await deps.live.start_canary(body.candidate, against=body.against)))

    async def stop_canary(request: Request) -> Response:
        body = await _body(request, StopRequest)
        return JSONResponse(dict(await deps.live.stop(body.reason)))

    async def start_shadow(request: Request) -> Response:
        body = await _body(request, ShadowRequest)
        return JSONResponse(dict(await deps.shadow.start(body.release, body.share)))

    async def stop_shadow(request: Request) -> Response:
        body = await _body(request, StopRequest)
        return JSONResponse(dict(await deps.shadow.stop(body.reason)))

    app.add_route("/admin/releases", list_releases, methods=["GET"])
    app.add_route("/admin/status", show_status, methods=["GET"])
    app.add_route("/admin/publish", publish, methods=["POST"])
    app.add_route("/admin/canary", start_canary, methods=["POST"])
    app.add_route("/admin/canary/stop", stop_canary, methods=["POST"])
    app.add_route("/admin/shadow", start_shadow, methods=["POST"])
    app.add_route("/admin/shadow/stop", stop_shadow, methods=["POST"])
    app.add_route("/admin/promote", promote, methods=["POST"])
    app.add_route("/admin/rollback", rollback, methods=["POST"])
    app.add_middleware(EdgeMiddleware, new_id=deps.new_id, keys=(token,))
    return app


def release_json(release: Release) -> JsonObject:
    """A release as the admin API shows it."""
    return asdict(release)


async def _body(request: Request, model: type[BodyT]) -> BodyT:
    raw = await read_json_object(request.receive, request.headers, max_bytes=_MAX_BODY_BYTES, timeout_s=_BODY_TIMEOUT_S)
    return validated(model, raw)
