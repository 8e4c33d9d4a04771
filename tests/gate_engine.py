"""A small world for the gate: an engine whose adapters have a known skill, tasks, a verifier and a policy."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.core.errors import AdapterError, ConfigError, EngineError
from tidegate.core.gate import Outcomes, Pairs
from tidegate.core.gate.policy import (
    GuardrailRules,
    LedgerRules,
    NonInferiorityRules,
    Policy,
    ScreenRules,
    SealedRules,
    TriggerRules,
)
from tidegate.core.hashing import content_hash
from tidegate.core.types import (
    AdapterRef,
    Candidate,
    CandidateState,
    ChoiceEnd,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Json,
    JsonObject,
    Messages,
    Outcome,
    PromptTokens,
    Sampling,
    Task,
    TokenDelta,
)
from tidegate.gate import Arm, Gate, Grading, KeyPair
from tidegate.ports import EngineHealth, ProbeResult
from tidegate.ports.signals import Judgement
from tidegate.stores.memory import MemoryAuditLog, MemorySealedStore

BASE = "b" * 64


def share(*parts: object) -> float:
    """A number in [0, 1) that is fixed by ``parts``."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def adapter(name: str) -> AdapterRef:
    return AdapterRef(name=name, path=Path("/adapters") / name, sha256=content_hash(name))


