"""Prometheus metrics of one app. Labels hold routes, statuses, outcomes, replicas; never prompts, users or adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tidegate.gateway.dependencies import Replicas

_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily
_IN_SERVICE = "closed"
BREAKER_STATES = (_IN_SERVICE, "open", "half_open")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """Counters of one gateway, in a registry of its own so that several apps live in one process."""

    def __init__(
        self, recorder_counts: Callable[[], Mapping[str, int]] = dict, replicas: Replicas | None = None
    ) -> None:
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
        self.searches = Counter(
            "tidegate_searches", "Chat requests of which one of several choices was picked.", ("kind",),
            registry=self.registry,
        )  # fmt: skip
        self.search_choices = Counter(
            "tidegate_search_choices", "Choices of best-of searches by what their verifier said.", ("result",),
            registry=self.registry,
        )  # fmt: skip
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

        self.recorder_events = Asked(
            CounterMetricFamily("tidegate_recorder_events", "Recorder events by kind.", labels=("event",)),
            lambda: {(event,): count for event, count in recorder_counts().items()},
        )
        self.replicas_in_service = Asked(
            GaugeMetricFamily("tidegate_replicas_in_service", "Replicas in service, where the engine has any."),
            lambda: {} if replicas is None else _in_service(replicas.breakers()),
        )
        self.replica_breaker = Asked(
            GaugeMetricFamily(
                "tidegate_replica_breaker",
                "1 for the state that a replica's breaker is in: closed (in service), open or half_open, else 0.",
                labels=("replica", "state"),
            ),
            lambda: {} if replicas is None else _one_hot(replicas.breakers()),
        )
        self.failovers = Asked(
            CounterMetricFamily(
                "tidegate_failovers", "Calls that another replica took over, by reason.", labels=("reason",)
            ),
            lambda: {} if replicas is None else {(why,): count for why, count in replicas.failovers().items()},
        )
        for asked in (self.recorder_events, self.replicas_in_service, self.replica_breaker, self.failovers):
            self.registry.register(asked)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class Asked(Collector):
    """One family whose figures others keep; they are asked at each scrape.

    Args:
        family: name, meaning and labels.
        figures: value by values of the labels.
    """

    def __init__(self, family: _Family, figures: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        self._family = family
        self._figures = figures
        self._labelnames: tuple[str, ...] = tuple(vars(family)["_labelnames"])  # the reference pages look for them here

    def describe(self) -> Iterable[_Family]:
        """The family without samples."""
        return (self._family,)

    def collect(self) -> Iterable[_Family]:
        """The family as it stands now."""
        made = type(self._family)(self._family.name, self._family.documentation, labels=self._labelnames)
        for labels, value in sorted(self._figures().items()):
            made.add_metric(labels, value)
        return (made,)


def _in_service(breakers: Mapping[str, str]) -> dict[tuple[str, ...], float]:
    return {(): float(sum(state == _IN_SERVICE for state in breakers.values()))}


def _one_hot(breakers: Mapping[str, str]) -> dict[tuple[str, ...], float]:
    return {(replica, state): float(state == now) for replica, now in breakers.items() for state in BREAKER_STATES}
