"""The public app: routes, and the layer around them."""

from __future__ import annotations

import ipaddress
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidegate.config.settings import ServerSettings
from tidegate.config.shadow import ShadowSettings
from tidegate.core.errors import ConfigError, NotFoundError, StoreError, TidegateError
from tidegate.gateway.chat import ChatEndpoint
from tidegate.gateway.dependencies import GatewayDependencies
from tidegate.gateway.feedback import FeedbackEndpoint
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.middleware import EdgeMiddleware
from tidegate.gateway.problems import Problem, boundary
from tidegate.gateway.shadow import ShadowCalls

_CHAMPION = "champion"
_NOBODY = "readiness check"
"""Spaces keep it apart from every episode id that a client may send."""
_OPEN_PATHS = ("/healthz", "/readyz", "/metrics")
_ROUTES = (*_OPEN_PATHS, "/v1/chat/completions", "/v1/models", "/v1/feedback")


def create_gateway(
    deps: GatewayDependencies, settings: ServerSettings, shadow: ShadowSettings | None = None
) -> FastAPI:
    """Build the OpenAI-compatible API.

    ``app.state.metrics`` holds its :class:`GatewayMetrics`, ``app.state.shadows`` its
    :class:`~tidegate.gateway.shadow.ShadowCalls`, to be closed before the app's server ends; ``shadow`` bounds them.

    Raises:
        ConfigError: no API key is configured for a host that others can reach.
    """
    if not settings.api_keys and not is_loopback(settings.host):
        raise ConfigError(
            f"server.host is {settings.host!r} and server.api_keys is empty, so that everybody in reach could use "
            "the API; set server.api_keys, or listen on '127.0.0.1'"
        )
    metrics = GatewayMetrics(deps.recorder_counts, deps.replicas)
    app = bare_app("Tidegate")
    app.state.metrics = metrics
    shadows = ShadowCalls(deps, metrics, shadow or ShadowSettings(), timeout_s=settings.request_timeout_s)
    app.state.shadows = shadows
    chat = ChatEndpoint(deps, metrics, settings, shadows)
    app.router.routes.append(Route("/v1/chat/completions", chat, methods=["POST"]))
    app.add_route("/v1/feedback", FeedbackEndpoint(deps, metrics, settings).handle, methods=["POST"])
    _add_models(app, deps)
    _add_operations(app, deps, metrics)
    app.add_middleware(
        EdgeMiddleware,
        new_id=deps.new_id,
        keys=settings.api_keys,
        open_paths=_OPEN_PATHS,
        routes=_ROUTES,
        metrics=metrics,
        monotonic=deps.monotonic,
    )
    return app


def bare_app(title: str) -> FastAPI:
    """An app whose routing failures have OpenAI's shape, without the pages that would load foreign scripts."""
    app = FastAPI(title=title, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    async def on_routing_failure(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        return Problem.of_route(error, method=request.method, path=request.url.path).response()

    app.add_exception_handler(HTTPException, on_routing_failure)
    return app


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _add_models(app: FastAPI, deps: GatewayDependencies) -> None:
    def listed() -> list[dict[str, Any]]:
        return [
            {"id": name, "object": "model", "created": int(created), "owned_by": "tidegate"}
            for name, created in deps.router.models()
        ]

    async def list_models(request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": listed()})

    async def show_model(request: Request) -> Response:
        wanted = request.path_params["model_id"]
        models = listed()
        for model in models:
            if model["id"] == wanted:
                return JSONResponse(model)
        names = ", ".join(repr(model["id"]) for model in models)
        raise NotFoundError(f"model {wanted!r} is not served here; choose one of {names}", param="model")

    app.add_route("/v1/models", list_models, methods=["GET"])
    app.add_route("/v1/models/{model_id:path}", show_model, methods=["GET"])


def _add_operations(app: FastAPI, deps: GatewayDependencies, metrics: GatewayMetrics) -> None:
    async def healthz(request: Request) -> Response:
        del request
        return JSONResponse({"status": "alive"})

    async def readyz(request: Request) -> Response:
        del request
        reasons = await _unready(deps)
        if not reasons:
            return JSONResponse({"status": "ready"})
        problem = Problem(status=503, code="not_ready", message="; ".join(reasons), headers={"retry-after": "1"})
        return JSONResponse({**problem.body(), "reasons": reasons}, status_code=503, headers=dict(problem.headers))

    async def exposition(request: Request) -> Response:
        del request
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    for path, endpoint in zip(_OPEN_PATHS, (healthz, readyz, exposition), strict=True):
        app.add_route(path, endpoint, methods=["GET"])


async def _unready(deps: GatewayDependencies) -> list[str]:
    """Every reason why a request would fail now."""
    reasons: list[str] = []
    try:
        with boundary("the engine", TidegateError):
            health = await deps.engine.health()
        if not health.ready:
            reasons.append(f"engine {deps.engine.replica!r} is not ready: {health.detail}")
    except TidegateError as error:
        reasons.append(str(error))
    try:
        deps.router.resolve(_CHAMPION, episode_id=_NOBODY, user_key=_NOBODY)
        deps.router.end_episode(_NOBODY)
    except NotFoundError as error:
        reasons.append(str(error))
    try:
        with boundary("the store", StoreError):
            reasons.extend(await deps.health())
    except TidegateError as error:
        reasons.append(str(error))
    return reasons
