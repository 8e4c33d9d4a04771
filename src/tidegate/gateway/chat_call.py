"""One chat request from its JSON to what the engine is asked and what the record will say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from tidegate.core.errors import NotFoundError, RequestError
from tidegate.core.generation import GenerationFold
from tidegate.core.searches import Search, SearchKind
from tidegate.core.types import (
    Choice,
    GenerationEvent,
    GenerationRequest,
    Interaction,
    JsonObject,
    Messages,
    Sampling,
    Task,
    TokenDelta,
    Tools,
)
from tidegate.gateway.body import validated
from tidegate.gateway.chat_schema import PASSES_FIELDS_ON, ChatRequest, passed_fields
from tidegate.gateway.dependencies import GatewayDependencies, RoutedModel
from tidegate.gateway.identity import SEARCH_HEADER, Identity, declared_task, identify
from tidegate.gateway.rendering import AnswerShape
from tidegate.gateway.searching import SearchPlan, asked_search, picked_choices, searched


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A validated call. ``started_s`` is monotonic, ``created_at`` Unix seconds; ``plan`` is that of a search."""

    chat: ChatRequest
    identity: Identity
    messages: Messages
    tools: Tools
    sampling: Sampling
    task: Task | None
    created_at: float
    started_s: float
    passed: JsonObject | None = None
    plan: SearchPlan | None = None

    @property
    def delivered_n(self) -> int:
        """Choices that the client gets."""
        return self.sampling.n if self.plan is None else 1

    def engine_request(self, interaction_id: str, adapter: str | None) -> GenerationRequest:
        """What the engine sees: of who asks a keyed hash, of any declared task nothing."""
        return GenerationRequest(
            request_id=interaction_id,
            messages=self.messages,
            tools=self.tools,
            sampling=self.sampling,
            adapter=adapter,
            passed=self.passed,
            caller=self.identity.user_key,
        )

    def answer_shape(self, interaction_id: str, release_id: str, created_at: float) -> AnswerShape:
        """What the response looks like."""
        options = self.chat.stream_options
        return AnswerShape(
            id=interaction_id,
            created=int(created_at),
            model=self.chat.model,
            release_id=release_id,
            logprobs=bool(self.chat.logprobs),
            token_ids=bool(self.chat.return_token_ids),
            include_usage=options is not None and options.include_usage,
        )

    def heard(self, event: GenerationEvent, fold: GenerationFold) -> GenerationEvent:
        """The event as the client may see it: at most one tool call when it asked for no parallel ones."""
        if self.chat.parallel_tool_calls is not False or not isinstance(event, TokenDelta) or not event.tool_calls:
            return event
        called = any(choice.index == event.choice and choice.tool_calls for choice in fold.choices())
        left = () if called else event.tool_calls[:1]
        if len(left) < len(event.tool_calls):
            fold.cut.add(event.choice)
        return replace(event, tool_calls=left)


def plan_call(
    raw: JsonObject, headers: Headers, deps: GatewayDependencies, *, max_search: int, started_s: float
) -> ChatCall:
    """Validate a request down to the declared task and the search; ``max_search`` bounds its choices.

    Raises:
        RequestError: names the field, its value and what is accepted.
    """
    chat = validated(ChatRequest, raw, context=PASSES_FIELDS_ON if deps.passes_fields_on else None)
    messages: Messages = tuple(raw["messages"])
    tools = chat.offered_tools(raw)
    identity = identify(chat, raw, headers, new_id=deps.new_id, split_of=deps.split_of)
    # a helper's call carries its agent's metadata along; its own prompt is not what the task asks
    sampling = chat.sampling()
    task = None
    if identity.main_line:
        task = declared_task(
            chat.metadata or {},
            messages,
            tools,
            json_schema=sampling.json_schema,
            tool_choice=sampling.tool_choice,
        )
    if task is not None:
        deps.check_task(task)
    passed = passed_fields(raw) if deps.passes_fields_on else None
    search, plan = asked_search(chat, headers, most=max_search), None
    if search is not None:
        plan = _search_plan(search, chat, messages, tools, sampling, is_main=identity.main_line, check=deps.check_task)
        sampling = searched(sampling, search)
        passed = None if passed is None else {**passed, "n": search.n}
    return ChatCall(
        chat=chat,
        identity=identity,
        messages=messages,
        tools=tools,
        sampling=sampling,
        task=task,
        created_at=deps.clock(),
        started_s=started_s,
        passed=passed,
        plan=plan,
    )


