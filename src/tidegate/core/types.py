"""The nouns that every stage shares. Frozen values; no behaviour beyond derived fields.

Messages, tools and tool calls keep the JSON shape of the OpenAI chat API, so that what a client sent is
what the store holds. Times are Unix seconds, durations seconds, log-probabilities natural logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from tidegate.core.sampling import Sampling

Json: TypeAlias = Any
JsonObject: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = tuple[JsonObject, ...]
Tools: TypeAlias = tuple[JsonObject, ...]


class Split(StrEnum):
    """Where a whole user's traffic goes, for good."""

    TRAIN = "train"
    DEV = "dev"
    SEALED = "sealed"


class FinishReason(StrEnum):
    """Why a choice ended (OpenAI's words; ``cancelled`` is ours for a call that was cut short)."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """What a verifier concludes."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    FAIL = "fail"
    ABSTAIN = "abstain"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """An immutable LoRA adapter on disk.

    ``name`` is unique for ever (``<model>-r<N>-<hash8>`` or ``cand-<hash8>``), ``sha256`` is the content
    hash that :func:`tidegate.artifacts.adapter_hash` computes over the directory.
    """

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One model call as an engine sees it. ``adapter`` None is the bare base model.

    ``passed`` holds the fields of a client's body for an engine that passes them on: everything but the model,
    messages, tools, how the answer travels, and who asks. None for calls of our own, which ``sampling`` describes
    whole; an engine that passes nothing on ignores it.
    ``caller``: who takes turns with whom where an engine has a queue, e.g. a keyed hash of the user.
    """

    request_id: str
    messages: Messages
    tools: Tools = ()
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str | None = None
    passed: JsonObject | None = None
    caller: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """First event of a generation: the exact prompt tokens that the engine computed on.

    Empty where the engine does not give them. ``distribution_known``: see :class:`Sampling`. ``confirmed_at_end``: only
    once a choice has ended is it known whether its tokens are all there. ``replica`` names the member that answers,
    where an engine has several; None where the engine's own name says it.
    """

    token_ids: tuple[int, ...]
    distribution_known: bool = True
    confirmed_at_end: bool = False
    replica: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one choice.

    ``token_ids`` and ``logprobs`` have equal length and cover every sampled token, the end-of-turn token
    included; ``logprobs`` are taken at the sampling temperature before top-p/top-k (the distribution
    sampled from when neither filters). ``text`` is the visible content and may be empty (held back while
    a tool call or a stop string may be under way). ``top_logprobs`` has one entry a token: (text, logprob)
    pairs, best first. ``tool_calls`` are whole OpenAI tool-call objects.

    ``token_exact`` False: the engine did not give the id and the log-probability of every token of this choice, here or
    before. Its tokens are then not recorded at all; ``logprobs`` may still go with ``token_texts``, for the client.
    """

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""
    token_texts: tuple[str, ...] = ()
    top_logprobs: tuple[tuple[tuple[str, float], ...], ...] = ()
    tool_calls: tuple[JsonObject, ...] = ()
    token_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """How many tokens the engine says it computed on and sampled, over all choices; for answers without token ids."""

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """Last event of one choice. ``invalid_tool_call``: the text opened a tool call that does not parse."""

    choice: int
    finish_reason: FinishReason
    invalid_tool_call: bool = False


