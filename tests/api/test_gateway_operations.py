"""Health, metrics, the admin API, and taking a port."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from fake_engine import FakeEngine
from gateway_world import BASE_RELEASE, MODEL, World, ask, running_world, until
from tidegate.core.errors import CertificateError, ConfigError, ConflictError, NotFoundError
from tidegate.core.types import JsonObject, Release
from tidegate.gateway import AdminDependencies, create_admin, running_server
from tidegate.release import Router

TOKEN = "admin-token"


async def test_healthz_is_alive_whatever_else_is(world: World) -> None:
    world.engine.ready = False
    assert (await world.call("GET", "/healthz"))[0] == 200


async def test_readyz_when_all_is_well(world: World) -> None:
    status, _, body = await world.call("GET", "/readyz")
    assert (status, body) == (200, {"status": "ready"})


async def test_readyz_gives_every_reason(world: World) -> None:
    world.engine.ready = False
    world.unhealthy.append("the database is read-only")
    router = Router(model_name=MODEL, episode_ttl_s=1.0, clock=lambda: 0.0)
    object.__setattr__(world.deps, "router", router)
    status, headers, body = await world.call("GET", "/readyz")
    assert status == 503
    assert headers["retry-after"] == "1"
    assert body["error"]["code"] == "not_ready"
    assert body["reasons"] == [
        "engine 'fake-0' is not ready: still loading",
        "no release is served yet; the engine is still starting",
        "the database is read-only",
    ]


async def test_readyz_survives_a_check_that_breaks(world: World) -> None:
    async def broken() -> Sequence[str]:
        raise OSError("/secret/path")

    object.__setattr__(world.deps, "health", broken)
    status, _, body = await world.call("GET", "/readyz")
    assert status == 503
    assert body["reasons"] == ["the store failed unexpectedly (OSError); the server's log has the details"]


async def test_readiness_checks_pin_nothing(world: World) -> None:
    await world.call("GET", "/readyz")
    assert not world.router.in_use(BASE_RELEASE)


def sample(text: str, name: str) -> float:
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name + " ")]
    return float(values[0]) if values else 0.0


async def test_metrics_count_what_happened(world: World) -> None:
    await world.post(ask("hi"))
    await world.post(ask("hi", stream=True))
    await world.post(ask("hi", n=0))
    await world.post(ask("hi"), idempotency_key="k")
    await world.post(ask("hi"), idempotency_key="k")
    await world.call("GET", "/v1/models/secret-model-name")
    await world.call("GET", "/some/scanner/path")
    world.recorder.failure = OSError("disk")
    await world.post(ask("hi"))
    _, headers, text = await world.call("GET", "/metrics")
    chat = 'route="/v1/chat/completions"'
    assert headers["content-type"].startswith("text/plain")
    assert sample(text, f'tidegate_requests_total{{{chat},status="200"}}') == 4
    assert sample(text, f'tidegate_requests_total{{{chat},status="400"}}') == 1
    assert sample(text, f'tidegate_requests_total{{{chat},status="503"}}') == 1
    assert sample(text, 'tidegate_requests_total{route="/v1/models/{id}",status="404"}') == 1
    assert sample(text, 'tidegate_requests_total{route="unmatched",status="404"}') == 1
    assert sample(text, f"tidegate_request_seconds_count{{{chat}}}") == 6
    assert sample(text, 'tidegate_tokens_total{kind="prompt"}') == 6
    assert sample(text, 'tidegate_tokens_total{kind="completion"}') == 9
    assert sample(text, 'tidegate_interactions_total{result="recorded"}') == 3
    assert sample(text, 'tidegate_interactions_total{result="failed"}') == 1
    assert sample(text, 'tidegate_generations_total{outcome="finished"}') == 4
    assert sample(text, 'tidegate_generations_total{outcome="replayed"}') == 1
    assert sample(text, "tidegate_first_token_seconds_count") == 4
    assert sample(text, "tidegate_requests_in_flight") == 1  # this one
    assert "scanner" not in text
    assert "secret" not in text


async def test_the_recorders_events_are_read_at_each_scrape(world: World) -> None:
    counts: dict[str, int] = {}
    object.__setattr__(world.deps, "recorder_counts", lambda: counts)
    async with running_server(world.app(), host="127.0.0.1", port=0, option="--port") as port:
        served = World(port=port)
        counts.update({"recorded": 3, "failed.busy": 1})
        _, _, text = await served.call("GET", "/metrics")
        assert sample(text, 'tidegate_recorder_events_total{event="recorded"}') == 3
        assert sample(text, 'tidegate_recorder_events_total{event="failed.busy"}') == 1
        counts["recorded"] = 4
        _, _, text = await served.call("GET", "/metrics")
        assert sample(text, 'tidegate_recorder_events_total{event="recorded"}') == 4


@dataclass
class TwoReplicas:
    states: dict[str, str]
    taken_over: int = 0

    def breakers(self) -> dict[str, str]:
        return self.states

    def failovers(self) -> dict[str, int]:
        return {"busy": self.taken_over}


async def test_the_replicas_are_read_at_each_scrape(world: World) -> None:
    _, _, text = await world.call("GET", "/metrics")
    assert "\ntidegate_replicas_in_service " not in text  # an engine without any
    replicas = TwoReplicas({"a": "closed", "b": "open"})
    object.__setattr__(world.deps, "replicas", replicas)
    async with running_server(world.app(), host="127.0.0.1", port=0, option="--port") as port:
        served = World(port=port)
        _, _, text = await served.call("GET", "/metrics")
        assert sample(text, "tidegate_replicas_in_service") == 1
        states = [(one, state) for one in "ab" for state in ("closed", "open", "half_open")]
        shown = [sample(text, f'tidegate_replica_breaker{{replica="{one}",state="{state}"}}') for one, state in states]
        assert [state for state, value in zip(states, shown, strict=True) if value] == [("a", "closed"), ("b", "open")]
        assert sample(text, 'tidegate_failovers_total{reason="busy"}') == 0
        replicas.states["b"], replicas.taken_over = "closed", 5
        _, _, text = await served.call("GET", "/metrics")
        assert sample(text, "tidegate_replicas_in_service") == 2
        assert sample(text, 'tidegate_failovers_total{reason="busy"}') == 5


async def test_a_client_that_left_is_counted_as_499(world: World) -> None:
    world.engine.hold_at = 1
    timeout = aiohttp.ClientTimeout(total=0.2)
    with pytest.raises(TimeoutError):
        await world.call("POST", "/v1/chat/completions", json=ask(), timeout=timeout)
    await until(lambda: world.recorder.interactions)
    _, _, text = await world.call("GET", "/metrics")
    assert sample(text, 'tidegate_requests_total{route="/v1/chat/completions",status="499"}') == 1
    assert sample(text, 'tidegate_generations_total{outcome="cancelled"}') == 1


async def test_two_apps_in_one_process_count_apart() -> None:
    async with running_world() as one, running_world() as other:
        await one.post(ask())
        _, _, text = await other.call("GET", "/metrics")
        assert sample(text, 'tidegate_interactions_total{result="recorded"}') == 0


RELEASE = Release(
    id="tiny-r1-aaaaaaaa",
    number=1,
    adapter_sha256="a" * 64,
    base_sha256="b" * 64,
    certificate={"kind": "gate"},
    created_at=5.0,
)


@dataclass
class RecordingPublisher:
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    failure: Exception | None = None

    async def publish(self, candidate_id: str, *, against: str) -> Release:
        return self._called("publish", candidate_id, against)

    async def promote(self, release_id: str) -> Release:
        return self._called("promote", release_id)

    async def rollback(self, to: str | None, reason: str) -> Release:
        return self._called("rollback", to, reason)

    async def status(self) -> JsonObject:
        return {"champion": RELEASE.id}

    def _called(self, *call: Any) -> Release:
        if self.failure is not None:
            raise self.failure
        self.calls.append(call)
        return RELEASE


class RecordingTrials:
    def __init__(self, publisher: RecordingPublisher) -> None:
        self._publisher = publisher

    async def start_canary(self, candidate_id: str, *, against: str) -> JsonObject:
        self._publisher._called("canary", candidate_id, against)
        return {"pairs": 0}

    async def stop(self, reason: str) -> JsonObject:
        self._publisher._called("stop", reason)
        return {"decision": "inconclusive"}

    def status(self) -> JsonObject:
        return {"canary": {"pairs": 7}, "holdback": None}


class RecordingShadow:
    """The release in the shadow, which only writes down what it is asked."""

    def __init__(self, publisher: RecordingPublisher) -> None:
        self._publisher = publisher

    async def start(self, release_id: str, share: float) -> JsonObject:
        self._publisher._called("shadow", release_id, share)
        return {"id": "shadow-1"}

    async def stop(self, reason: str) -> JsonObject:
        self._publisher._called("end shadow", reason)
        return {"shadow": "shadow-1"}

    def status(self) -> JsonObject:
        return {"shadow": {"id": "shadow-1"}}


def admin_dependencies(publisher: RecordingPublisher) -> AdminDependencies:
    async def releases() -> Sequence[Release]:
        return [RELEASE]

    return AdminDependencies(
        publisher=publisher,
        live=RecordingTrials(publisher),
        shadow=RecordingShadow(publisher),
        releases=releases,
        new_id=lambda: "0",
    )


@asynccontextmanager
async def running_admin(publisher: RecordingPublisher) -> AsyncGenerator[World]:
    async with running_server(
        create_admin(admin_dependencies(publisher), TOKEN), host="127.0.0.1", port=0, option="--admin-port"
    ) as port:
        yield World(port=port)


async def test_admin_calls_reach_the_publisher() -> None:
    publisher = RecordingPublisher()
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with running_admin(publisher) as admin:
        for path, body in [
            ("publish", {"candidate": "cand-1", "against": "base"}),
            ("promote", {"release": "r0"}),
            ("rollback", {"reason": "worse"}),
            ("rollback", {"to": "r0", "reason": "worse"}),
        ]:
            status, headers, answer = await admin.call("POST", f"/admin/{path}", json=body, headers=bearer)
            assert status == 200
            assert answer["id"] == RELEASE.id
            assert answer["adapter_sha256"] == "a" * 64
            assert headers["x-request-id"]
        status, _, answer = await admin.call("GET", "/admin/releases", headers=bearer)
        assert [release["number"] for release in answer["data"]] == [1]
        status, _, answer = await admin.call("GET", "/admin/status", headers=bearer)
        assert answer == {
            "champion": RELEASE.id,
            "canary": {"pairs": 7},
            "holdback": None,
            "shadow": {"id": "shadow-1"},
        }
    assert publisher.calls == [
        ("publish", "cand-1", "base"),
        ("promote", "r0"),
        ("rollback", None, "worse"),
        ("rollback", "r0", "worse"),
    ]


async def test_admin_calls_reach_the_live_trials() -> None:
    publisher = RecordingPublisher()
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with running_admin(publisher) as admin:
        for path, body, answered in [
            ("canary", {"candidate": "cand-1", "against": "base"}, {"pairs": 0}),
            ("canary/stop", {"reason": "enough"}, {"decision": "inconclusive"}),
        ]:
            status, _, answer = await admin.call("POST", f"/admin/{path}", json=body, headers=bearer)
            assert (status, answer) == (200, answered)
    assert publisher.calls == [("canary", "cand-1", "base"), ("stop", "enough")]


async def test_admin_calls_reach_the_shadow() -> None:
    publisher = RecordingPublisher()
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with running_admin(publisher) as admin:
        for path, body, answered in [
            ("shadow", {"release": "r0", "share": 0.25}, {"id": "shadow-1"}),
            ("shadow", {"release": "r0", "share": 1}, {"id": "shadow-1"}),
            ("shadow/stop", {"reason": "enough"}, {"shadow": "shadow-1"}),
        ]:
            status, _, answer = await admin.call("POST", f"/admin/{path}", json=body, headers=bearer)
            assert (status, answer) == (200, answered)
    assert publisher.calls == [("shadow", "r0", 0.25), ("shadow", "r0", 1.0), ("end shadow", "enough")]


async def test_admin_needs_its_token_everywhere() -> None:
    publisher = RecordingPublisher()
    async with running_admin(publisher) as admin:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": TOKEN}):
            for method, path in (("GET", "status"), ("GET", "releases"), ("POST", "rollback"), ("GET", "nothing")):
                status, _, body = await admin.call(
                    method, f"/admin/{path}", json={"reason": "x"} if method == "POST" else None, headers=headers
                )
                assert status == 401
                assert body["error"]["code"] == "authentication_failed"
    assert not publisher.calls


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (NotFoundError("candidate 'x' does not exist"), 404),
        (ConflictError("nothing to do"), 409),
        (CertificateError("forged"), 403),
        (RuntimeError("bug"), 500),
    ],
)
async def test_admin_refusals_have_openai_shape(failure: Exception, expected: int) -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with running_admin(RecordingPublisher(failure=failure)) as admin:
        wanted = {"candidate": "x", "against": "base"}
        status, _, body = await admin.call("POST", "/admin/publish", json=wanted, headers=bearer)
        assert status == expected
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert "bug" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("publish", {}, "'candidate' is missing"),
        ("shadow", {"release": "r0"}, "'share' is missing"),
        ("shadow", {"release": "r0", "share": 0}, "'share' is 0"),
        ("shadow", {"release": "r0", "share": 1.5}, "'share' is 1.5"),
        ("shadow", {"release": "r0", "share": "0.1"}, "'share' is '0.1'"),
        ("shadow/stop", {"reason": ""}, "'reason' is ''"),
        ("publish", {"candidate": "a"}, "'against' is missing"),
        ("publish", {"candidate": 5, "against": "base"}, "'candidate' is 5"),
        (
            "publish",
            {"candidate": "a", "against": "base", "force": True},
            "'force' is True: extra inputs are not permitted",
        ),
        ("promote", {"release": ""}, "at least 1 character"),
        ("rollback", {}, "'reason' is missing"),
        ("canary", {"candidate": "a"}, "'against' is missing"),
        ("canary/stop", {}, "'reason' is missing"),
    ],
)
async def test_admin_bodies_are_strict(path: str, body: dict[str, Any], told: str) -> None:
    publisher = RecordingPublisher()
    async with running_admin(publisher) as admin:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        status, _, answer = await admin.call("POST", f"/admin/{path}", json=body, headers=bearer)
    assert status == 400
    assert told in answer["error"]["message"]
    assert not publisher.calls


@pytest.mark.parametrize("token", ["", "  "])
def test_admin_without_a_token_does_not_start(token: str) -> None:
    with pytest.raises(ConfigError, match="admin token is empty"):
        create_admin(admin_dependencies(RecordingPublisher()), token)


async def test_a_taken_port_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = f"port {port} on 127.0.0.1 is taken by another process; choose another with --port or server.port"
        with pytest.raises(ConfigError) as caught:
            async with running_server(World().app(), host="127.0.0.1", port=port, option="--port"):
                pytest.fail("the port is taken")
        assert str(caught.value) == told
        with pytest.raises(ConfigError, match=r"with --admin-port or server\.admin_port"):
            async with running_server(World().app(), host="127.0.0.1", port=port, option="--admin-port"):
                pytest.fail("the port is taken")


@pytest.mark.parametrize(
    ("host", "told"),
    [("no.such.host.invalid", "'no.such.host.invalid' is not known"), ("192.0.2.1", "'192.0.2.1' is no address")],
)
async def test_a_host_that_is_not_here(host: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        async with running_server(World().app(), host=host, port=0, option="--port"):
            pytest.fail("the host is not here")


async def test_two_servers_share_a_loop_and_give_their_ports_back() -> None:
    async with running_world() as one, running_world(engine=FakeEngine(answer="other")) as two:
        assert one.port != two.port
        _, _, first = await one.post(ask())
        _, _, second = await two.post(ask())
        assert first["choices"][0]["message"]["content"] != second["choices"][0]["message"]["content"]
    async with running_server(World().app(), host="127.0.0.1", port=one.port, option="--port") as port:
        assert port == one.port