@dataclass
class ScriptedEngine:
    """Passes a task when its difficulty lies below the adapter's skill; difficulties are fixed by the task's id.

    ``faults`` maps (adapter name, task id) to what happens instead: ``error``, ``hang``, ``silence``,
    ``refusal``, ``bad_call``, ``cut``, or ``once`` (an error the first time only).
    """

    skill: dict[str | None, float] = field(default_factory=dict)
    faults: dict[tuple[str | None, str], str] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    entropy: dict[str | None, float] = field(default_factory=dict)  # factor on the log-probabilities
    logprob: dict[str | None, float] = field(default_factory=dict)  # of any token of a given sequence
    scored: list[tuple[str | None, tuple[int, ...], int]] = field(default_factory=list)
    replica: str = "scripted-0"
    base_sha256: str = BASE
    loaded: dict[str, AdapterRef] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: int = 0
    before: Callable[[GenerationRequest], None] = lambda request: None

    async def load(self, adapter: AdapterRef) -> None:
        if adapter.name not in self.skill:
            raise AdapterError(f"adapter {adapter.name!r} is damaged")
        self.loaded[adapter.name] = adapter
        self.log.append(f"load {adapter.name}")

    async def unload(self, name: str) -> None:
        self.loaded.pop(name, None)
        self.log.append(f"unload {name}")

    async def list_adapters(self) -> tuple[AdapterRef, ...]:
        return tuple(self.loaded.values())

    async def probe(self, name: str, *, against: str | None, prompts: Sequence[Messages]) -> ProbeResult:
        assert prompts
        difference = self.differences.get(name, 1.0)
        return ProbeResult(name=name, sha256=self.loaded[name].sha256, max_logit_difference=difference)

    async def sequence_logprobs(
        self, adapter: str | None, token_ids: Sequence[int], *, first: int = 1
    ) -> tuple[float, ...]:
        if adapter is not None and adapter not in self.loaded:
            raise AdapterError(f"adapter {adapter!r} is not loaded")
        self.scored.append((adapter, tuple(token_ids), first))
        return tuple(self.logprob.get(adapter, -0.1) for _ in token_ids[first:])

    async def health(self) -> EngineHealth:
        return EngineHealth(ready=True, detail="ready", queued=0, running=0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        self.before(request)
        self.requests.append(request)
        if request.adapter is not None and request.adapter not in self.loaded:
            raise AdapterError(f"adapter {request.adapter!r} is not loaded")
        task_id = str(request.messages[0]["content"]).removeprefix("task ")
        fault = self.faults.get((request.adapter, task_id))
        yield PromptTokens(token_ids=(1, 2))
        if fault == "once":
            del self.faults[request.adapter, task_id]
        if fault in ("error", "once"):
            raise EngineError("the engine broke")
        if fault == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        if fault == "cut":
            yield TokenDelta(choice=0, token_ids=(5,), logprobs=(-0.1,), text="righ")
            return
        async for event in self._answer(request, task_id, fault):
            yield event

    async def _answer(
        self, request: GenerationRequest, task_id: str, fault: str | None
    ) -> AsyncIterator[GenerationEvent]:
        if request.tools and len(request.messages) == 1:
            call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            yield TokenDelta(choice=0, token_ids=(4,), logprobs=(-0.1,), tool_calls=(call,))
            yield ChoiceEnd(choice=0, finish_reason=FinishReason.TOOL_CALLS)
            return
        right = share("difficulty", task_id) < self.skill[request.adapter]
        text = {"silence": "", "refusal": "I'm sorry, but I can't help with that."}.get(
            fault or "", "right" if right else "wrong"
        )
        factor = self.entropy.get(request.adapter, 1.0)
        yield TokenDelta(choice=0, token_ids=(5, 6), logprobs=(-0.1 * factor, -0.2 * factor), text=text)
        yield ChoiceEnd(choice=0, finish_reason=FinishReason.STOP, invalid_tool_call=fault == "bad_call")


class ExactVerifier:
    """Passes the answer that equals the reference; ``"raise"``, ``"marked"``, ``"missing"`` or ``"hang"`` break it."""

    name = "exact"
    version = "1"
    graded = False

    def __init__(self) -> None:
        self.hanging: list[Any] = []

    def check_reference(self, reference: Json) -> None:
        del reference

    def judge(self, task: Task, transcript: Sequence[JsonObject]) -> Judgement:
        if task.reference == "raise":
            raise ZeroDivisionError("odd input")
        if task.reference == "marked":
            return Judgement(outcome=Outcome.FAIL, score=0.0, detail="verifier_error: odd input")
        if task.reference == "missing":
            raise ConfigError("the scorer's package is not installed")
        if task.reference == "hang":
            self.hanging.pop().wait()
        passed = task.reference == "anything" or transcript[-1]["content"] == task.reference
        return Judgement(outcome=Outcome.PASS if passed else Outcome.FAIL, score=float(passed), detail="")


class Looker:
    """An environment with one tool; ``broken`` makes it raise."""

    name = "looker"
    tools: tuple[JsonObject, ...] = ({"type": "function", "function": {"name": "look"}},)

    def __init__(self) -> None:
        self.broken = False

    def execute(self, name: str, arguments: str) -> str:
        if self.broken:
            raise OSError("the tool's disk is gone")
        return f"{name} {arguments}"


def make_task(task_id: str, *, kind: str = "sums", reference: Json = "right", with_tools: bool = False) -> Task:
    return Task(
        id=task_id,
        messages=({"role": "user", "content": f"task {task_id}"},),
        tools=Looker.tools if with_tools else (),
        verifier="exact",
        reference=reference,
        kind=kind,
        environment="looker" if with_tools else None,
    )


def make_tasks(count: int, prefix: str = "t") -> list[Task]:
    return [make_task(f"{prefix}{number:04}", kind=("sums", "products")[number % 2]) for number in range(count)]


def sealed_traffic(count: int, prefix: str = "s") -> list[tuple[str, Task]]:
    return [(f"user-{number}", task) for number, task in enumerate(make_tasks(count, prefix))]


def make_policy(**changes: Any) -> Policy:
    """A small policy; ``changes`` name fields as ``section__field`` or ``field``."""
    policy = Policy(
        format=1,
        name="test",
        decoding="traffic",
        canary="none",
        holdback="none",
        collapse="none",
        ledger=LedgerRules(alpha=0.10, error_rate="fdr", looks_per_window=5, looks_per_epoch=3),
        sealed=SealedRules(min_pairs=40, max_pairs=60, max_error_share=0.05, max_age_days=90.0),
        non_inferiority=NonInferiorityRules(
            level=0.05, overall_margin=0.05, anchor_margin=0.05, slice_margin=0.2, min_pairs_per_slice=20
        ),
        guardrails=GuardrailRules(
            no_reply_margin=0.1,
            invalid_tool_call_margin=0.1,
            refusal_margin=0.1,
            length_factor=2.0,
            length_margin=0.2,
            latency_factor=3.0,
            latency_margin=0.2,
        ),
        screen=ScreenRules(
            min_dev_pairs=10, dev_rule="above", max_no_reply_increase=0.1, max_invalid_tool_call_increase=0.1
        ),
        triggers=TriggerRules(
            max_error_ratio=2.0,
            min_calls=20,
            max_disagreement=0.1,
            min_audited=10,
            drift_drop=0.2,
            drift_at=100.0,
            rollbacks_per_window=2,
        ),
    )
    for name, value in changes.items():
        section, _, inner = name.rpartition("__")
        changed = {section: replace(getattr(policy, section), **{inner: value})} if section else {name: value}
        policy = replace(policy, **changed)
    return policy


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one arm did on one task; ``reward`` None follows from ``passed``."""

    passed: bool
    reward: float | None = None
    no_reply: bool = False
    invalid_tool_call: bool = False
    refused: bool = False
    engine_error: bool = False
    verifier_error: bool = False
    tokens: int = 10
    milliseconds: int = 100


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One task and the rows of all arms on it."""

    task_id: str
    kind: str
    challenger: Row
    champion: Row
    anchor: Row | None = None


def columns_of(pairs: Sequence[Pair]) -> Pairs:
    """Pairs in columns, in the given order."""
    kinds = sorted({pair.kind for pair in pairs})

    def outcomes(rows: Sequence[Row]) -> Outcomes:
        flags = ("passed", "no_reply", "invalid_tool_call", "refused", "engine_error", "verifier_error")
        columns: dict[str, Any] = {name: np.array([getattr(row, name) for row in rows], dtype=bool) for name in flags}
        for name in ("tokens", "milliseconds"):
            columns[name] = np.array([getattr(row, name) for row in rows], dtype=np.int64)
        rewards = [float(row.passed) if row.reward is None else row.reward for row in rows]
        return Outcomes(rewards=np.array(rewards, dtype=np.float64), **columns)

    anchors = [pair.anchor for pair in pairs if pair.anchor is not None]
    return Pairs(
        task_ids=tuple(pair.task_id for pair in pairs),
        kinds=tuple(kinds),
        kind=np.array([kinds.index(pair.kind) for pair in pairs], dtype=np.int64),
        challenger=outcomes([pair.challenger for pair in pairs]),
        champion=outcomes([pair.champion for pair in pairs]),
        anchor=outcomes(anchors) if anchors else None,
    )


def make_grading(**changes: Any) -> Grading:
    grading = Grading(
        verifiers={"exact": ExactVerifier()},
        environments={"looker": Looker()},
        max_calls=3,
        concurrency=8,
        timeout_s=30.0,
        clock=(tick * 1e-6 for tick in itertools.count()).__next__,  # records hold whole milliseconds: always 0
    )
    return replace(grading, **changes)


def make_candidate(ref: AdapterRef) -> Candidate:
    return Candidate(
        id=f"cand-{ref.sha256[:8]}",
        adapter_sha256=ref.sha256,
        base_sha256=BASE,
        manifest_hash="m" * 64,
        parent_sha256=None,
        state=CandidateState.PROPOSED,
        created_at=1.0,
        origin="test",
    )


@dataclass
class GateWorld:
    """Stores, engine and key that outlive a gate, so that a test can start another one over them."""

    key: KeyPair
    policy: Policy = field(default_factory=make_policy)
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    audit: Any = field(default_factory=MemoryAuditLog)
    sealed: Any = field(default_factory=MemorySealedStore)
    grading: Grading = field(default_factory=make_grading)
    now: float = 1000.0
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    champion: Arm = field(default_factory=lambda: Arm.of(adapter("champion"), base_sha256=BASE))
    anchor: Arm = field(default_factory=lambda: Arm.of(None, base_sha256=BASE))

    def __post_init__(self) -> None:
        self.engine.skill |= {None: 0.2, "champion": 0.4}

    def gate(self) -> Gate:
        return Gate(
            policy=self.policy,
            audit=self.audit,
            sealed=self.sealed,
            engine=self.engine,
            key=self.key,
            grading=self.grading,
            clock=self._clock,
            on_progress=lambda *progress: self.progress.append(progress),
        )

    def challenger(self, name: str, skill: float) -> tuple[Candidate, Arm]:
        self.engine.skill[name] = skill
        ref = adapter(name)
        return make_candidate(ref), Arm.of(ref, base_sha256=BASE)

    async def certify(
        self, name: str, skill: float, traffic: Sequence[tuple[str, Task]], *, in_the_open: Collection[str] = ()
    ) -> Any:
        candidate, arm = self.challenger(name, skill)
        return await self.gate().certify_candidate(
            candidate,
            challenger=arm,
            champion=self.champion,
            anchor=self.anchor,
            tasks=traffic,
            asked_in_the_open=lambda task: task.id in in_the_open,
            decoding=Sampling(temperature=0.9, stop=("END",), seed=3, n=4),
        )

    async def screen(self, name: str, skill: float, dev: Sequence[Task], **options: Any) -> Any:
        candidate, arm = self.challenger(name, skill)
        return await self.gate().screen_candidate(
            candidate,
            challenger=arm,
            champion=self.champion,
            anchor=self.anchor,
            dev=dev,
            decoding=Sampling(),
            **options,
        )

    def _clock(self) -> float:
        self.now += 1.0
        return self.now
