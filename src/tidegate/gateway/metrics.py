"""Prometheus metrics of one app. Labels hold routes, statuses and outcomes; never prompts, users or adapters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """Counters of one gateway, in a registry of its own so that several apps live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tidegate_requests", "Requests by route and HTTP status.", ("route", "status"), registry=self.registry
        )
        self.in_flight = Gauge("tidegate_requests_in_flight", "Requests being served now.", registry=self.registry)
        self.request_seconds = Histogram(
            "tidegate_request_seconds",
            "Time from the request's head to the response's last byte.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "tidegate_first_token_seconds",
            "Time from a chat request to its first sampled token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter("tidegate_tokens", "Tokens of answered chat requests.", ("kind",), registry=self.registry)
        self.generations = Counter(
            "tidegate_generations", "Chat requests by how they ended.", ("outcome",), registry=self.registry
        )
        self.interactions = Counter(
            "tidegate_interactions", "Interactions handed to the recorder.", ("result",), registry=self.registry
        )
        self.feedback = Counter(
            "tidegate_feedback", "Feedback by what became of it.", ("result",), registry=self.registry
        )

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
