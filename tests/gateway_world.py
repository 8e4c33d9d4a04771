"""A live gateway on loopback over a scripted engine, an in-memory recorder and the real router."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from fastapi import FastAPI
from openai import AsyncOpenAI, OpenAI
from starlette.types import Message, Send

from fake_engine import FakeEngine
from tidegate.config.settings import ServerSettings
from tidegate.config.shadow import ShadowSettings
from tidegate.core.errors import RequestError
from tidegate.core.shadow import ShadowAnswer
from tidegate.core.types import Feedback, Interaction, JsonObject, Split, Task
from tidegate.gateway import GatewayDependencies, create_gateway, running_server
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.ports.signals import Judgement
from tidegate.release import RoutedRelease, Router

MODEL = "tiny"
BASE_RELEASE = "tiny-r0-base"
NEXT_RELEASE = "tiny-r1-aaaaaaaa"
DEADLINE_S = 10.0
NOW = 1_700_000_000.0


async def until(condition: Callable[[], Any]) -> None:
    """Poll until ``condition`` holds; a minute's hang becomes a clear failure."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - conditions are plain state of the fakes
            await asyncio.sleep(0.002)


@dataclass
class MemoryRecorder:
    """Keeps records in a dict; fails or waits when told to."""

    interactions: dict[str, Interaction] = field(default_factory=dict)
    feedback: dict[str, Feedback] = field(default_factory=dict)
    shadows: list[ShadowAnswer] = field(default_factory=list)
    failure: Exception | None = None
    hold: asyncio.Event | None = None
    waiting: int = 0

    async def record(self, interaction: Interaction) -> None:
        if self.hold is not None:
            self.waiting += 1
            await self.hold.wait()
            self.waiting -= 1
        if self.failure is not None:
            raise self.failure
        self.interactions.setdefault(interaction.id, interaction)

    async def record_shadow(self, answer: ShadowAnswer) -> None:
        if self.failure is not None:
            raise self.failure
        assert answer.interaction_id in self.interactions, "what is shadowed is durable before"
        self.shadows.append(answer)

    async def record_feedback(self, feedback: Feedback) -> bool:
        if self.failure is not None:
            raise self.failure
        new = feedback.id not in self.feedback
        self.feedback.setdefault(feedback.id, feedback)
        return new

    async def find(self, interaction_id: str) -> Interaction | None:
        return self.interactions.get(interaction_id)


def check_task(task: Task) -> None:
    if task.verifier not in ("numeric", "tool_call"):
        raise RequestError(f"verifier {task.verifier!r} is unknown; choose one of 'numeric', 'tool_call'")


@dataclass
class World:
    """Everything that a test touches."""

    settings: ServerSettings = field(default_factory=ServerSettings)
    shadow: ShadowSettings = field(default_factory=ShadowSettings)
    engine: Any = field(default_factory=FakeEngine)
    passes_fields_on: bool = False
    judge: Callable[[Task, Sequence[JsonObject]], Judgement] | None = None
    recorder: MemoryRecorder = field(default_factory=MemoryRecorder)
    unhealthy: list[str] = field(default_factory=list)
    split_users: list[str] = field(default_factory=list)
    split: Split = Split.TRAIN
    observed: list[tuple[str, str, bool]] = field(default_factory=list)
    now: float = NOW
    port: int = 0
    _app: FastAPI | None = None

    def __post_init__(self) -> None:
        ids = itertools.count()
        self.router = Router(model_name=MODEL, episode_ttl_s=100.0, clock=lambda: self.now)
        self.router.add(RoutedRelease(release_id=BASE_RELEASE, adapter=None), created_at=self.now)
        self.router.add(RoutedRelease(release_id=NEXT_RELEASE, adapter=NEXT_RELEASE), created_at=self.now + 1)
        self.router.point_champion_at(BASE_RELEASE)
        self.deps = GatewayDependencies(
            engine=self.engine,
            router=self.router,
            recorder=self.recorder,
            split_of=self._split_of,
            check_task=check_task,
            clock=lambda: self.now,
            new_id=lambda: f"{next(ids):032x}",
            health=self._health,
            observe_call=lambda *call: self.observed.append(call),
            monotonic=lambda: self.now,
            passes_fields_on=self.passes_fields_on,
            **({} if self.judge is None else {"judge": self.judge}),
        )

    def app(self) -> FastAPI:
        made = create_gateway(self.deps, self.settings, self.shadow)
        self.app_metrics: GatewayMetrics = made.state.metrics
        return made

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def only_record(self) -> Interaction:
        (record,) = self.recorder.interactions.values()
        return record

    def client(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": "test-key", "max_retries": 0, **options})

    def sync_client(self, **options: Any) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "test-key", "max_retries": 0, **options})

    async def call(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers (lower case) and JSON (or text) of one plain HTTP request."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.url}{path}", headers=headers, **options) as response,
        ):
            is_json = response.content_type == "application/json"
            body = await response.json() if is_json else await response.text()
            return response.status, {k.lower(): v for k, v in response.headers.items()}, body

    async def post(
        self, body: Any, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        return await self.call("POST", path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def direct(
        self, path: str, data: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One POST straight into the app, without a socket: for very many small requests."""
        sent: list[Any] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await self.into_app(path, data, headers or {}, send)
        answer_headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], answer_headers, b"".join(message.get("body", b"") for message in sent[1:])

    async def into_app(self, path: str, data: bytes, headers: dict[str, str], send: Send) -> None:
        """One POST by a client that stays connected; its answer goes to ``send``."""
        if self._app is None:
            self._app = self.app()
        given = {"content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }
        incoming: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Message:
            return incoming.pop() if incoming else await asyncio.get_running_loop().create_future()

        await self._app(scope, receive, send)

    def _split_of(self, user_id: str) -> tuple[str, Split]:
        self.split_users.append(user_id)
        return f"key-of-{user_id}", self.split

    async def _health(self) -> Sequence[str]:
        return self.unhealthy


@asynccontextmanager
async def running_world(drain_s: float = 5.0, **parts: Any) -> AsyncGenerator[World]:
    """A world whose gateway is served for the length of the block."""
    world = World(**parts)
    async with running_server(world.app(), host="127.0.0.1", port=0, option="--port", drain_s=drain_s) as port:
        world.port = port
        yield world


def ask(text: str = "what is two plus two?", **fields: Any) -> dict[str, Any]:
    """A request body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "computes",
        "parameters": {"type": "object", "properties": {"i": {"type": "integer"}}, "required": ["i"]},
    },
}