def _search_plan(
    search: Search,
    chat: ChatRequest,
    messages: Messages,
    tools: Tools,
    sampling: Sampling,
    *,
    is_main: bool,
    check: Callable[[Task], None],
) -> SearchPlan:
    """What a search needs to know; a later call of an episode is judged as the rest of what its first one declared.

    Raises:
        RequestError: a verifier is to decide and there is none.
    """
    if search.kind is SearchKind.MAJORITY:
        return SearchPlan(search=search)
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    opening = messages[: turns[0]] if turns else messages
    task = None
    if is_main:
        task = declared_task(
            chat.metadata or {},
            opening,
            tools,
            json_schema=sampling.json_schema,
            tool_choice=sampling.tool_choice,
        )
    if task is None:
        raise RequestError(
            f"{SEARCH_HEADER} is {str(search)!r}, which a verifier decides, and this call "
            f"{'declares no task' if is_main else 'is on a side line, which has no task'}; send metadata."
            f"tidegate_verifier and tidegate_reference, or 'majority-of-{search.n}'",
            param=SEARCH_HEADER,
        )
    check(task)
    return SearchPlan(search=search, task=task, before=messages[len(opening) :])


def route_call(call: ChatCall, deps: GatewayDependencies) -> RoutedModel:
    """The release that answers.

    Raises:
        NotFoundError: the named model is not served.
    """
    identity = call.identity
    try:
        return deps.router.resolve(call.chat.model, episode_id=identity.episode_id, user_key=identity.user_key)
    except NotFoundError as error:
        raise NotFoundError(str(error), param="model") from error


def to_record(
    call: ChatCall,
    fold: GenerationFold,
    *,
    interaction_id: str,
    release_id: str,
    replica: str,
    latency_s: float,
    picked: int | None = None,
) -> Interaction:
    """The record of a call, whole or cut short; without consent only ids, settings and how it ended are kept.

    ``picked`` is the index of the choice that a search delivers, None where it was cut short or there is no search.
    """
    identity = call.identity
    keep = identity.consent
    choices = tuple(_as_delivered(choice, fold) for choice in fold.all_choices(call.sampling.n))
    if call.plan is not None:
        choices = picked_choices(choices, picked)
    return Interaction(
        id=interaction_id,
        episode_id=identity.episode_id,
        user_key=identity.user_key,
        split=identity.split,
        created_at=call.created_at,
        messages=call.messages if keep else (),
        tools=call.tools if keep else (),
        sampling=fold.as_sampled(call.sampling if keep else _emptied_settings(call.sampling)),
        prompt_token_ids=fold.prompt_token_ids if keep else (),
        choices=tuple(choice if keep else _emptied(choice) for choice in choices),
        release_id=release_id,
        engine_replica=replica,
        latency_s=latency_s,
        main_line=identity.main_line,
        consent=keep,
        task=call.task if keep else None,
    )


def _as_delivered(choice: Choice, fold: GenerationFold) -> Choice:
    """Tokens of calls that the client never got are not those of its answer, which says so and does not train."""
    if choice.index not in fold.cut:
        return choice
    return replace(choice, token_ids=(), logprobs=(), token_exact=False)


def _emptied_settings(sampling: Sampling) -> Sampling:
    return replace(sampling, stop=(), json_schema=None, tool_choice=None)


def _emptied(choice: Choice) -> Choice:
    return replace(choice, token_ids=(), logprobs=(), text="", tool_calls=())
