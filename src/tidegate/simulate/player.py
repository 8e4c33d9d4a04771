"""One simulated user: plays an episode, judges it, and says what it thinks of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import openai

from tidegate.core.chat import response_format, tool_choice
from tidegate.core.errors import ConfigError
from tidegate.core.rollout import DEFAULT_MAX_CALLS, run_episode
from tidegate.core.types import Choice, Messages, Outcome, Sampling, Task
from tidegate.ports import Environment, Verifier
from tidegate.simulate.client import ChatCall, RequestFailedError, complete, post_feedback
from tidegate.simulate.results import CallRecord, EpisodeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackOptions:
    """What users send to ``/v1/feedback`` after an episode; nothing by default.

    ``expert`` gives the messages that solve a task, None when it knows none. A demonstration is sent after a
    failed episode of one of ``demonstrate_kinds``, at most ``demonstrate_count`` times in a simulation; never
    after a failed request. ``thumbs`` sends whether the episode passed after each one.
    """

    expert: Callable[[Task], Messages | None] | None = None
    demonstrate_kinds: frozenset[str] = frozenset()
    demonstrate_count: int = 0
    thumbs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """How users ask. ``stream_share`` in [0, 1] of the calls are streamed; ``seed`` decides which.

    A ``sampling.seed`` is the seed of the first call of the first episode; every other call has one of its own
    derived from it.
    """

    model: str = "champion"
    sampling: Sampling = field(default_factory=Sampling)
    max_calls: int = DEFAULT_MAX_CALLS
    stream_share: float = 0.0
    seed: int = 0
    feedback: FeedbackOptions = field(default_factory=FeedbackOptions)


class Player:
    """Plays episodes for any number of users at once."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        *,
        options: PlayOptions,
        environments: Mapping[str, Environment],
        verifiers: Mapping[str, Verifier],
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._options = options
        self._environments = environments
        self._verifiers = verifiers
        self._clock = clock
        self._demonstrations_left = options.feedback.demonstrate_count

    async def play(self, task: Task, *, index: int, episode_id: str, user: str) -> EpisodeResult:
        """Play one episode to its end.

        Raises:
            ConfigError: the task names a verifier or an environment that is not there.
        """
        verifier = _named(self._verifiers, task.verifier, task, "verifier")
        environment = None
        if task.environment is not None:
            environment = _named(self._environments, task.environment, task, "environment")
        rng = random.Random(f"{self._options.seed}:{index}")  # noqa: S311 - decides who streams, no secret
        headers = {"x-tidegate-episode": episode_id, "x-tidegate-user": user}
        calls: list[CallRecord] = []

        async def answer(messages: Messages, number: int) -> Choice:
            call = ChatCall(
                number=number,
                model=self._options.model,
                messages=messages,
                parameters=self._parameters(task, index, number),
                headers=headers,
                stream=rng.random() < self._options.stream_share,
            )
            choice, record = await complete(self._client, call, clock=self._clock)
            calls.append(record)
            return choice

        try:
            transcript = await run_episode(task, answer, environment, max_calls=self._options.max_calls)
        except RequestFailedError as failed:
            calls.append(failed.record)
            messages: Messages = ()
            passed, score, detail = False, 0.0, failed.record.failure or ""
        else:
            messages = transcript.messages
            judgement = verifier.judge(task, messages)
            passed, score, detail = judgement.outcome is Outcome.PASS, judgement.score, judgement.detail
        result = EpisodeResult(
            index=index,
            episode_id=episode_id,
            user=user,
            task_id=task.id,
            kind=task.kind,
            passed=passed,
            score=score,
            reason=detail.partition(":")[0],
            detail=detail,
            calls=tuple(calls),
            messages=messages,
        )
        return await self._with_feedback(task, result)

    def _parameters(self, task: Task, index: int, number: int) -> dict[str, Any]:
        sampling = self._options.sampling
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if task.tools:
            parameters["tools"] = [dict(tool) for tool in task.tools]
        if task.json_schema is not None:
            parameters["response_format"] = response_format(task.json_schema)
        if task.tool_choice is not None and number == 0:
            parameters["tool_choice"] = tool_choice(task.tool_choice)
        if sampling.seed is not None:
            parameters["seed"] = sampling.seed + index * self._options.max_calls + number
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(sampling, name):
                parameters[name] = getattr(sampling, name)
        if sampling.top_k:
            parameters["extra_body"] = {"top_k": sampling.top_k}
        if number == 0:
            parameters["metadata"] = _metadata(task)
        return parameters

    async def _with_feedback(self, task: Task, result: EpisodeResult) -> EpisodeResult:
        if result.request_failed:
            return result
        bodies: list[tuple[str, Any]] = []
        if self._options.feedback.thumbs:
            bodies.append(("thumbs", result.passed))
        shown = self._demonstration(task, result)
        if shown is not None:
            bodies.append(("demonstration", list(shown)))
        sent: list[str] = []
        failures: list[str] = []
        for name, value in bodies:
            body = {"metric_name": name, "value": value, "episode_id": result.episode_id, "tags": {}}
            failure = await post_feedback(self._client, body)
            if failure is None:
                sent.append(name)
                continue
            failures.append(failure)
            if name == "demonstration":
                self._demonstrations_left += 1
        return replace(result, feedback=tuple(sent), feedback_failures=tuple(failures))

    def _demonstration(self, task: Task, result: EpisodeResult) -> Messages | None:
        feedback = self._options.feedback
        wanted = not result.passed and task.kind in feedback.demonstrate_kinds and self._demonstrations_left > 0
        if not wanted or feedback.expert is None:
            return None
        shown = feedback.expert(task)
        if shown is not None:
            # Taken before the request is sent: others play meanwhile.
            self._demonstrations_left -= 1
        return shown


def _metadata(task: Task) -> dict[str, str]:
    """What makes the episode replayable on the other side."""
    metadata = {
        "tidegate_verifier": task.verifier,
        "tidegate_reference": json.dumps(task.reference, ensure_ascii=False),
        "tidegate_kind": task.kind,
    }
    if task.environment is not None:
        metadata["tidegate_environment"] = task.environment
    return metadata


def _named(registry: Mapping[str, Any], name: str, task: Task, what: str) -> Any:
    found = registry.get(name)
    if found is None:
        raise ConfigError(f"task {task.id!r} names {what} {name!r}; accepted: {sorted(registry)}")
    return found