GenerationEvent: TypeAlias = PromptTokens | TokenDelta | TokenCounts | ChoiceEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One complete answer: tokens as the engine produced them, and what they were parsed into.

    ``token_exact`` False: the engine did not give the id and log-probability of every token, so none is kept. Nothing
    stands in for them, and such an answer does not train. ``delivered`` False: a search picked another for the client.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    tool_calls: tuple[JsonObject, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    invalid_tool_call: bool = False
    token_exact: bool = True
    delivered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something that can be asked again and scored by a program.

    ``kind`` is the slice that reports and guardrails are split by. ``reference`` is whatever the named
    verifier compares with. ``environment`` names the registered environment that executes tool calls,
    None when the task has no tools to execute (a tool call then ends the episode). Every answer is held to
    ``json_schema``, the first one to ``tool_choice``, both as in :class:`Sampling`.
    """

    id: str
    messages: Messages
    tools: Tools = ()
    verifier: str
    reference: Json
    kind: str = "default"
    environment: str | None = None
    json_schema: str | None = None
    tool_choice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """One model call, token-exact. Ids are idempotent: a retried request is one record."""

    id: str
    episode_id: str
    user_key: str
    split: Split
    created_at: float
    messages: Messages
    tools: Tools
    sampling: Sampling
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    release_id: str
    engine_replica: str
    latency_s: float
    main_line: bool = True
    consent: bool = True
    task: Task | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The session of one user that its interactions belong to, in order of time."""

    id: str
    user_key: str
    split: Split
    interactions: tuple[Interaction, ...]

    @property
    def task(self) -> Task | None:
        """The replayable task that opened the episode's main line, if its caller declared one."""
        return next((i.task for i in self.interactions if i.main_line and i.task is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one verifier says of one episode. ``score`` in [0, 1]."""

    episode_id: str
    verifier: str
    version: str
    outcome: Outcome
    score: float
    detail: str
    seconds: float
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a person or program said about an interaction or an episode; exactly one of the two is named.

    ``value`` is a bool, a float, a comment (str) or, for ``metric_name == "demonstration"``, the list of
    messages that would have been right after the episode's opening messages.
    """

    id: str
    metric_name: str
    value: Json
    interaction_id: str | None
    episode_id: str | None
    tags: JsonObject
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training sequence, either token-exact or as messages that the trainer renders.

    Token form: ``token_ids`` (T,) and ``loss_mask`` (T,) of 0/1, 1 where a completion token is trained.
    Message form: ``messages`` and ``tools``; the assistant messages at ``trained_messages`` are trained.

    ``logprobs`` (T,) are those recorded when the tokens were sampled, 0 where ``loss_mask`` is 0; empty when they are
    unknown or of a filtered distribution. ``reward`` in [0, 1] is the score of the answer, None for what nobody scored.
    ``group`` is equal for answers to the same prompt, None where no group is known. ``cluster`` names the strategy.
    ``sampled_at`` is the Unix time of the last call, None for what was not sampled.

    The ``id`` of what comes from an episode is the episode's; where an episode gives several examples a space and a
    number follow, which no episode's id may hold.
    """

    id: str
    weight: float
    source: str
    kind: str
    token_ids: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    messages: Messages = ()
    tools: Tools = ()
    trained_messages: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reward: float | None = None
    group: str | None = None
    cluster: str = ""
    sampled_at: float | None = None


class CandidateState(StrEnum):
    """Life of a candidate; :mod:`tidegate.core.lifecycle` owns the transitions."""

    PROPOSED = "proposed"
    SCREENED = "screened"
    CERTIFIED = "certified"
    CANARY = "canary"
    CHAMPION = "champion"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Trained weights that ask to be served. ``id`` is ``cand-<hash8>`` of the adapter's content hash."""

    id: str
    adapter_sha256: str
    base_sha256: str
    manifest_hash: str | None
    parent_sha256: str | None
    state: CandidateState
    created_at: float
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Adapter + base + certificate under a number that is never used again.

    ``adapter_sha256`` None is the bare base model (release 0). ``restores`` names the earlier release
    whose content a rollback serves again.
    """

    id: str
    number: int
    adapter_sha256: str | None
    base_sha256: str
    certificate: JsonObject | None
    created_at: float
    restores: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One line of the hash-chained log: ``hash`` covers every other field."""

    seq: int
    prev_hash: str
    time: float
    kind: str
    body: JsonObject
    hash: str


VERIFIER_ERROR = "verifier:"
"""How ``Answer.error`` begins when a verifier raised on the answer; every other error is the infrastructure's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one adapter did on one task of the gate. ``score`` in [0, 1]; a failure to answer scores 0.

    ``sample`` counts from 0 where the same task is answered several times with different seeds. ``tokens`` sampled
    and ``seconds`` taken are those of the model and its tools, judging left out. ``refused``:
    :func:`tidegate.core.refusals.is_refusal` of the last text. ``text`` is that text, ``tools`` the names of the
    tools called, in order. ``surprisal``: sum of -logprob over the sampled tokens in nats, None where the engine gave
    no log-probabilities.
    """

    task_id: str
    adapter_sha256: str
    sample: int = 0
    seed: int
    passed: bool
    score: float
    no_reply: bool
    invalid_tool_call: bool
    refused: bool
    tokens: int
    seconds: float
    text: str
    tools: tuple[str, ...]
    surprisal: float | None
    error: str | None = None

    @property
    def cut_short(self) -> bool:
        """Whether something other than the model ended the answer, so that it says nothing of the model."""
        return self.error is not None and not self.error.startswith(VERIFIER_ERROR)
