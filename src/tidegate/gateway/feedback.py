"""``POST /v1/feedback``: what people and programs say about an interaction or an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidegate.config.settings import ServerSettings
from tidegate.core.errors import NotFoundError, StoreError
from tidegate.core.hashing import content_hash
from tidegate.core.types import Feedback, Json
from tidegate.gateway.body import read_json_object, shown, validated
from tidegate.gateway.chat_schema import Message
from tidegate.gateway.dependencies import GatewayDependencies
from tidegate.gateway.identity import IDEMPOTENCY_HEADER
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.problems import boundary

COMMENT = "comment"
DEMONSTRATION = "demonstration"
_LARGEST_WHOLE_FLOAT = 1 << 53


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | str | float | list):
        return value
    if isinstance(value, int) and abs(value) <= _LARGEST_WHOLE_FLOAT:
        return float(value)
    raise ValueError("a value is true, false, a number up to 2^53 or a string")


def _demonstrated(value: Any) -> list[Any] | None:
    """Messages that would have been right; a string is the one assistant answer."""
    if value is None:
        return None
    messages = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise ValueError("a demonstration is the right answer as a string, or a non-empty list of messages")
    for message in messages:
        try:
            Message.model_validate(message)
        except ValidationError as error:
            raise ValueError(f"message {shown(message)} is not usable: {error.errors()[0]['msg']}") from error
    return messages


class FeedbackRequest(BaseModel):
    """TensorZero's shape. ``comment`` and ``demonstration`` may also stand beside a metric, or alone."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    metric_name: str | None = Field(default=None, min_length=1, max_length=128)
    value: Annotated[Any, AfterValidator(_scalar)] = None
    interaction_id: str | None = Field(default=None, min_length=1, max_length=256)
    inference_id: str | None = Field(default=None, min_length=1, max_length=256)
    episode_id: str | None = Field(default=None, min_length=1, max_length=256)
    tags: dict[str, str] | None = None
    comment: str | None = Field(default=None, min_length=1)
    demonstration: Annotated[Any, AfterValidator(_demonstrated)] = None
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=256)
    dryrun: bool | None = None

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        if self.interaction_id and self.inference_id and self.interaction_id != self.inference_id:
            raise ValueError(
                f"'interaction_id' is {self.interaction_id!r} and its other name 'inference_id' is "
                f"{self.inference_id!r}; send one of them"
            )
        if (self.target_interaction is None) == (self.episode_id is None):
            found = "both are" if self.episode_id else "neither is"
            raise ValueError(f"feedback names exactly one of 'interaction_id' and 'episode_id'; {found} given")
        return self

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if (self.metric_name is None) != (self.value is None):
            missing = "metric_name" if self.metric_name is None else "value"
            raise ValueError(f"{missing!r} is missing; a metric has both 'metric_name' and 'value'")
        if self.metric_name is None and self.comment is None and self.demonstration is None:
            raise ValueError("feedback says nothing; send 'metric_name' and 'value', 'comment' or 'demonstration'")
        if self.metric_name in (COMMENT, DEMONSTRATION) and getattr(self, self.metric_name) is not None:
            raise ValueError(f"{self.metric_name!r} is given as a metric and as a field; send one of them")
        if self.metric_name == COMMENT and not isinstance(self.value, str):
            raise ValueError(f"'value' of metric 'comment' is {shown(self.value)}; it is a string")
        if self.metric_name == DEMONSTRATION:
            _demonstrated(self.value if isinstance(self.value, str | list) else [])
        elif isinstance(self.value, list):
            raise ValueError("'value' is a list, which only metric 'demonstration' has; send a bool, number or string")
        return self

    @property
    def target_interaction(self) -> str | None:
        """The interaction that is meant, under either of its names."""
        return self.interaction_id or self.inference_id

    def statements(self) -> list[tuple[str, Json]]:
        """Each (metric name, value) that the request makes, the metric of its own first."""
        said: list[tuple[str, Json]] = []
        if self.metric_name is not None:
            said.append((self.metric_name, self.value))
        said.extend(
            (name, value) for name, value in ((COMMENT, self.comment), (DEMONSTRATION, self.demonstration)) if value
        )
        return [(name, _demonstrated(value) if name == DEMONSTRATION else value) for name, value in said]


class FeedbackEndpoint:
    """Handler of the route."""

    def __init__(self, deps: GatewayDependencies, metrics: GatewayMetrics, settings: ServerSettings) -> None:
        self._deps = deps
        self._metrics = metrics
        self._max_body_bytes = settings.max_body_bytes
        self._timeout_s = settings.request_timeout_s

    async def handle(self, request: Request) -> Response:
        """Record each statement once; saying it again changes nothing."""
        raw = await read_json_object(
            request.receive, request.headers, max_bytes=self._max_body_bytes, timeout_s=self._timeout_s
        )
        feedback = validated(FeedbackRequest, raw)
        await self._check_target(feedback.target_interaction)
        records = _records(feedback, request.headers, self._deps.clock())
        new = [await self._record(record) for record in records] if not feedback.dryrun else [True]
        return JSONResponse({"feedback_id": records[0].id, "duplicate": not any(new)})

    async def _check_target(self, interaction_id: str | None) -> None:
        if interaction_id is None:
            return
        with boundary("the store", StoreError):
            found = await self._deps.recorder.find(interaction_id)
        if found is None:
            raise NotFoundError(
                f"interaction {interaction_id!r} is not recorded here; send the 'id' of a chat completion",
                param="interaction_id",
            )

    async def _record(self, feedback: Feedback) -> bool:
        with boundary("the recorder", StoreError):
            new = await self._deps.recorder.record_feedback(feedback)
        self._metrics.feedback.labels("recorded" if new else "duplicate").inc()
        return new


def _records(feedback: FeedbackRequest, headers: Headers, now: float) -> Sequence[Feedback]:
    target = {"interaction": feedback.target_interaction, "episode": feedback.episode_id}
    key = feedback.idempotency_key or headers.get(IDEMPOTENCY_HEADER)
    tags = feedback.tags or {}
    records: list[Feedback] = []
    for name, value in feedback.statements():
        said = {"key": key, "caller": headers.get("authorization", "")} if key else {"value": value, "tags": tags}
        records.append(
            Feedback(
                id=f"fb-{content_hash({'metric': name, **target, **said})[:32]}",
                metric_name=name,
                value=value,
                interaction_id=feedback.target_interaction,
                episode_id=feedback.episode_id,
                tags=tags,
                created_at=now,
            )
        )
    return records
