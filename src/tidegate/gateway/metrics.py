"""Prometheus metrics of one app. Labels hold routes, statuses and outcomes; never prompts, users or adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """Counters of one gateway, in a registry of its own so that several apps live in one process."""

    def __init__(self, recorder_counts: Callable[[], Mapping[str, int]] = dict) -> None:
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
        self.interactions_without_tokens = Counter(
            "tidegate_interactions_without_tokens",
            "Recorded interactions whose tokens the engine did not give; they do not train.",
            registry=self.registry,
        )
        self.feedback = Counter(
            "tidegate_feedback", "Feedback by what became of it.", ("result",), registry=self.registry
        )
        self.shadow_calls = Counter(
            "tidegate_shadow_calls",
            "Calls drawn for the release in the shadow by what became of them.",
            ("outcome",),
            registry=self.registry,
        )
        self.watch_steps = Counter(
            "tidegate_watch_steps", "Looks at live traffic by how they ended.", ("outcome",), registry=self.registry
        )

        self.recorder_events = RecorderEvents(recorder_counts)
        self.registry.register(self.recorder_events)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class RecorderEvents(Collector):
    """The recorder's own counts, asked for at each scrape."""

    _labelnames = ("event",)  # under the name that the library's metrics have, for the reference pages

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The family without samples."""
        return (CounterMetricFamily("tidegate_recorder_events", "Recorder events by kind.", labels=self._labelnames),)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The family as it stands now."""
        (family,) = self.describe()
        for event, count in sorted(self._counts().items()):
            family.add_metric((event,), count)
        return (family,)
