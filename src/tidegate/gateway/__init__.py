"""OpenAI-compatible HTTP in front of an engine: validation, identity, streaming, durable before done."""

from tidegate.gateway.admin import AdminDependencies, Publisher, create_admin
from tidegate.gateway.dependencies import (
    EpisodeRouter,
    GatewayDependencies,
    InteractionRecorder,
    RoutedModel,
)
from tidegate.gateway.factory import create_gateway
from tidegate.gateway.serve import running_server

__all__ = [
    "AdminDependencies",
    "EpisodeRouter",
    "GatewayDependencies",
    "InteractionRecorder",
    "Publisher",
    "RoutedModel",
    "create_admin",
    "create_gateway",
    "running_server",
]
