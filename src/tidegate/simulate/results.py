"""What a simulation observed: calls, episodes, and the report over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tidegate.core.types import JsonObject, Messages

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One HTTP request for a completion.

    ``failure`` is None for an answered request, else ``http_<status>``, ``timeout``, ``connection``,
    ``stream_error``, ``incomplete_stream`` or ``malformed_response``. ``latency_s`` is the time to the last byte.
    ``release`` is what the response says answered.
    """

    number: int
    latency_s: float
    streamed: bool
    failure: str | None = None
    error: str = ""
    release: str | None = None
    interaction_id: str | None = None
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """One played episode.

    ``reason`` is what the verifier's detail begins with (``right``, ``wrong``, ``no_reply``, ...) or the failure of the
    request that ended the episode. ``feedback`` has what was sent (``demonstration``, ``thumbs``);
    ``feedback_failures`` why sending failed, in the words of :class:`CallRecord`.
    """

    index: int
    episode_id: str
    user: str
    task_id: str
    kind: str
    passed: bool
    score: float
    reason: str
    detail: str
    calls: tuple[CallRecord, ...]
    messages: Messages
    feedback: tuple[str, ...] = ()
    feedback_failures: tuple[str, ...] = ()

    @property
    def request_failed(self) -> bool:
        """Whether a request failed, so that the model's answer is unknown."""
        return any(call.failure is not None for call in self.calls)

    @property
    def release(self) -> str | None:
        """The release that answered the first call."""
        return self.calls[0].release if self.calls else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of how many episodes passed."""

    episodes: int
    passed: int

    @property
    def rate(self) -> float:
        """Share passed, 0 when there were none."""
        return self.passed / self.episodes if self.episodes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Totals of a simulation.

    ``failures`` counts episodes that did not pass by reason, ``failed_requests`` completion requests by failure,
    ``releases`` answered requests by release. ``latency_s`` has the quantiles ``p50``, ``p90`` and ``p99`` over
    answered requests (nearest rank), empty without any. ``wall_s`` is the time from the first request to the end.
    """

    overall: Share
    by_kind: Mapping[str, Share]
    by_release: Mapping[str, Share]
    failures: Mapping[str, int]
    requests: int
    failed_requests: Mapping[str, int]
    releases: Mapping[str, int]
    latency_s: Mapping[str, float]
    completion_tokens: int
    feedback: Mapping[str, int]
    feedback_failures: Mapping[str, int]
    wall_s: float
    stopped_early: bool

    def to_json(self) -> JsonObject:
        """The report as JSON values, with rates beside the counts."""
        values: dict[str, Any] = asdict(self)
        values["overall"]["rate"] = self.overall.rate
        for name, shares in (("by_kind", self.by_kind), ("by_release", self.by_release)):
            for key, share in shares.items():
                values[name][key]["rate"] = share.rate
        return values


@dataclass(slots=True)
class Tally:
    """Adds episodes up while they come in."""

    _episodes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _passed: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _failures: Counter[str] = field(default_factory=Counter[str])
    _failed_requests: Counter[str] = field(default_factory=Counter[str])
    _releases: Counter[str] = field(default_factory=Counter[str])
    _feedback: Counter[str] = field(default_factory=Counter[str])
    _feedback_failures: Counter[str] = field(default_factory=Counter[str])
    _latencies_s: list[float] = field(default_factory=list[float])
    _requests: int = 0
    _completion_tokens: int = 0

    def add(self, result: EpisodeResult) -> None:
        """Take one more episode."""
        for key in (("all", ""), ("kind", result.kind), ("release", result.release or "unknown")):
            self._episodes[key] += 1
            self._passed[key] += result.passed
        if not result.passed:
            self._failures[result.reason] += 1
        self._feedback.update(result.feedback)
        self._feedback_failures.update(result.feedback_failures)
        for call in result.calls:
            self._requests += 1
            self._completion_tokens += call.completion_tokens
            if call.failure is not None:
                self._failed_requests[call.failure] += 1
            else:
                self._latencies_s.append(call.latency_s)
                self._releases[call.release or "unknown"] += 1

    def report(self, *, wall_s: float, stopped_early: bool) -> SimulationReport:
        """The totals so far."""
        return SimulationReport(
            overall=self._share(("all", "")),
            by_kind=self._shares("kind"),
            by_release=self._shares("release"),
            failures=_sorted(self._failures),
            requests=self._requests,
            failed_requests=_sorted(self._failed_requests),
            releases=_sorted(self._releases),
            latency_s=quantiles(self._latencies_s),
            completion_tokens=self._completion_tokens,
            feedback=_sorted(self._feedback),
            feedback_failures=_sorted(self._feedback_failures),
            wall_s=wall_s,
            stopped_early=stopped_early,
        )

    def _share(self, key: tuple[str, str]) -> Share:
        return Share(episodes=self._episodes[key], passed=self._passed[key])

    def _shares(self, group: str) -> dict[str, Share]:
        return {key[1]: self._share(key) for key in sorted(self._episodes) if key[0] == group}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank quantiles ``p50``, ``p90``, ``p99``; empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{round(share * 100)}": ordered[max(0, -(-round(share * 100) * len(ordered) // 100) - 1)]
        for share in QUANTILES
    }


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))
