"""How an agent episode goes on: model call, tool results, next call, until an answer or a limit.

One description of the agent loop for simulated users, the gate's evaluation and training rollouts; where
the completion comes from (HTTP, an engine) is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tidegate.core.types import Choice, JsonObject, Messages, Task

DEFAULT_MAX_CALLS = 4


class ToolExecutor(Protocol):
    """The slice of an environment that an episode needs."""

    def execute(self, name: str, arguments: str) -> str: ...


Complete: TypeAlias = Callable[[Messages, int], Awaitable[Choice]]
"""Answers the conversation so far; the integer is the number of the call in the episode, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A finished episode: the messages after the task's own, and the choices they came from."""

    messages: Messages
    choices: tuple[Choice, ...]

    @property
    def no_reply(self) -> bool:
        """The last answer holds neither visible text nor a tool call."""
        return not self.choices or not (self.choices[-1].text.strip() or self.choices[-1].tool_calls)

    @property
    def invalid_tool_call(self) -> bool:
        """Some answer opened a tool call that does not parse."""
        return any(choice.invalid_tool_call for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Sampled tokens over all calls, as far as the engine gave them."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def text(self) -> str:
        """Visible text of the last answer."""
        return self.choices[-1].text if self.choices else ""

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools called, in order."""
        return tuple(str(call["function"]["name"]) for choice in self.choices for call in choice.tool_calls)

    @property
    def surprisal(self) -> float | None:
        """Sum of -logprob over the sampled tokens in nats; None when some token has no log-probability."""
        if any(not choice.token_exact or len(choice.logprobs) != len(choice.token_ids) for choice in self.choices):
            return None
        return -math.fsum(logprob for choice in self.choices for logprob in choice.logprobs)


def assistant_message(choice: Choice) -> JsonObject:
    """The chat message that an answer becomes in the next request."""
    message: dict[str, object] = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = list(choice.tool_calls)
    return message


def tool_messages(choice: Choice, environment: ToolExecutor) -> list[JsonObject]:
    """Execute an answer's tool calls in order."""
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": environment.execute(call["function"]["name"], call["function"]["arguments"]),
        }
        for call in choice.tool_calls
    ]


async def run_episode(
    task: Task,
    complete: Complete,
    environment: ToolExecutor | None,
    *,
    max_calls: int = DEFAULT_MAX_CALLS,
) -> Transcript:
    """Run one episode to its end: an answer without tool calls, no environment, or ``max_calls``."""
    added: list[JsonObject] = []
    choices: list[Choice] = []
    for call_number in range(max_calls):
        choice = await complete((*task.messages, *added), call_number)
        choices.append(choice)
        added.append(assistant_message(choice))
        if not choice.tool_calls or environment is None:
            break
        if call_number + 1 < max_calls:
            added.extend(tool_messages(choice, environment))
    return Transcript(messages=tuple(added), choices=tuple(choices))


def transcript_of(task: Task, conversations: Sequence[Messages], choices: Sequence[Choice]) -> Transcript:
    """Rebuild the transcript of a recorded episode.

    Args:
        task: the episode's task.
        conversations: the request messages of each call, in order.
        choices: the answer to each call, in order.
    """
    last = conversations[-1][len(task.messages) :]
    return Transcript(messages=(*last, assistant_message(choices[-1])), choices=tuple(choices))
